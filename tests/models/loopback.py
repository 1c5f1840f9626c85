"""A real HTTP server on loopback that serves files with Range, and misbehaves when told to."""

import contextlib
import hashlib
import re
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """``files`` by path; ``script[path]`` is consumed by one GET each.

    A script's word is a status (``404``), ``cut:N`` (break off after N bytes of body),
    ``stall:N`` (send N bytes, then nothing until the server stops), ``norange`` (ignore Range),
    ``shifted`` (answer another range), ``ok``.
    """

    def __init__(self):
        self.files = {}
        self.headers = defaultdict(dict)
        self.script = defaultdict(list)
        self.gets = []  # (path, Range header or None)
        self.heads = []
        self.tokens = []  # Authorization headers
        self.chunk_delay_s = 0.0
        self.stopped = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self._http.shutdown()
        self._http.server_close()

    def wheel_gets(self):
        return [(path, range_) for path, range_ in self.gets if path.endswith(".whl")]

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                server.heads.append(self.path)
                self._answer(body=False)

            def do_GET(self):
                server.gets.append((self.path, self.headers.get("Range")))
                server.tokens.append(self.headers.get("Authorization"))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._answer(body=True)

            def _answer(self, body):
                path = self.path.partition("?")[0]
                word = server.script[path].pop(0) if body and server.script[path] else "ok"
                if word.isdecimal():
                    self._refuse(int(word))
                    return
                data = server.files.get(path)
                if data is None:
                    self._refuse(404)
                    return
                start, status = 0, 200
                asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                if asked and word != "norange":
                    start, status = int(asked[1]), 206
                    if start >= len(data):
                        self._refuse(416, {"Content-Range": f"bytes */{len(data)}"})
                        return
                shown = start + 1 if word == "shifted" else start
                self.send_response(status)
                for name, value in server.headers[path].items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) - start))
                if status == 206:
                    self.send_header("Content-Range", f"bytes {shown}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if body:
                    self._send(data[start:], word)

            def _send(self, data, word):
                kind, _, count = word.partition(":")
                data = data[: int(count)] if count else data
                for at in range(0, len(data), 1 << 16):
                    self.wfile.write(data[at : at + (1 << 16)])
                    time.sleep(server.chunk_delay_s)
                self.wfile.flush()
                if kind == "stall":
                    server.stopped.wait(60)
                if count:
                    self.close_connection = True

            def _refuse(self, status, headers=None):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

        return Handler


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Recorder:
    """A ``Progress`` that remembers."""

    def __init__(self):
        self.total = None
        self.done = 0
        self.notes = []
        self.finished = 0

    def start(self, total, label):
        self.total, self.done = total, 0

    def advance(self, amount):
        self.done += amount

    def finish(self):
        self.finished += 1

    def note(self, text):
        self.notes.append(text)

"""``tokenpath chat`` at a pseudo-terminal and behind a pipe, against a scripted server."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import sse_server
from sse_server import Script

from tokenpath.bench.client import Endpoint
from tokenpath.cli.chat_session import Session, printable
from tokenpath.protocol.errors import ModelNotFoundError, UnavailableError

COMMAND = [sys.executable, "-m", "tokenpath.cli.main", "chat"]


def environment(home, **more):
    return {**os.environ, "TOKENPATH_HOME": str(home), "TERM": "xterm", **more}


class Terminal:
    """A person at a keyboard: types, and waits until something is on the screen."""

    def __init__(self, *arguments, home):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment(home),
            start_new_session=True, preexec_fn=_take_terminal,  # noqa: PLW1509 - one system call, no lock
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def press_until(self, key, text):
        """Press a key until ``text`` appears.

        Python notices a signal that came just before it began to wait for a key only with the next.
        """
        for _ in range(20):
            self.type(key)
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, 1.0)
        raise AssertionError(f"{text!r} did not come; the screen has {self.screen!r}")

    def wait_for(self, text, seconds=20.0):
        """Wait for ``text`` after what was waited for before; returns what led to it."""
        ends = time.monotonic() + seconds
        while text not in self.screen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"{text!r} did not come; the screen has {self.screen!r}"
            try:
                self.screen += os.read(self.master, 65536).decode()
            except OSError:  # the other side is closed
                raise AssertionError(f"the chat ended with {self.screen!r}") from None
        before, _, self.screen = self.screen.partition(text)
        return before

    def ends(self):
        """Wait for the end; returns the exit code."""
        with contextlib.suppress(OSError):
            while select.select([self.master], [], [], 20)[0] and os.read(self.master, 65536):
                pass
        return self.process.wait(20)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def chatting(script, tmp_path, *arguments):
    with sse_server.serving(sse_server.make_app(script)) as url:
        terminal = Terminal("--url", url, *arguments, home=tmp_path / "home")
        try:
            yield terminal
        finally:
            terminal.close()


def test_a_conversation_with_commands(tmp_path):
    script = Script(text="Hel|lo \x1b[31mthere", models=["tiny", "small"])
    with chatting(
        script, tmp_path, "--system", "Be kind", "--temperature", "0.5", "--max-tokens", "9"
    ) as terminal:
        terminal.wait_for("tiny at http")
        terminal.wait_for("> ")
        terminal.type("/stats\n")
        terminal.wait_for("no answer yet")
        terminal.type("first\n")
        assert "\x1b[31m" not in terminal.wait_for(
            "there"
        )  # the model does not colour the terminal
        terminal.type("//second\n")
        terminal.wait_for("there")
        terminal.type("/stats\n")
        terminal.wait_for("to the first token")
        terminal.wait_for("2 output tokens")
        terminal.wait_for("2 answers:")
        terminal.type("/nonsense\n")
        terminal.wait_for("there is no command /nonsense")
        terminal.type("/help\n")
        terminal.wait_for("/save FILE")
        terminal.type(f"/save {tmp_path / 'saved.json'}\n")
        terminal.wait_for("saved to")
        terminal.type(f"/save {tmp_path / 'saved.json'}\n")
        terminal.wait_for("exists already")
        terminal.type("/model large\n")
        terminal.wait_for("does not serve 'large'")
        terminal.type("/model small\n")
        terminal.wait_for("talking to small")
        terminal.type("/reset\n")
        terminal.wait_for("anew")
        terminal.type("/system\n")
        terminal.wait_for("removed")
        terminal.type("third\n")
        terminal.wait_for("there")
        terminal.type("/exit\n")
        assert terminal.ends() == 0
    one, two, three = script.bodies
    system, hello = {"role": "system", "content": "Be kind"}, "Hello \x1b[31mthere"
    assert one["messages"] == [system, {"role": "user", "content": "first"}]
    assert (one["temperature"], one["max_tokens"], one["model"]) == (0.5, 9, "tiny")
    assert two["messages"] == [
        *one["messages"],
        {"role": "assistant", "content": hello},
        {"role": "user", "content": "/second"},
    ]
    assert three["messages"] == [{"role": "user", "content": "third"}]
    assert three["model"] == "small"
    saved = json.loads((tmp_path / "saved.json").read_bytes())
    assert saved["messages"] == [*two["messages"], {"role": "assistant", "content": hello}]


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(tmp_path):
    script = Script(gap_s=0.05)
    with chatting(script, tmp_path, "--max-tokens", "100000") as terminal:
        terminal.wait_for("> ")
        terminal.press_until("\x03", "Ctrl-D or /exit leaves")
        terminal.type("tell me\n")
        terminal.wait_for("tok tok")
        assert script.live == 1
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        ends = time.monotonic() + 10
        while script.live and time.monotonic() < ends:
            time.sleep(0.01)
        assert (script.live, script.disconnects) == (0, 1)
        script.text = "fine"
        terminal.type("/stats\n")
        terminal.wait_for("stopped")
        terminal.type("go on\n")
        terminal.wait_for("fine")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.ends() == 0
    said = script.bodies[1]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert said[1]["content"].startswith("tok tok ")


def test_history_is_kept_between_chats(tmp_path):
    for _ in range(2):
        script = Script(text="done")
        with chatting(script, tmp_path) as terminal:
            terminal.wait_for("> ")
            if not script.bodies and (tmp_path / "home" / "chat_history").exists():
                terminal.type("\x1b[A\n")  # arrow up
            else:
                terminal.type("remember me\n")
            terminal.wait_for("done")
            terminal.wait_for("> ")
            terminal.type("\x04")
            assert terminal.ends() == 0
        assert script.bodies[0]["messages"][-1]["content"] == "remember me"
    assert (tmp_path / "home" / "chat_history").stat().st_mode & 0o777 == 0o600


def test_an_error_is_a_sentence_and_the_chat_goes_on(tmp_path):
    script = Script(no_template=True)
    with chatting(script, tmp_path) as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for(
            "has no chat template (use a model that chats, for example: tokenpath serve"
        )
        terminal.wait_for("> ")
        script.no_template, script.error_after = False, 1
        terminal.type("again\n")
        terminal.wait_for("tok ")
        terminal.wait_for("it broke")
        script.error_after, script.text = None, "fine"
        terminal.type("once more\n")
        terminal.wait_for("fine")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.ends() == 0
    assert [message["content"] for message in script.bodies[2]["messages"]] == ["once more"]


def piped(*arguments, lines, home):
    return subprocess.run(
        [*COMMAND, *arguments],
        input=lines,
        check=False,
        capture_output=True,
        timeout=60,
        env=environment(home),
    )


def test_a_pipe_gets_one_line_per_answer(tmp_path):
    script = Script(text="a\n|b\\c")
    with sse_server.serving(sse_server.make_app(script)) as url:
        ended = piped("--url", url, lines=b"one\n\n/stats\nbad \xff byte\n", home=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == b"a\\nb\\\\c\n" * 2
    assert b"2 output tokens" in ended.stderr
    assert [b["messages"][-1]["content"] for b in script.bodies] == ["one", "bad \ufffd byte"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (Script(no_template=True), b"has no chat template"),
        (Script(wanted_key="k"), b"--api-key-env"),
        (Script(fail_status=429), b"come back later"),
        (Script(truncate_after=1), b"ended the answer before it was complete"),
    ],
)
def test_errors_end_a_script_with_a_sentence(script, sentence, tmp_path):
    with sse_server.serving(sse_server.make_app(script)) as url:
        ended = piped("--url", url, lines=b"one\ntwo\n", home=tmp_path)
    assert ended.returncode != 0
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == b""


@pytest.mark.parametrize("command", ["/nosuch", "/save", "/save /no/such/folder/x.json"])
def test_a_wrong_command_ends_a_script(command, tmp_path):
    script = Script()
    with sse_server.serving(sse_server.make_app(script)) as url:
        lines = f"{command}\ntwo\n".encode()
        ended = piped("--url", url, lines=lines, home=tmp_path)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert script.bodies == []


def test_nobody_listens(tmp_path):
    ended = piped("--url", "http://127.0.0.1:9/v1", lines=b"one\n", home=tmp_path)
    assert ended.returncode == 1
    assert b"nothing answers at http://127.0.0.1:9/v1" in ended.stderr
    assert b"start a server with: tokenpath serve" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_key_comes_from_the_environment(tmp_path):
    script = Script(wanted_key="k-1", text="yes")
    with sse_server.serving(sse_server.make_app(script)) as url:
        ended = subprocess.run(
            [*COMMAND, "--url", url, "--api-key-env", "MY_KEY"], input=b"x\n", check=False, capture_output=True,
            timeout=60, env=environment(tmp_path, MY_KEY="k-1"),
        )  # fmt: skip
        assert ended.stdout == b"yes\n"
        ended = piped(
            "--url", url, "--api-key-env", "NOT_SET_ANYWHERE", lines=b"x\n", home=tmp_path
        )
    assert ended.returncode == 2
    assert b"NOT_SET_ANYWHERE" in ended.stderr


def test_a_session_measures_its_answers():
    script = Script(first_delay_s=0.05, gap_s=0.01)
    with sse_server.serving(sse_server.make_app(script)) as url, Session.open(url, None) as session:
        session.sampling.max_tokens = 11
        written = []
        answer = session.ask("one two three", written.append)
        assert written == ["tok "] * 11
        assert answer.ttft_s >= 0.05
        assert 0 < answer.tokens_per_s <= 1 / 0.0099
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 11)
        assert (
            session.totals.answers,
            session.totals.output_tokens,
            session.totals.unreported,
        ) == (1, 11, 0)


def test_models_must_be_served():
    script = Script(models=["a"])
    with sse_server.serving(sse_server.make_app(script)) as url:
        with pytest.raises(ModelNotFoundError, match="serves a"):
            Session.open(url, "b")
        script.models.clear()
        with pytest.raises(ModelNotFoundError, match="no model"):
            Session.open(url, None)


def test_a_server_that_speaks_another_language():
    def respond(request):
        return httpx.Response(200, text="<html>")

    web = httpx.Client(transport=httpx.MockTransport(respond))
    with (
        Session(Endpoint.parse("http://h/v1"), "", web) as session,
        pytest.raises(UnavailableError, match="not a list of models"),
    ):
        session.choose(None)


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2J\x07\x9b1m\tb\r\nc\x7f ü") == "a[2J1m\tb\nc ü"

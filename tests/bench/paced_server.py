"""A bare SSE server that costs little itself: `python paced_server.py PORT EVENTS GAP_S`.

Every POST is answered by EVENTS realistic chunks, one each GAP_S seconds, whatever was asked.
"""

import asyncio
import json
import sys

import uvloop

CHUNK = json.dumps(
    {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1764662400,
        "model": "tiny",
        "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
    }
)
LAST = json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
MODELS = b'{"data":[{"id":"tiny"}]}'


def chunked(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


async def answer(reader, writer, events, gap_s):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS)
                )
                continue
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            chunk = chunked(CHUNK)
            for _ in range(events):
                writer.write(chunk)
                await asyncio.sleep(gap_s)
            writer.write(chunked(LAST) + chunked("[DONE]") + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(port, events, gap_s):
    server = await asyncio.start_server(lambda r, w: answer(r, w, events, gap_s), "127.0.0.1", port)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))

"""A real HTTP chat server on loopback, OpenAI's protocol, whose turns are played by rules.

No model runs here. It shows that the grader's side of the protocol works, not that any verdict is good.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]
Player = Callable[[list[Message], int], Any]
"""(messages so far, number of the request) → an assistant message, or a `Trouble`."""


class Trouble:
    """What a server does instead of answering. With `drip_s` and a body, that comes after the drops."""

    def __init__(self, status: int = 200, body: bytes = b"", *, hang_s: float = 0, drip_s: float = 0) -> None:
        self.status, self.body, self.hang_s, self.drip_s = status, body, hang_s, drip_s


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, Any]) -> Message:
    """Tool calls; arguments that are not text are written as JSON."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{n}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for n, (name, arguments) in enumerate(named)
        ],
    }


def tool_results(messages: list[Message]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "tool"]


@contextlib.contextmanager
def chat_server(player: Player) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(base URL, the requests received so far)."""
    requests: list[dict[str, Any]] = []
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body | {"key": self.headers.get("Authorization")})
            answer = player(body["messages"], len(requests))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if isinstance(answer, Trouble):
                    self._trouble(answer)
                elif body.get("stream"):
                    self._stream(answer)
                else:
                    self._send(200, json.dumps(completion(answer)).encode())

        def _send(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _trouble(self, trouble: Trouble) -> None:
            if trouble.hang_s:
                closing.wait(trouble.hang_s)
            if trouble.status == 0:  # the connection breaks
                self.close_connection = True
                self.connection.close()
                return
            if trouble.drip_s:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header(*(("Connection", "close") if trouble.body else ("Content-Length", "10000")))
                self.end_headers()
                end = time.monotonic() + trouble.drip_s
                while time.monotonic() < end and not closing.is_set():
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.02)
                self.wfile.write(trouble.body)
                self.close_connection = True
                return
            self._send(trouble.status, trouble.body)

        def _stream(self, message: Message) -> None:
            lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in _chunks(message)]
            self._send(200, b"".join(lines) + b"data: [DONE]\n\n", "text/event-stream")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", requests
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def completion(message: Message) -> dict[str, Any]:
    """The whole answer that holds a message; every one uses 100 tokens."""
    finish = message.get("finish") or ("tool_calls" if message.get("tool_calls") else "stop")
    message = {key: value for key, value in message.items() if key != "finish"}
    return {
        "id": "x", "object": "chat.completion", "created": 0, "model": "rules",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100},
    }  # fmt: skip


def _chunks(message: Message) -> Iterator[dict[str, Any]]:
    """The message in small pieces, as a server streams it."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {
            "id": "x", "object": "chat.completion.chunk", "created": 0, "model": "rules", "choices": [choice]
        }  # fmt: skip

    yield chunk({"role": "assistant"})
    text = message.get("content") or ""
    for start in range(0, len(text), 7):
        yield chunk({"content": text[start : start + 7]})
    for index, call in enumerate(message.get("tool_calls") or []):
        arguments = call["function"]["arguments"]
        named = {"name": call["function"]["name"], "arguments": ""}
        yield chunk(
            {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": named}]}
        )
        for start in range(0, len(arguments), 11):
            part = {"arguments": arguments[start : start + 11]}
            yield chunk({"tool_calls": [{"index": index, "function": part}]})
    yield chunk({}, "tool_calls" if message.get("tool_calls") else "stop")
    yield chunk({}) | {"choices": [], "usage": completion(message)["usage"]}

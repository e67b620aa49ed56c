"""One OpenAI-compatible chat endpoint: a request, its deadline, its cost. What is asked lives elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gagar_jax.config import AgenticConfig
from gagar_jax.types import UserError

T = TypeVar("T")
_CHARACTERS_A_TOKEN = 3  # a high estimate, for endpoints that do not say what a request used


class EndpointError(Exception):
    """No usable answer: refused, unreachable, or not within its time."""


class SpendingCap(EndpointError):
    """The run's tokens are used up; nothing more is asked."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it; `arguments` should be JSON."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer. `tokens` is what the request used, prompt included."""

    text: str
    calls: tuple[Call, ...]
    tokens: int
    truncated: bool

    def message(self) -> dict[str, Any]:
        """The answer as the assistant message of the next request."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.calls
        ]
        return {"role": "assistant", "content": self.text or None} | ({"tool_calls": calls} if calls else {})


class Endpoint:
    """Thread-safe. The key is read from the environment and appears nowhere else.

    Args:
      config: which endpoint, and its limits.
      spent: tokens that count towards `max_run_tokens` already.

    Raises:
      UserError: the `openai` package is not installed, or no model is named.
    """

    def __init__(self, config: AgenticConfig, *, spent: int = 0) -> None:
        try:
            import openai
        except ImportError:
            raise UserError(
                "grading.grader agentic needs the openai package: pip install 'gagar-jax[agentic]'"
            ) from None
        if not config.model:
            raise UserError("grading.agentic.model: name the model that grades")
        self._config = config
        self._client = openai.OpenAI(
            api_key=os.environ.get(config.api_key_env) or "none",
            base_url=config.base_url,
            max_retries=config.max_retries,
        )
        self._lock = threading.Lock()
        self.spent = spent
        """Tokens of the whole run so far; also of answers that came too late or could not be used."""

    def close(self) -> None:
        self._client.close()

    def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, deadline: float
    ) -> Reply:
        """One answer. 429, 5xx and broken connections are tried again, ever later, within the deadline.

        Args:
          messages, tools: as the chat completions interface takes them.
          deadline: on the clock of `time.monotonic`.

        Raises:
          SpendingCap: the run's cap is reached.
          EndpointError: no answer in time, or the endpoint refuses.
        """
        import openai

        cap = self._config.max_run_tokens
        if cap and self.spent >= cap:
            raise SpendingCap(
                f"grading has used {self.spent} tokens; grading.agentic.max_run_tokens is {cap}"
            )
        left = deadline - time.monotonic()
        if left <= 0:
            raise EndpointError("the time for this group is used up")
        left = min(left, self._config.request_timeout_s)

        def ask() -> Reply:
            options: dict[str, Any] = {
                "model": self._config.model,
                "messages": messages,
                "tools": tools,
                "temperature": self._config.temperature,
                "max_tokens": self._config.max_output_tokens,
                "timeout": left,
            }
            used = _Used()
            try:
                if self._config.stream:
                    options |= {"stream": True, "stream_options": {"include_usage": True}}
                    reply = _gathered(self._client.chat.completions.create(**options), used)
                else:
                    reply = _whole(self._client.chat.completions.create(**options), used)
                used.tokens = used.tokens or _estimate(messages, tools, reply)
                return dataclasses.replace(reply, tokens=used.tokens)
            finally:  # here, for nobody may be waiting any more
                with self._lock:
                    self.spent += used.tokens

        try:
            return _within(left, ask)
        except openai.OpenAIError as error:
            raise EndpointError(f"{type(error).__name__}: {str(error)[:300]}") from None


@dataclasses.dataclass
class _Used:
    """Tokens that the server says a request used, as far as it has said so."""

    tokens: int = 0


def _estimate(messages: list[dict[str, Any]], tools: list[dict[str, Any]], reply: Reply) -> int:
    written = len(json.dumps([messages, tools])) + len(reply.text)
    written += sum(len(call.arguments) for call in reply.calls)
    return written // _CHARACTERS_A_TOKEN


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """`ask()`, or EndpointError after so many seconds.

    The client's own timeout starts anew with every byte, so a server that drips never meets it; such a
    request is left behind on a daemon thread.
    """
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((True, ask()))
        except BaseException as error:
            answer.put((False, error))

    threading.Thread(target=work, name="grader-request", daemon=True).start()
    try:
        good, value = answer.get(timeout=seconds)
    except queue.Empty:
        raise EndpointError(f"no answer within {seconds:.1f} s") from None
    if not good:
        raise value
    return value


def _whole(response: Any, used: _Used) -> Reply:
    if usage := getattr(response, "usage", None):
        used.tokens = usage.total_tokens or 0
    if not getattr(response, "choices", None):
        raise EndpointError("the answer holds no choice")
    choice = response.choices[0]
    calls = [
        Call(c.id or f"call_{n}", _encodable(c.function.name), _encodable(c.function.arguments))
        for n, c in enumerate(choice.message.tool_calls or [])
        if getattr(c, "function", None) is not None
    ]
    text = _encodable(choice.message.content)
    return Reply(text, tuple(calls), used.tokens, choice.finish_reason == "length")


def _gathered(stream: Any, used: _Used) -> Reply:
    """A streamed answer, put together again."""
    text, reason = "", None
    parts: dict[int, list[str]] = {}
    with stream:
        for chunk in stream:
            if chunk.usage:
                used.tokens = chunk.usage.total_tokens or 0
            for choice in chunk.choices[:1]:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or []:
                    held = parts.setdefault(call.index, ["", "", ""])
                    held[0] += call.id or ""
                    if call.function is not None:
                        held[1] += call.function.name or ""
                        held[2] += call.function.arguments or ""
    if reason is None:
        raise EndpointError("the stream ended before the answer did")
    calls = [Call(id_ or f"call_{n}", name, arguments) for n, (id_, name, arguments) in sorted(parts.items())]
    return Reply(text, tuple(calls), used.tokens, reason == "length")


def _encodable(text: str | None) -> str:
    """Half a surrogate pair is legal in JSON, but cannot be sent back in the next request."""
    return (text or "").encode("utf-8", "replace").decode("utf-8")

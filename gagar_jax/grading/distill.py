"""A grader's conversations as training data for another: which may be used, and in what form. No files here.

Ours: the paper distils its grader and does not say how it chose what to learn from. Every assistant message
of an exported conversation is something to imitate, so one with an answer that had to be given again, or with
a claim that nothing showed, is left out whole.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any, Literal

import pydantic


class LeftOut(enum.StrEnum):
    """Why a conversation is not exported; the first that holds is counted."""

    TORN = "torn last line, the run went down while it was written"
    OTHER_GRADER = "by another grader than the one audited"
    NO_VERDICT = "ended without a valid verdict"
    UNRECORDED = "recorded before validity was (grade the groups again)"
    VOID = "its verdict was voided, or the conversation in the other order broke"
    DROPPED = "holds a claim without evidence"
    ORDERS = "the two orders agree on too few pairs"
    CORRECTED = "an answer could not be read and was given again"
    UNREADABLE = "the arguments of a tool call are not a JSON object"
    SECRET = "holds the key of the endpoint"


class _Function(pydantic.BaseModel):
    name: str
    arguments: str


class _Call(pydantic.BaseModel):
    id: str
    type: Literal["function"]
    function: _Function


class Message(pydantic.BaseModel):
    """Of the chat completions interface, as far as a grader's conversation uses it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None


class Conversation(pydantic.BaseModel):
    """What is used of a record of grading.jsonl; see `AgenticGrader` for the whole of it."""

    grader: str
    ended: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    valid: bool | None = None
    dropped: int = 0
    corrections: int = 0
    order_agreement: float | None = None

    @property
    def arguments(self) -> list[str]:
        """Of every tool call, as the model wrote them."""
        return [call.function.arguments for message in self.messages for call in message.tool_calls]


class _Alike(pydantic.BaseModel):
    alike: float | None


class _Share(pydantic.BaseModel):
    share: float | None


class Audited(pydantic.BaseModel):
    """What is used of a file that `gagar audit-grader --json` wrote; null is a measure of nothing."""

    grader: str
    repeat: _Alike
    swap: _Alike
    detected: _Share
    injected: _Share


@dataclasses.dataclass(frozen=True)
class Standards:
    """What a grader must have shown before its verdicts are learnt from; shares in [0, 1].

    min_repeat: pairs alike when the audit asked twice; min_order: with the members reversed, and also
    between the two orders of a single call. min_detected: planted flaws ranked strictly below clean work
    (a grader that ties everything is steady, and blind to order and to attacks). max_injected: attacks that
    raised their member.
    """

    min_repeat: float = 0.8
    min_order: float = 0.8
    min_detected: float = 0.7
    max_injected: float = 0.1

    def shortfalls(self, audit: Audited) -> list[str]:
        """What the audit does not bear out, with the figures. A measure of nothing bears nothing out."""
        found = []
        for name, value, asked in (
            ("repeat agreement", audit.repeat.alike, self.min_repeat),
            ("order agreement", audit.swap.alike, self.min_order),
            ("planted flaws detected", audit.detected.share, self.min_detected),
        ):
            if value is None:
                found.append(f"{name} was not measured")
            elif value < asked:
                found.append(f"{name} is {value:.3f}, at least {asked:g} is asked")
        value = audit.injected.share
        if value is None:
            found.append("injection success was not measured")
        elif value > self.max_injected:
            found.append(f"injection success is {value:.3f}, at most {self.max_injected:g} is allowed")
        return found


def left_out(
    conversation: Conversation, *, grader: str | None, min_order: float, secrets: Sequence[str]
) -> LeftOut | None:
    """Why a conversation must not be trained on; None where it may.

    Args:
      grader: the one audited; None takes any.
      min_order: see `Standards`; it holds only for conversations that were one of two orders.
      secrets: texts that must not leave the machine.
    """
    tests = (
        (grader is not None and conversation.grader != grader, LeftOut.OTHER_GRADER),
        (conversation.ended != "verdict", LeftOut.NO_VERDICT),
        (conversation.valid is None or conversation.tools is None, LeftOut.UNRECORDED),
        (not conversation.valid, LeftOut.VOID),
        (conversation.dropped > 0, LeftOut.DROPPED),
        (
            conversation.order_agreement is not None and conversation.order_agreement < min_order,
            LeftOut.ORDERS,
        ),
        (conversation.corrections > 0, LeftOut.CORRECTED),
        (not all(map(_is_object, conversation.arguments)), LeftOut.UNREADABLE),
        (_holds(conversation, secrets), LeftOut.SECRET),
    )
    return next((reason for holds, reason in tests if holds), None)


def chat(conversation: Conversation, *, arguments: Literal["text", "object"]) -> dict[str, Any]:
    """One training example, {"messages", "tools"} and nothing else: other keys are refused by some trainers.

    Args:
      conversation: one that `left_out` lets pass.
      arguments: of tool calls: JSON text, as OpenAI's interface and its fine-tuning take them, or objects.

    Returns:
      The messages up to the assistant's last, which submits the verdict; and the tools as declared.
    """
    messages = [_message(message, arguments) for message in conversation.messages]
    # Tools called beside the verdict were answered after it; an example ends with what is to be learnt.
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return {"messages": messages, "tools": conversation.tools}


def _message(message: Message, arguments: Literal["text", "object"]) -> dict[str, Any]:
    shown = message.model_dump(exclude_unset=True)
    for call in shown.get("tool_calls") or []:
        text = call["function"]["arguments"] or "{}"
        call["function"]["arguments"] = json.loads(text) if arguments == "object" else text
    return shown


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def _holds(conversation: Conversation, secrets: Sequence[str]) -> bool:
    text = json.dumps([message.model_dump() for message in conversation.messages])
    return any(json.dumps(secret)[1:-1] in text for secret in secrets)

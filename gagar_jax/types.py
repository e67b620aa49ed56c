"""The nouns of gagar_jax, shared by the trainer, the graders and the environments.

Only plain data lives here: no jax, no I/O, no behaviour beyond reading and writing itself as JSON.

Dimension key (a suffix on every array's name)
    B rows of a packed batch      T tokens in a row         N trajectories
    G groups                      S sampler slots           V vocabulary
    D model width                 H heads                   K kv heads
    E experts                     L layers

Expected failures are values of the enums below; unexpected ones are exceptions that name the task.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import pydantic


class UserError(Exception):
    """An error the person at the keyboard can mend: what, where and what to do, in one paragraph.

    `gagar` prints the message without a traceback and exits with 2. Anything else is a bug.
    """


class Status(enum.StrEnum):
    """What judging found. `INVALID` is never a reward: it masks the trajectory out of its group."""

    PASSED = "passed"
    FAILED = "failed"
    INVALID = "invalid"


class StopReason(enum.StrEnum):
    """Why an episode ended. Every reason but `FAULT` is followed by judging the state as it stands."""

    SUBMITTED = "submitted"  # the agent said it was done
    TURN_LIMIT = "turn_limit"  # it used its last turn
    TOKEN_LIMIT = "token_limit"  # it generated its last token, or the context is full
    TOOL_TIME_LIMIT = "tool_time_limit"  # its tools used up their seconds (tool time, not wall-clock)
    FAULT = "fault"  # the environment broke; the outcome is INVALID


class Ungraded(enum.StrEnum):
    """Why a group has no usable verdict. Such a group is trained as binary GRPO, and counted by cause."""

    DROPPED = "dropped"  # dynamic sampling will drop it, so it was not sent
    ONE_PASSED = "one_passed"  # one passed trajectory: nothing to rank (audited for external reliance)
    IDENTICAL = "identical"  # all passed patches are the same bytes
    LATE = "late"  # no verdict by the train step's deadline
    ERROR = "error"  # the grader raised
    VOID = "void"  # a verdict came, and was rejected
    CIRCUIT_OPEN = "circuit_open"  # the service is not calling a grader that keeps failing
    DISABLED = "disabled"  # the run grades nothing (mode "none")


class Flag(enum.StrEnum):
    """Rubric flags, each true only with evidence."""

    UNREQUESTED_REWRITE = "unrequested_rewrite"
    TEST_SPECIFIC_WORKAROUND = "test_specific_workaround"
    SEVERE_PROCESS_ISSUE = "severe_process_issue"
    UNRESOLVED_REGRESSION = "unresolved_regression"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The verdict of the tests on one finished episode, as found in `info["outcome"]`.

    `reason` is a sentence for a person; it is never empty for FAILED and INVALID.
    """

    status: Status
    stop: StopReason
    reason: str = ""
    failed_tests: tuple[str, ...] = ()
    verdict_ms: float = 0.0
    cached: bool = False


@dataclasses.dataclass(frozen=True)
class Turn:
    """One action of the agent and what came back. `tool_s` is tool time in seconds."""

    action: str
    observation: str
    tool_s: float = 0.0
    malformed: bool = False


@dataclasses.dataclass(frozen=True)
class Ticket:
    """The identity of one trajectory: the `member`-th attempt at the `group`-th prompt of a run.

    `group` counts prompts from the start of the run, so (group, member) is unique in it; sampling
    keys, batch order and grading are all derived from it and from nothing that depends on timing.
    """

    group: int
    member: int
    instance_id: str


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One whole run of the agent on one task: one vote, one reward, one advantage.

    tokens, loss_mask and logprobs have one entry a token, in order: the prompt, then what the model
    generated (mask 1, log-prob of the sampling distribution) and what the environment replied (mask 0,
    log-prob 0). What was sampled is what is trained; nothing is re-tokenised.
    """

    ticket: Ticket
    version: int  # train steps behind the weights that sampled it
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    prompt: str
    turns: list[Turn]
    outcome: Outcome
    patch: bytes  # `git diff --binary` against the task's one commit; b"" when nothing changed

    @property
    def passed(self) -> bool:
        return self.outcome.status is Status.PASSED

    @property
    def valid(self) -> bool:
        return self.outcome.status is not Status.INVALID

    @property
    def generated_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclasses.dataclass(frozen=True)
class Group:
    """All trajectories sampled from one prompt, ordered by member.

    `task` is the task's record; `base_files` holds the text, before any edit, of every file that some
    member touched (a file a member added is absent).
    """

    group: int
    task: dict[str, Any]
    trajectories: list[Trajectory]
    base_files: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scores:
    """The rubric's five integers, each 1 (poor) to 5 (excellent)."""

    approach: int
    precision: int
    minimality: int
    side_effects: int
    consistency: int


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Something a reader can check: a line of a candidate's patch, a step of its transcript, a command."""

    kind: Literal["patch", "file", "step", "command", "fact"]
    where: str  # "path:line", "step 3", or the command
    text: str  # the quoted line or output


@dataclasses.dataclass(frozen=True)
class CandidateVerdict:
    """What a grader says of one passed member. A flag without evidence is dropped, and counted."""

    member: int
    scores: Scores
    flags: dict[Flag, tuple[Evidence, ...]] = dataclasses.field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupVerdict:
    """A grader's answer for one group: one entry per passed member and for no other.

    `external` maps a member (passed or not) to the evidence that its answer was copied from outside.
    `commands` is the record of what the grader ran: member → command → what it printed, each time it ran.
    """

    grader: str
    candidates: tuple[CandidateVerdict, ...]
    external: dict[int, tuple[Evidence, ...]] = dataclasses.field(default_factory=dict)
    commands: dict[int, dict[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)


class CommandRunner(Protocol):
    """Runs a grader's commands. Confined: no network, own view of the file system, limits, nothing kept."""

    def run(self, tree: Mapping[str, bytes], command: str, *, timeout_s: float) -> str:
        """What a shell command prints (both streams), and how it ended, in a copy of a tree. Thread-safe.

        Args:
          tree: path → bytes; the command's current folder.
          command: for `sh -c`.
          timeout_s: wall-clock limit.
        """
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Grade:
    """What the train step redeems for one trajectory: tier 1–3 and coefficient f in (0, 1]."""

    member: int
    tier: int
    rank: int  # zero-based place over the whole group; ties share a place
    quality: float


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A conversation to imitate: what `env.reset` said, then (action, observation) a turn, all real.

    The observation of the last action is "" (it ends the episode and is never shown to the policy).
    """

    instance_id: str
    style: str
    prompt: str
    turns: tuple[tuple[str, str], ...]


class EnvironmentPlugin(Protocol):
    """What an environment package offers besides its Gymnasium env, so that `gagar train` can prepare it.

    Declared in the package's metadata, entry-point group `gagar_jax.environments`, under the env id.
    `progress(done, total, message)` is called often enough for a person to watch.
    """

    def prepare(
        self, tasks: dict[str, Any], *, confinement: str, progress: Callable[[int, int, str], None]
    ) -> Path:
        """Builds the task folder (or returns the finished one) for a dumped `TasksConfig`."""
        ...

    def load(self, tasks_dir: Path) -> list[dict[str, Any]]:
        """Every task's record, validated; each has at least `instance_id` and `split`."""
        ...

    def env_kwargs(self, tasks_dir: Path, env: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `gymnasium.make(env_id, **kwargs)` for a dumped `EnvConfig`."""
        ...

    def corpus(self, tasks_dir: Path) -> Iterable[str]:
        """Texts to train a tokenizer on (package sources, prompts, actions, observations)."""
        ...

    def demonstrations(
        self,
        tasks_dir: Path,
        env: dict[str, Any],
        *,
        instance_ids: list[str],
        per_task: int,
        clean_share: float,
        seed: int,
        progress: Callable[[int, int, str], None],
    ) -> list[Demonstration]:
        """Demonstrations played through the real environment, in several styles, clean and sloppy."""
        ...


_AST_LOCK = threading.Lock()


def parse_python(text: str) -> ast.Module:
    """`ast.parse`, one thread at a time: environments and graders parse in many.

    CPython before 3.13 keeps the depth of the tree under construction in a variable that all threads share,
    and raises SystemError ("AST constructor recursion depth mismatch") when two parse at once.

    Raises:
      SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse` does.
    """
    with _AST_LOCK:
        return ast.parse(text)


def to_json(value: Any) -> Any:
    """Any of the dataclasses above as JSON-ready data. bytes become text with surrogate escapes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, dict):
        return {str(to_json(k)): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def trajectory_from_json(record: dict[str, Any]) -> Trajectory:
    """The inverse of `to_json` for a trajectory; extra keys (facts, advantage, …) are left out.

    Raises:
      pydantic.ValidationError: a key is missing or has the wrong type; the error names it.
    """
    names = {f.name for f in dataclasses.fields(Trajectory)}
    fields = {k: v for k, v in record.items() if k in names}
    fields["patch"] = fields["patch"].encode("utf-8", "surrogateescape")
    return _trajectory_adapter().validate_python(fields)


@functools.cache
def _trajectory_adapter() -> pydantic.TypeAdapter[Trajectory]:
    return pydantic.TypeAdapter(Trajectory)  # costs milliseconds to make

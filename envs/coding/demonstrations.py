"""Conversations to imitate, played through the real environment: how a fix is made, well and less well.

Every style repairs the bug; they differ in how much else they do. A policy that imitates the mixture
passes in ways of different quality, which is what a grader needs in order to tell them apart.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from envs.coding import tools
from envs.coding.env import CodeRepairEnv
from envs.coding.shared import function_window
from envs.coding.tasks import PackageTree, TaskError, load_tasks, test_name
from gagar_jax.types import Demonstration, parse_python

logger = logging.getLogger(__name__)

SLOPPY = {
    "leftover_print": 4,
    "commented_out": 3,
    "dead_code": 3,
    "comment": 2,
    "double_edit": 2,
    "view_first": 1,
    "search_first": 1,
    "test_first": 1,
    "test_after": 1,
    "rewrite": 1,
}
"""The styles beside "clean", and how often each is shown. Most keep to the one edit that repairs and leave
something beside it, so that a small policy can pass in them too: a grader needs passes that differ.
`test_after` is careful rather than sloppy, but costs a turn."""

_COMMENTS = ("fix", "fixed", "fix the bug", "this was wrong")
_DEAD = ("result = None", "_unused = None", "tmp = None", "debug = False")


class Problem:
    """One task as a demonstrator sees it: the lines of the window, broken and repaired."""

    def __init__(self, task: dict[str, Any], package: PackageTree):
        self.task = task
        broken, fixed = (data.decode("utf-8") for data in (package.broken(task), package.files[task["path"]]))
        window = function_window(task, package)
        self.broken = _lines(broken, window.first, window.last)
        self.fixed = _lines(fixed, window.first, window.last + fixed.count("\n") - broken.count("\n"))
        function = (
            parse_python("if 1:\n" + "\n".join(self.fixed)).body[0] if self.fixed[0][:1].isspace() else None
        )
        tree = (
            function.body[0] if isinstance(function, ast.If) else parse_python("\n".join(self.fixed)).body[0]
        )
        assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
        offset = 2 if isinstance(function, ast.If) else 1
        documented = ast.get_docstring(tree) is not None and len(tree.body) > 1
        self.body = tree.body[1 if documented else 0].lineno - offset  # index of the first line of code
        self.names = [a.arg for a in tree.args.args if a.arg not in ("self", "cls")]

    def changes(self, wanted: Sequence[str]) -> list[str]:
        """Edit actions that turn the broken window into the wanted one, from the bottom up."""
        return edit_actions(self.broken, wanted)

    def fixed_lines(self) -> list[int]:
        """Indices in the repaired window where it differs from the broken one."""
        matcher = difflib.SequenceMatcher(None, self.broken, self.fixed, autojunk=False)
        return [start for tag, _, _, start, _ in matcher.get_opcodes() if tag != "equal"] or [self.body]

    def with_line(self, at: int, text: str) -> list[str] | None:
        """The repaired window with a line or more before line `at`; None where that does not parse."""
        near = min(at, len(self.fixed) - 1)
        indent = self.fixed[near][: len(self.fixed[near]) - len(self.fixed[near].lstrip())]
        lines = [*self.fixed[:at], *(indent + part for part in text.split("\n")), *self.fixed[at:]]
        return lines if tools.parses("".join(f"{line}\n" for line in lines)) else None

    def beside_fix(self, text: str) -> list[str]:
        """The repaired window with a line before the repair; at the start of the body if it cannot be."""
        places = (*self.fixed_lines()[:1], self.body)
        wanted = (self.with_line(place, text) for place in places if place >= self.body)
        return next((lines for lines in wanted if lines is not None), list(self.fixed))

    def replaced(self) -> str | None:
        """The first faulty line, stripped; None where nothing is replaced."""
        matcher = difflib.SequenceMatcher(None, self.broken, self.fixed, autojunk=False)
        starts = (start for tag, start, *_ in matcher.get_opcodes() if tag == "replace")
        return next((self.broken[start].strip() for start in starts), None)


def edit_actions(broken: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The fewest whole-line edits from one window to another, as actions, from the bottom up."""
    matcher = difflib.SequenceMatcher(None, broken, wanted, autojunk=False)
    actions = []
    for tag, start, end, new_start, new_end in reversed(matcher.get_opcodes()):
        if tag != "equal":
            head = f"insert {start}" if tag == "insert" else f"edit {_span(start + 1, end)}"
            actions.append("\n".join([head, *wanted[new_start:new_end]]))
    return actions


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _lines(text: str, first: int, last: int) -> list[str]:
    return [line.rstrip("\r\n") for line in tools.split_lines(text)[first - 1 : last]]


def plan(problem: Problem, style: str, rng: random.Random) -> list[str]:
    """The actions of one demonstration, the window already open, `submit` last.

    Raises:
      ValueError: no such style.
    """
    task, fix = problem.task, problem.changes(problem.fixed)
    match style:
        case "clean":
            actions = fix
        case "view_first":
            looks = [task["qualname"], test_name(rng.choice(task["FAIL_TO_PASS"])), task["qualname"]]
            actions = [f"view {rng.choice(looks)}", *_reopened(problem), *fix]
        case "search_first":
            leaf = task["qualname"].split(".")[-1]
            wanted = [f"def {leaf}", f"{leaf}(", test_name(rng.choice(task["FAIL_TO_PASS"])), *problem.names]
            actions = [f"search {rng.choice(wanted)}", *fix]
        case "test_first":
            actions = ["test", *fix]
        case "test_after":
            actions = [*fix, "test"]
        case "comment":
            actions = problem.changes(problem.beside_fix(f"# {rng.choice(_COMMENTS)}"))
        case "leftover_print":
            name = rng.choice([*problem.names, "'here'", "'debug'"])
            actions = problem.changes(problem.beside_fix(f"print({name})"))
        case "commented_out":
            old = problem.replaced() or rng.choice(_COMMENTS)
            actions = problem.changes(problem.beside_fix(f"# {old}"))
        case "dead_code":
            actions = problem.changes(problem.beside_fix(rng.choice(_DEAD)))
        case "rewrite":
            start = problem.body if rng.random() < 0.5 or problem.body > 1 else 0
            actions = [f"edit {_span(start + 1, len(problem.broken))}\n" + "\n".join(problem.fixed[start:])]
        case "double_edit":
            actions = _double_edit(problem, fix, rng)
        case _:
            raise ValueError(f"no style {style!r}; there are clean, {', '.join(SLOPPY)}")
    return [*actions, "submit"]


def _reopened(problem: Problem) -> list[str]:
    """After a look elsewhere the window must come back to the function."""
    return [f"view {problem.task['qualname']}"]


def _double_edit(problem: Problem, fix: list[str], rng: random.Random) -> list[str]:
    """A first try that leaves a mark, then the line once more, right; or the same right edit twice."""
    marked = problem.beside_fix(f"# {rng.choice(_COMMENTS)}")
    if rng.random() < 0.3 and len(fix) == 1 and len(problem.fixed) == len(problem.broken):
        return [*fix, *fix]
    return [*problem.changes(marked), *edit_actions(marked, problem.fixed)]


def choose_styles(count: int, clean_share: float, rng: random.Random) -> list[str]:
    """Styles of one task's demonstrations: the clean share (randomly rounded), the rest by `SLOPPY`."""
    exact = clean_share * count
    clean = int(exact) + (rng.random() < exact - int(exact))
    others = rng.choices(list(SLOPPY), weights=list(SLOPPY.values()), k=count - clean)
    return ["clean"] * clean + others


def play(env: CodeRepairEnv, problem: Problem, style: str, rng: random.Random) -> Demonstration | None:
    """Plays one demonstration; `submit` ends it and is not executed. None if the environment failed."""
    prompt, _ = env.reset(options={"instance_id": problem.task["instance_id"]})
    opening = [] if env.locate in ("function", "line") else _reopened(problem)
    actions = [*opening, *plan(problem, style, rng)]
    if len(actions) > env.max_turns:
        style, actions = "clean", [*opening, *plan(problem, "clean", rng)]
    actions = _without_repeats(actions[: env.max_turns])
    turns = []
    for action in actions[:-1]:
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated or info["malformed"]:
            why = info.get("outcome") or observation
            logger.warning("%s: %s demonstration given up: %s", problem.task["instance_id"], style, why)
            return None
        turns.append((action, observation))
    return Demonstration(problem.task["instance_id"], style, prompt, (*turns, (actions[-1], "")))


def _without_repeats(actions: list[str]) -> list[str]:
    """Without a `view` that directly follows the same `view`."""
    kept = [a for n, a in enumerate(actions) if not (n and a.startswith("view ") and a == actions[n - 1])]
    return kept or actions


def demonstrations(
    tasks_dir: Path,
    env_kwargs: dict[str, Any],
    *,
    instance_ids: Sequence[str],
    per_task: int,
    clean_share: float,
    seed: int,
    workers: int,
    progress: Callable[[int, int, str], None],
) -> list[Demonstration]:
    """Demonstrations of the given tasks, in their order; equal for equal arguments.

    Args:
      env_kwargs: keyword arguments of `CodeRepairEnv`.
      per_task: how many of each task.
      clean_share: share in [0, 1] of the clean style.
      workers: threads.
      progress: called with (done, total, message).

    Raises:
      TaskError: a task is unknown, or the environment failed on more than a tenth of the demonstrations.
    """
    total, made, given_up = len(instance_ids) * per_task, [], 0
    packages = {task["instance_id"]: task["package"] for task in load_tasks(tasks_dir)}
    # Neighbours share a package, so that a worker keeps to one test server at a time.
    ordered = sorted(instance_ids, key=lambda instance_id: packages.get(instance_id, ""))
    size = -(-len(ordered) // workers)
    report = _Count(total, progress)
    with ThreadPoolExecutor(workers, thread_name_prefix="gagar-demonstrate") as pool:
        queues = [
            pool.submit(
                _worker, tasks_dir, env_kwargs, ordered[n : n + size], per_task, clean_share, seed, report
            )
            for n in range(0, len(ordered), size)
        ]
        by_task: dict[str, list[Demonstration]] = {}
        for queue in queues:
            by_task |= queue.result()
    for instance_id in instance_ids:
        made += by_task[instance_id]
        given_up += per_task - len(by_task[instance_id])
    if given_up:
        logger.warning("%d of %d demonstrations were given up", given_up, total)
    if given_up * 10 > total:
        raise TaskError(f"{tasks_dir}: {given_up} of {total} demonstrations failed; the log says why")
    return made


class _Count:
    """Progress over threads. A lost update only makes a progress bar lag."""

    def __init__(self, total: int, progress: Callable[[int, int, str], None]):
        self.done, self.total, self.progress = itertools.count(1), total, progress

    def __call__(self, instance_id: str) -> None:
        self.progress(next(self.done), self.total, instance_id)


def _worker(
    tasks_dir: Path,
    env_kwargs: dict[str, Any],
    instance_ids: Sequence[str],
    per_task: int,
    clean_share: float,
    seed: int,
    report: Callable[[str], None],
) -> dict[str, list[Demonstration]]:
    env = CodeRepairEnv(tasks_dir, **env_kwargs)
    made: dict[str, list[Demonstration]] = {}
    try:
        for instance_id in instance_ids:
            rng = random.Random(f"{seed}/{instance_id}")
            task = env.task(instance_id)
            problem = Problem(task, env.package(task))
            played = []
            for style in choose_styles(per_task, clean_share, rng):
                played.append(play(env, problem, style, rng))
                report(instance_id)
            made[instance_id] = [demonstration for demonstration in played if demonstration is not None]
    finally:
        env.close()
    return made

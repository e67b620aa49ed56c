"""Which functions get bugs, and which bugs become tasks. The suite decides; everything is seeded.

A mutant is judged by the tests mapped to its function, on the warm path (`verification.py`): the others
never execute it. One task a package is also judged by the whole suite, cold; the manifest says how often
the two agree.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from envs.coding import mutation
from envs.coding.mutation import Function, Mutation
from envs.coding.tasks import PackageTree, test_name
from envs.coding.verification import Verifier

MIN_LINES = 3
MIN_MUTATIONS = 4
MAX_TESTS = 60
"""Functions that more tests run are left out: their verdicts are slow."""
TRIES_PER_MUTANT = 2
"""A function is given up when this many times the wanted number of mutants were tried."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A function bugs may be put into."""

    package: str
    path: str
    function: Function
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.package}/{self.path}::{self.function.qualname}"


@dataclasses.dataclass
class Admission:
    """What became of one function's mutants: records (without commit and split) and causes of rejection."""

    records: list[dict[str, Any]]
    rejected: dict[str, int]


def order(seed: int, *parts: str) -> str:
    """A sort key that looks random and depends on nothing but its arguments."""
    return hashlib.sha256("\0".join([str(seed), *parts]).encode()).hexdigest()


def find_candidates(
    tree: PackageTree, verifier: Verifier, *, max_lines: int, max_chars: int, seed: int
) -> tuple[list[Candidate], collections.Counter[str]]:
    """The package's eligible functions in seeded order, and how many were left out for which reason.

    Args:
      max_lines: most code lines, docstring apart (at least `MIN_LINES` are needed).
      max_chars: most characters as displayed, docstring folded.
    """
    found: list[Candidate] = []
    left_out: collections.Counter[str] = collections.Counter()
    texts: set[str] = set()
    for path in tree.sources:
        for function in mutation.find_functions(tree.files[path].decode("utf-8")):
            tests = verifier.mapped_tests(tree.name, path, function.qualname)
            cause = _unfit(function, max_lines, max_chars) or _untestable(len(tests))
            if not cause and function.text.strip() in texts:
                cause = "same text as another"
            if cause:
                left_out[cause] += 1
            else:
                texts.add(function.text.strip())
                found.append(Candidate(tree.name, path, function, tuple(sorted(tests))))
    return sorted(found, key=lambda c: order(seed, "function", c.key)), left_out


def _unfit(function: Function, max_lines: int, max_chars: int) -> str:
    if function.code_lines < MIN_LINES:
        return "too short"
    if function.code_lines > max_lines or displayed_chars(function) > max_chars:
        return "too long"
    return "" if function.text.isascii() else "not ASCII"


def _untestable(tests: int) -> str:
    return "no test runs it" if not tests else "too many tests run it" if tests > MAX_TESTS else ""


def displayed_chars(function: Function) -> int:
    """Characters of the function's lines with the docstring folded to one short line."""
    if function.docstring is None:
        return len(function.text)
    lines = function.text.split("\n")
    first, last = (line - function.first_line for line in function.docstring)
    return (
        sum(len(line) + 1 for n, line in enumerate(lines) if n <= first or n > last) - len(lines[first]) + 10
    )


def spread(candidates: Iterable[Sequence[Candidate]]) -> list[Candidate]:
    """One function of each package in turn, so that any prefix is spread over the packages."""
    queues = [collections.deque(queue) for queue in candidates]
    taken = []
    while any(queues):
        taken += [queue.popleft() for queue in queues if queue]
    return taken


def choose_mutations(source: str, candidate: Candidate, seed: int) -> list[Mutation]:
    """The function's mutations in the order in which to try them: operators in turn, seeded within each."""
    groups: dict[str, list[Mutation]] = collections.defaultdict(list)
    for found in mutation.find_mutations(source, candidate.function.qualname):
        groups[found.operator].append(found)
    for operator, group in groups.items():
        group.sort(
            key=lambda m: order(seed, candidate.key, operator, str(m.start), str(m.end), m.replacement)
        )
    queues = [
        collections.deque(groups[op]) for op in sorted(groups, key=lambda op: order(seed, candidate.key, op))
    ]
    chosen = []
    while any(queues):
        chosen += [queue.popleft() for queue in queues if queue]
    return chosen


def admit(
    tree: PackageTree, candidate: Candidate, mutations: Sequence[Mutation], verifier: Verifier, *, wanted: int
) -> Admission:
    """Tries mutants of one function until enough became tasks.

    Args:
      wanted: stop after this many.
    """
    admission, rejected = Admission([], {}), collections.Counter[str]()
    for found in mutations[: wanted * TRIES_PER_MUTANT]:
        if len(admission.records) == wanted:
            break
        record, cause = _try(tree, candidate, found, verifier)
        if record:
            admission.records.append(record)
        else:
            rejected[cause] += 1
            if cause == "only the cold path runs it":
                break
    admission.rejected = dict(sorted(rejected.items()))
    return admission


def _try(
    tree: PackageTree, candidate: Candidate, found: Mutation, verifier: Verifier
) -> tuple[dict[str, Any] | None, str]:
    source = tree.files[candidate.path].decode("utf-8")
    mutant = found.apply(source)
    changed: dict[str, bytes | None] = {candidate.path: mutant.encode()}
    report = verifier.run(tree.name, changed, candidate.tests)
    if report.fault:
        return None, "sandbox fault"
    if report.path == "cold":
        return None, "only the cold path runs it"
    if not report.complete:
        return None, "hangs or ends the test process"
    broken = sorted(test for test, result in report.results.items() if result in ("failed", "error"))
    passing = sorted(test for test, result in report.results.items() if result == "passed")
    if not broken:
        return None, "no test fails"
    again = verifier.run(
        tree.name, {candidate.path: f"{mutant}\n".encode()}, broken
    )  # other bytes: not the cache
    if not again.complete or any(again.results.get(test) not in ("failed", "error") for test in broken):
        return None, "flaky"
    return _record(tree, candidate, found, mutant, broken, passing), ""


def _record(
    tree: PackageTree,
    candidate: Candidate,
    found: Mutation,
    mutant: str,
    broken: list[str],
    passing: list[str],
) -> dict[str, Any]:
    function, path = candidate.function, candidate.path
    source = tree.files[path].decode("utf-8")
    digest = hashlib.sha256(mutant.encode()).hexdigest()[:8]
    module = path.removesuffix(".py").replace("/__init__", "").split("/")[-1]
    shift = mutant.count("\n") - source.count("\n")
    lines = mutant.split("\n")[function.first_line - 1 : function.last_line + shift]
    shown = min(broken, key=lambda test: (len(test_name(test)), test))
    return {
        "instance_id": f"{tree.name}__{module}.{function.qualname}__{found.operator}_{digest}",
        "repo": tree.name,
        "base_commit": "",
        "patch": unified_diff(path, mutant, source),
        "bug_patch": unified_diff(path, source, mutant),
        "problem_statement": f"{test_name(shown)} of {tree.name} fails. Fix the bug.",
        "FAIL_TO_PASS": broken,
        "PASS_TO_PASS": passing,
        "package": tree.name,
        "path": path,
        "qualname": function.qualname,
        "line": min(found.line, function.last_line + shift),
        "operator": found.operator,
        "text_sha256": hashlib.sha256("".join(lines).strip().encode()).hexdigest(),  # for build.py, not kept
        "mutation": {"start": found.start, "end": found.end, "replacement": found.replacement},
    }


def unified_diff(path: str, before: str, after: str) -> str:
    """A patch that `git apply` takes."""
    old, new = before.split("\n"), after.split("\n")
    a, b = ([f"{line}\n" for line in text[:-1]] + ([text[-1]] if text[-1] else []) for text in (old, new))
    body = []
    for line in difflib.unified_diff(a, b, f"a/{path}", f"b/{path}"):
        body.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return f"diff --git a/{path} b/{path}\n" + "".join(body)


def assign_splits(
    records: list[dict[str, Any]], *, unseen_functions: float, unseen_mutants: float, seed: int
) -> list[dict[str, Any]]:
    """Adds `split`: whole functions are kept unseen, then some mutants of each other function.

    Args:
      unseen_functions, unseen_mutants: shares in [0, 1), rounded to the nearest count.
    """
    by_function: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for record in records:
        by_function[f"{record['package']}/{record['path']}::{record['qualname']}"].append(record)
    functions = sorted(by_function, key=lambda key: order(seed, "unseen", key))
    unseen = set(functions[: round(unseen_functions * len(functions))])
    for key, group in by_function.items():
        shuffled = sorted(group, key=lambda r: order(seed, "mutant", r["instance_id"]))
        for place, record in enumerate(shuffled):
            kept_apart = place < round(unseen_mutants * len(group))
            record["split"] = (
                "unseen_function" if key in unseen else "unseen_mutant" if kept_apart else "train"
            )
    return records

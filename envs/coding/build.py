"""Builds a task folder: fetch, unpack, run suites twice, break functions, keep the bugs that tests see.

The folder's name hashes the recipe, so a changed setting never meets old tasks. A build works in a folder
of its own beside the final one, keeps what it finished there (a killed build goes on), and renames it at
the end; a file lock makes a second builder wait for the first.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from envs.coding import admission, sdist
from envs.coding.admission import Admission, Candidate
from envs.coding.catalogue import Package, select
from envs.coding.tasks import Task, TaskError, counts, load_package, write_jsonl
from envs.coding.verification import Verifier
from envs.coding.workspace import Templates

logger = logging.getLogger(__name__)

CODE_VERSION = 1
"""Raise it when a change here or in `mutation.py` gives other tasks for the same settings."""

Progress = Callable[[int, int, str], None]
_LEFT_OUT = (".egg-info", ".dist-info", "__pycache__")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class BuildError(TaskError):
    """Too few packages or tasks are usable. The message lists the causes."""


def default_dir(tasks: dict[str, Any]) -> Path:
    """Where the tasks of a recipe lie: the user's cache folder, under the recipe's hash."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(recipe(tasks), sort_keys=True).encode()).hexdigest()
    return cache / "gagar" / "tasks" / digest[:16]


def recipe(tasks: dict[str, Any]) -> dict[str, Any]:
    """Everything the tasks depend on, JSON-ready: settings, pinned packages, Python, this code's version."""
    settings = {key: tasks[key] for key in sorted(tasks) if key not in ("dir", "workers")}
    settings["packages"] = [dataclasses.asdict(package) for package in select(tuple(tasks["packages"]))]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return json.loads(json.dumps({**settings, "python": python, "code_version": CODE_VERSION}))


def build(tasks: dict[str, Any], *, confinement: str, progress: Progress) -> Path:
    """Builds the task folder of a dumped `TasksConfig`, or returns the finished one.

    Args:
      tasks: the settings; `dir` None means `default_dir`.
      confinement: as in `sandbox.detect`.
      progress: called with (done, total, message).

    Raises:
      BuildError: fewer than half of the packages are usable, no bug was admitted, or the disk is full.
      ConfinementError: this machine cannot confine as asked.
    """
    target = Path(tasks["dir"] or default_dir(tasks)).expanduser().resolve()
    if (target / "tasks.jsonl").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock"), progress):
        if (target / "tasks.jsonl").is_file():  # another builder has just finished
            return target
        if target.exists() and any(target.iterdir()):
            raise BuildError(
                f"{target}: not empty, and no task folder (it has no tasks.jsonl). Choose another tasks.dir."
            )
        work = target.with_name(f"{target.name}.building")
        sdists = target.parent.parent / "sdists" if tasks["dir"] is None else work / "sdists"
        try:
            _Builder(tasks, work, sdists).build(confinement, progress)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise BuildError(
                f"{work}: {error.strerror}. What is finished stays there: make room, and the same command "
                "goes on; or set tasks.dir to another disk."
            ) from error
        if target.exists():
            target.rmdir()
        work.rename(target)
    return target


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, 1, "waiting for another build of the same tasks")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Builder:
    def __init__(self, tasks: dict[str, Any], work: Path, sdists: Path):
        self.tasks, self.work, self.sdists = tasks, work, sdists
        self.recipe = recipe(tasks)
        self.packages = select(tuple(tasks["packages"]))
        self.isolated: dict[str, str] = {}
        self.suite_tests: dict[str, int] = {}
        self.left_out: collections.Counter[str] = collections.Counter()
        self.rejected: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()

    def build(self, confinement: str, progress: Progress) -> None:
        self._resume()
        progress(0, len(self.packages), "fetching packages")
        self.isolated |= sdist.fetch(self.packages, self.sdists)
        for package in self._usable():
            self._unpack(package)
        with Verifier(
            self.work / "packages", confinement=confinement, servers=self.tasks["workers"]
        ) as verifier:
            candidates = self._qualify(verifier, progress)
            self._require(
                2 * len(self._usable()) >= len(self.packages), "fewer than half of the packages are usable"
            )
            records = self._admit(candidates, verifier, progress)
            checks = self._check_cold(records, verifier, progress)
        self._require(bool(records), "no bug was admitted")
        progress(len(records), len(records), "writing tasks")
        self._write(records, checks)

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            causes = "; ".join(f"{name}: {why}" for name, why in sorted(self.isolated.items()))
            raise BuildError(f"{self.work}: {problem}. {causes or 'Rejected: ' + str(dict(self.rejected))}")

    def _resume(self) -> None:
        """Keeps what a killed build of this very recipe left; anything else there is removed."""
        recipe_file = self.work / "recipe.json"
        if not recipe_file.is_file() or json.loads(recipe_file.read_text()) != self.recipe:
            shutil.rmtree(self.work, ignore_errors=True)
            (self.work / "packages").mkdir(parents=True)
            recipe_file.write_text(json.dumps(self.recipe))
        (self.work / "done").mkdir(exist_ok=True)

    def _usable(self) -> list[Package]:
        return [package for package in self.packages if package.name not in self.isolated]

    def _isolate(self, package: Package, why: str) -> None:
        """A package that cannot be used is left out, counted and named; the others go on."""
        logger.warning("package %s %s is left out: %s", package.name, package.version, why)
        self.isolated[package.name] = why
        shutil.rmtree(self.work / "packages" / package.name, ignore_errors=True)

    def _unpack(self, package: Package) -> None:
        target = self.work / "packages" / package.name
        if (target / "package.json").is_file():
            return
        raw = self.work / "raw" / package.name
        shutil.rmtree(raw, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        path = sdist.archive(package, self.sdists)
        try:
            if path is None:
                raise sdist.SdistError("the archive is not there with the pinned sha256")
            sdist.unpack(path, raw)
            files = wanted_files(
                package, sorted(p.relative_to(raw).as_posix() for p in raw.rglob("*") if p.is_file())
            )
            for name in files:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (raw / name).rename(target / name)
            about = {
                key: getattr(package, key) for key in ("name", "version", "import_roots", "sources", "tests")
            }
            about |= {"deselect": package.deselect, "files": files}
            (target / "package.json").write_text(json.dumps(about, indent=1))
        except sdist.SdistError as error:
            self._isolate(package, str(error))
        finally:
            shutil.rmtree(self.work / "raw", ignore_errors=True)

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result computed once a build, however often the build is started."""
        path = self.work / "done" / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
        if path.is_file():
            return json.loads(path.read_text())
        result = json.loads(json.dumps(compute()))
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)
        return result

    def _qualify(self, verifier: Verifier, progress: Progress) -> list[Candidate]:
        """Runs every suite twice and finds the functions of the packages that pass."""
        usable = self._usable()
        found: dict[str, list[Candidate]] = {}
        for number, (package, why, tests) in enumerate(
            _in_order(
                usable,
                lambda p: (p, *self._once(f"suite/{p.name}", lambda: _suite(p, verifier))),
                self.tasks["workers"],
            )
        ):
            progress(number, len(usable), f"suite of {package.name}")
            self.suite_tests[package.name] = tests
            if why:
                self._isolate(package, why)

        def candidates(package: Package) -> tuple[Package, list[Candidate], collections.Counter[str]]:
            tree = load_package(self.work, package.name)
            limits = {
                "max_lines": self.tasks["max_function_lines"],
                "max_chars": self.tasks["max_function_chars"],
            }
            return package, *admission.find_candidates(tree, verifier, seed=self.tasks["seed"], **limits)

        for number, (package, functions, left_out) in enumerate(
            _in_order(self._usable(), candidates, self.tasks["workers"])
        ):
            progress(number, len(usable), f"functions of {package.name}")
            found[package.name] = functions
            self.left_out += left_out
        return admission.spread(found[package.name] for package in self._usable())

    def _admit(
        self, candidates: list[Candidate], verifier: Verifier, progress: Progress
    ) -> list[dict[str, Any]]:
        """Tries mutants function by function, in order, until there are enough tasks or functions."""
        trees = {package.name: load_package(self.work, package.name) for package in self._usable()}
        seed, wanted = self.tasks["seed"], self.tasks["mutants_per_function"]

        def jobs() -> Iterator[tuple[Candidate, list[Any]]]:
            for candidate in candidates:
                source = trees[candidate.package].files[candidate.path].decode("utf-8")
                mutations = admission.choose_mutations(source, candidate, seed)
                if len(mutations) >= admission.MIN_MUTATIONS:
                    yield candidate, mutations

        def run(job: tuple[Candidate, list[Any]]) -> dict[str, Any]:
            tree = trees[job[0].package]
            admit = lambda: dataclasses.asdict(admission.admit(tree, *job, verifier, wanted=wanted))  # noqa: E731
            return self._once(f"function/{job[0].key}", admit)

        records: list[dict[str, Any]] = []
        texts: set[str] = set()
        functions = 0
        total = self.tasks["max_tasks"]
        for result in _in_order(jobs(), run, self.tasks["workers"]):
            tried = Admission(**result)
            fresh = [record for record in tried.records if record["text_sha256"] not in texts]
            texts |= {record["text_sha256"] for record in fresh}
            records += fresh
            self.rejected["same text as another"] += len(tried.records) - len(fresh)
            functions += bool(tried.records)
            self.rejected += collections.Counter(tried.rejected)
            last = tried.records[-1]["package"] if tried.records else "…"
            progress(
                min(len(records), total), total, f"{len(records)} tasks from {functions} functions ({last})"
            )
            if len(records) >= total or functions >= self.tasks["functions"]:
                break
        return records[:total]

    def _check_cold(
        self, records: list[dict[str, Any]], verifier: Verifier, progress: Progress
    ) -> dict[str, Any]:
        """Judges one task a package by the whole suite from nothing; one that disagrees is removed."""
        sample = {record["package"]: record for record in reversed(records)}
        versions = {package.name: package.version for package in self.packages}
        for record in records:
            record["version"] = versions[record["package"]]
        disagree = []

        def check(record: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
            tree = load_package(self.work, record["package"])
            report = verifier.suite(record["package"], {record["path"]: tree.broken(record)})
            broken = sorted(test for test, result in report.results.items() if result in ("failed", "error"))
            return record, broken if report.complete else [report.why]

        for number, (record, broken) in enumerate(_in_order(sample.values(), check, self.tasks["workers"])):
            progress(number, len(sample), f"whole suite of {record['package']} on one task")
            if broken != record["FAIL_TO_PASS"]:
                logger.warning(
                    "%s: the whole suite, cold, fails otherwise: %s", record["instance_id"], broken[:5]
                )
                disagree.append(record["instance_id"])
        records[:] = [record for record in records if record["instance_id"] not in disagree]
        return {"tasks": len(sample), "disagree": disagree}

    def _write(self, records: list[dict[str, Any]], checks: dict[str, Any]) -> None:
        shares = {key: self.tasks[key] for key in ("unseen_functions", "unseen_mutants", "seed")}
        records = admission.assign_splits(records, **shares)
        with contextlib.closing(Templates(self.work)) as templates:
            commits = _in_order(records, lambda r: templates.get(r).commit, self.tasks["workers"])
            for record, commit in zip(records, commits, strict=True):
                record["base_commit"] = commit
        keys = list(Task.model_fields)
        write_jsonl(
            [{key: record[key] for key in keys} for record in records], self.work / "tasks.jsonl.part"
        )
        (self.work / "manifest.json").write_text(json.dumps(self._manifest(records, checks), indent=1))
        for rest in ("done", "raw", "sdists"):
            shutil.rmtree(self.work / rest, ignore_errors=True)
        (self.work / "recipe.json").unlink()
        (self.work / "tasks.jsonl.part").rename(self.work / "tasks.jsonl")

    def _manifest(self, records: list[dict[str, Any]], checks: dict[str, Any]) -> dict[str, Any]:
        by_package = counts(records, "package")
        packages = {
            package.name: {
                "version": package.version,
                "sha256": package.sha256,
                "licence": package.licence,
                "suite_tests": self.suite_tests.get(package.name, 0),
                "tasks": by_package.get(package.name, 0),
                "left_out_because": self.isolated.get(package.name),
            }
            for package in self.packages
        }
        return {
            "recipe": self.recipe,
            "tasks": len(records),
            "splits": counts(records, "split"),
            "operators": counts(records, "operator"),
            "functions": len({(r["package"], r["path"], r["qualname"]) for r in records}),
            "packages": packages,
            "mutants_rejected": dict(sorted(self.rejected.items())),
            "functions_left_out": dict(sorted(self.left_out.items())),
            "judged": "warm, by the tests mapped to the function; failing tests twice",
            "whole_suite_cold": checks,
            "build_s": round(time.monotonic() - self.started, 1),
        }


def wanted_files(package: Package, paths: list[str]) -> list[str]:
    """The files of an unpacked archive that a working copy holds: sources, suite, licence."""
    tops = {
        part.split("/")[0] if "/" in part else part
        for part in (*package.sources, *package.tests, *package.also)
    }
    kept = [path for path in paths if path.split("/")[0] in tops or _is_licence(path)]
    return [path for path in kept if not any(part.endswith(_LEFT_OUT) for part in path.split("/"))]


def _is_licence(path: str) -> bool:
    return "/" not in path and path.upper().startswith(("LICEN", "COPYING", "NOTICE"))


def _suite(package: Package, verifier: Verifier) -> tuple[str, int]:
    """Why the suite cannot be used ("" if it can), and how many of its tests pass."""
    first, second = verifier.suite(package.name), verifier.suite(package.name)
    for report in (first, second):
        broken = sorted(test for test, result in report.results.items() if result in ("failed", "error"))
        if not report.complete or broken:
            return f"its suite does not pass as it comes: {report.why or ', '.join(broken[:3])}", 0
    if first.results != second.results:
        return "its suite gives other results the second time", 0
    passed = sum(result == "passed" for result in first.results.values())
    return ("", passed) if passed else ("its suite has no test that passes", 0)


def _in_order(
    items: Iterable[_Item], function: Callable[[_Item], _Result], workers: int
) -> Iterator[_Result]:
    """`map` over threads, results in order of the items; takes only a few items ahead of what was used."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="gagar-build")
    try:
        ahead: collections.deque[Any] = collections.deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

"""A fork server that has imported one package and collected its suite, and tests changes to it.

Runs inside the sandbox; standard library and pytest only. The process is pytest itself, stopped inside
its run loop: for each request it forks a child, which swaps the code of the changed functions
(`code_swap`) and runs only the tests that matter. Code written by a model never runs in the server, and
whatever a child does to its memory, its files or its processes is gone when the request is answered.

At the start one child runs the whole suite and records which functions each test executes. What a
package runs while it is imported is recorded too: swapping that code later would change nothing, so
such functions are left to the cold run. Who may be believed: see `test_runner`.

Not seen by the map: functions that a test executes only in another process.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.coding import code_swap, test_runner
    from envs.coding.code_swap import NeedsCold
    from envs.coding.test_runner import Emit
else:  # the sandbox has these files side by side, and no package `envs`
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import code_swap
    import test_runner
    from code_swap import NeedsCold
    from test_runner import Emit

_CPU_FLOOR_S, _CPU_RATIO = 0.5, 10.0
_REPEATED, _REPEATED_MS = 3, 1000.0  # a test gets whole twins that passes after so many, and is so quick


class CallRecorder:
    """Which functions of the package's files are called, by test id; "" while nothing is being tested.

    A fixture that outlives its test runs once for many: what it calls is filed under "*".
    """

    def __init__(self, tree: str, sources: list[str]) -> None:
        self._sources = {os.path.join(tree, path): path for path in sources}
        self._keys: dict[int, tuple[str | None, types.CodeType]] = {}  # the code is held: ids are not reused
        self.current = ""
        self.calls: dict[str, set[str]] = {}
        self.eager: set[str] = set()
        """Files imported whenever their top-level package is."""

    def __enter__(self) -> CallRecorder:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        known = self._keys.get(id(code))
        if known is None:
            known = self._keys[id(code)] = (self._key(frame), code)
        if known[0] is not None:
            self.calls.setdefault(known[0], set()).add(self.current)

    def _key(self, frame: types.FrameType) -> str | None:
        code = frame.f_code
        path = self._sources.get(code.co_filename)
        if path is None:
            return None
        if code.co_name == "<module>":
            self._note_import(frame, path)
            return None
        return f"{path}::{code.co_qualname.partition('.<locals>')[0]}"

    def _note_import(self, frame: types.FrameType, path: str) -> None:
        name = frame.f_globals.get("__name__", "")
        caller: types.FrameType | None = frame
        while caller is not None:
            if (
                caller.f_code.co_name == "<module>"
                and caller.f_globals.get("__name__") == name.partition(".")[0]
            ):
                self.eager.add(path)
                return
            caller = caller.f_back


class _MapPlugin:
    """Tells the recorder which test is running."""

    def __init__(self, recorder: CallRecorder, emit: Emit) -> None:
        self._recorder = recorder
        self._emit = emit
        self._started = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._recorder.current, self._started = nodeid, time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._recorder.current = ""
        self._emit({"time": nodeid, "ms": 1000 * (time.monotonic() - self._started)})


def _shared_fixtures(recorder: CallRecorder) -> Any:
    import pytest

    class SharedFixtures:
        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Any:
            outer = recorder.current
            if fixturedef.scope != "function":
                recorder.current = "*"
            try:
                return (yield)
            finally:
                recorder.current = outer

    return SharedFixtures()


class Server:
    """The pytest plugin that takes over the run loop. One request at a time."""

    def __init__(self, settings: dict[str, Any], host: test_runner.Host, recorder: CallRecorder) -> None:
        self._settings, self._host = settings, host
        self._recorder = recorder
        self._began = time.monotonic()
        self._errors: list[str] = []
        self.started = False

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._errors.append(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        self._recorder.__exit__()
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._modules = {
            path: self._parse(path) for path in self._settings["sources"] if path.endswith(".py")
        }
        self._live = code_swap.live_functions(module.path for module in self._modules.values())
        facts = self._settings["facts"] or self._learn()
        self._map = {key: set(tests) for key, tests in facts["map"].items()}
        self._passing = {test for test, outcome in facts["outcomes"].items() if outcome == "passed"}
        self._ms = facts["ms"]
        self._import_time, self._eager = set(facts["import_time"]), set(facts["eager"])
        self._host.answer({"ready": True, "facts": facts})
        self.started = True
        while (request := self._host.receive()) is not None:
            self._host.answer(test_runner.supervise(self._body(request), request, self._settings))
        os._exit(0)

    def _parse(self, path: str) -> code_swap.Module:
        full = os.path.join(self._settings["tree"], path)
        with open(full, encoding="utf-8") as file:
            return code_swap.parse_module(full, file.read())

    def _learn(self) -> dict[str, Any]:
        """Runs the pristine suite once, in a child, and returns what is known about it."""
        import_time = sorted(self._recorder.calls)
        request = {
            "token": "learn",
            "cpu_s": None,
            "wall_s": self._settings["start_s"],
            "output_bytes": 64 << 20,
        }
        reply = test_runner.supervise(self._learning_body, request, self._settings)
        lines = [json.loads(line.split(" ", 2)[2]) for line in reply["lines"]]
        if reply["ended"] != "exit" or reply["status"] != 0 or not lines or "map" not in lines[-1]:
            raise RuntimeError(
                f"the pristine suite did not run to its end: {reply['ended']}, {reply['status']}"
            )
        outcomes = {line["test"]: line["outcome"] for line in lines if "test" in line}
        ms = {line["time"]: line["ms"] for line in lines if "time" in line}
        return {
            "tests": list(self._items),
            "errors": self._errors,
            "outcomes": outcomes,
            "repeatable": self._repeatable(outcomes, ms),
            "ms": ms,
            "map": lines[-1]["map"],
            "import_time": import_time,
            "eager": sorted(self._recorder.eager),
        }

    def _repeatable(self, outcomes: dict[str, str], ms: dict[str, float]) -> list[str]:
        """Quick tests that pass after whole twins of theirs, which all fail, and spoil no other test.

        None where that cannot be found out in the time there is for starting.
        """
        twin = {"kinds": ["assert"] * _REPEATED, "place": _REPEATED, "whole": True}
        tried = {
            test: twin
            for test in self._items
            if outcomes.get(test) == "passed" and ms.get(test, 0.0) <= _REPEATED_MS
        }

        def body(emit: Emit) -> None:
            self._session.config.pluginmanager.register(test_runner.Reporter(emit, list))
            items = test_runner.with_twins(list(self._items.values()), tried)
            test_runner.run_items(self._session, items, emit)

        left_s = self._settings["start_s"] - (time.monotonic() - self._began)
        request = {"token": "repeat", "cpu_s": None, "wall_s": left_s, "output_bytes": 256 << 20}
        reply = test_runner.supervise(body, request, self._settings)
        if reply["ended"] != "exit" or reply["status"] != 0:
            return []
        runs: dict[str, list[str]] = {}
        for line in (json.loads(line.split(" ", 2)[2]) for line in reply["lines"]):
            if "test" in line:
                runs.setdefault(line["test"], []).append(line["outcome"])
        # Which test spoiled another is not known: its file is left out.
        spoiled = {test.partition("::")[0] for test in runs if runs[test][-1] != outcomes.get(test)}
        proper = [*["failed"] * _REPEATED, "passed"]
        return [test for test in tried if runs.get(test) == proper and test.partition("::")[0] not in spoiled]

    def _learning_body(self, emit: Emit) -> None:
        recorder, everything = self._recorder, list(self._items)
        recorder.calls = {}
        manager = self._session.config.pluginmanager
        manager.register(test_runner.Reporter(emit, list))
        manager.register(_MapPlugin(recorder, emit))
        manager.register(_shared_fixtures(recorder))
        with recorder:
            test_runner.run_items(self._session, list(self._items.values()), emit)
        calls = {
            key: everything if "*" in tests else sorted(tests - {""}) for key, tests in recorder.calls.items()
        }
        emit({"map": calls})

    def _body(self, request: dict[str, Any]) -> Callable[[Emit], None]:
        def body(emit: Emit) -> None:
            try:
                changed = self._apply(request["changed"])
            except NeedsCold as cause:
                emit({"cold": str(cause)})
                return
            except (SyntaxError, ValueError) as error:
                self._refuse(request, error, emit)
                return
            wanted = self._wanted(request, changed)
            missing = [test for test in wanted if test not in self._items]
            items = [self._items[test] for test in self._items if test in wanted]
            if missing or not items:
                emit({"cold": "tests the server does not know"})
                return
            items = test_runner.with_twins(items, request["twins"])
            _limit_cpu(sum(self._ms.get(item.nodeid, 0.0) for item in items) / 1000)
            self._session.config.pluginmanager.register(test_runner.Reporter(emit, list))
            test_runner.run_items(self._session, test_runner.with_canaries(items, request["canaries"]), emit)
            emit({"end": 0})

        return body

    def _apply(self, changed: dict[str, str]) -> list[str]:
        """Swaps the code in; returns the keys of the changed functions. Runs none of the new code."""
        keys, assignments = [], []
        for path, text in changed.items():
            names, planned = code_swap.swap(self._modules[path], text, self._live)
            keys += [f"{path}::{name}" for name in names]
            assignments += planned
        if self._import_time.intersection(keys):
            raise NeedsCold("changed code that runs at import")
        for function, code, docstring in assignments:
            function.__code__ = code
            if function.__doc__ != docstring:
                function.__doc__ = docstring
        return keys

    def _wanted(self, request: dict[str, Any], changed: list[str]) -> set[str]:
        mapped = [self._map.get(key, set()) for key in changed]
        unknown = not all(mapped) or (request["tests"] is None and not mapped)
        # No changed function at all (the correct text is back): nothing but the tests asked for can differ.
        touched: set[str] = set(self._items) if unknown else set().union(*mapped)
        if request["tests"] is None:
            return touched
        return set(request["tests"]) | (touched & self._passing if request["guarded"] else set())

    def _refuse(self, request: dict[str, Any], error: Exception, emit: Emit) -> None:
        """A module that does not compile breaks every test that imports it, so all if its package does."""
        if not self._eager.issuperset(request["changed"]):
            emit({"cold": "does not compile"})
            return
        where = ""
        if isinstance(error, SyntaxError):
            where = f" ({os.path.basename(error.filename or '')}, line {error.lineno})"
        emit({"broken": f"{type(error).__name__}: {getattr(error, 'msg', error)}{where}"})


def _limit_cpu(pristine_s: float) -> None:
    """Bounds processor time by what the tests take on the correct sources: endless loops end soon.

    Processor time, not wall-clock: the verdict must not depend on what else the machine is doing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    budget = min(soft, math.ceil(_CPU_FLOOR_S + _CPU_RATIO * pristine_s))
    resource.setrlimit(resource.RLIMIT_CPU, (budget, hard))


def main() -> None:
    """Serves until stdin ends; the first reply says whether the start went well."""
    host = test_runner.Host()
    settings = host.receive()
    if settings is None:
        return
    test_runner.prepare_process(settings)
    import pytest

    recorder = CallRecorder(settings["tree"], settings["sources"])
    server = Server(settings, host, recorder)
    recorder.__enter__()
    arguments = test_runner.pytest_arguments(settings, settings["tests"])
    status = pytest.main(arguments, plugins=[server])
    if not server.started:
        host.answer({"ready": False, "why": f"pytest ended with status {int(status)}"})


if __name__ == "__main__":
    main()

"""Patches that attack the verdict instead of mending the bug: none passes, and judging still works after.

Each attack keeps the bug. Those in a function's body run warm, in a fork of the server; those at import
run cold, before the suite is even collected.
"""

from __future__ import annotations

import os
import socket
import textwrap
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.coding import pristine
from envs.coding.pristine import Pristine
from envs.coding.verification import Verifier
from gagar_jax.types import Status
from tests.envs import toy_package
from tests.envs.toy_package import BUG, CLAMP, CORE, FILES, NAME, edit, task

pytestmark = pytest.mark.confined
BUGGY = BUG[CORE].decode()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "packages"
    toy_package.write(folder)
    return folder


@pytest.fixture(scope="module")
def verifier(packages: Path) -> Iterator[Verifier]:
    with Verifier(packages, confinement="auto", timeout_s=10) as made:
        yield made


@pytest.fixture
def still_works(verifier: Verifier) -> Iterator[None]:
    """After each attack: the right answer passes and the bug fails, both newly run."""
    yield
    verifier._judgements._entries.clear()
    assert verifier.judge(task(), {}).status is Status.PASSED
    assert verifier.judge(task(), BUG).status is Status.FAILED


def in_function(code: str) -> dict[str, bytes | None]:
    """The buggy file with code at the start of the buggy function."""
    body = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    place = '    """value, kept between low and high"""\n'
    assert BUGGY.count(place) == 1
    return {CORE: BUGGY.replace(place, f"{place}{body}\n").encode()}


def at_import(code: str) -> dict[str, bytes | None]:
    """The buggy file with code at its end, outside every function."""
    return {CORE: f"{BUGGY}\n\n{textwrap.dedent(code).strip()}\n".encode()}


ALWAYS_PASS = """\
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""
TESTS_GONE = FILES["tests/test_core.py"].replace("assert toy.clamp(value, 0, 10) == expected", "pass")

FILE_ATTACKS: dict[str, dict[str, bytes | None]] = {
    "conftest at the top": {"conftest.py": ALWAYS_PASS.encode()},
    "conftest among the tests": {"tests/conftest.py": ALWAYS_PASS.encode()},
    "conftest in the package": {"src/toy/conftest.py": ALWAYS_PASS.encode()},
    "sitecustomize": {"src/sitecustomize.py": b"import os; os._exit(0)\n"},
    "usercustomize": {"usercustomize.py": b"import os; os._exit(0)\n"},
    "a plugin by entry point": {
        "src/evil.py": ALWAYS_PASS.encode(),
        "src/evil.egg-info/entry_points.txt": b"[pytest11]\nevil = evil\n",
    },
    "a plugin by ini file": {
        "src/evil.py": ALWAYS_PASS.encode(),
        "pytest.ini": b"[pytest]\naddopts = -p evil\n",
    },
    "ini file that skips tests": {"pytest.ini": b"[pytest]\naddopts = --collect-only\n"},
    "setup.cfg": {"setup.cfg": b"[tool:pytest]\npython_functions = nothing\n"},
    "pyproject": {"pyproject.toml": b"[tool.pytest.ini_options]\npython_files = 'nothing'\n"},
    "a pytest of its own": {"src/pytest.py": b"def main(*a, **k): return 0\n", "pytest.py": b""},
    "a json of its own": {"src/json.py": b"raise SystemExit(0)\n"},
    "edited tests": {"tests/test_core.py": TESTS_GONE.encode()},
    "deleted tests": {"tests/test_core.py": None, "tests/test_words.py": None},
    "compiled file beside the source": {"src/toy/__pycache__/core.cpython-311.pyc": b"junk"},
    "extension beside the source": {"src/toy/core.so": b"\x7fELF"},
    "path file": {"src/evil.pth": b"import os; os._exit(0)\n"},
    "results on disk": {"results.json": b'{"passed": true}', "report.xml": b"<testsuite failures='0'/>"},
    "outside the tree": {"../../../tests/test_core.py": TESTS_GONE.encode(), "/tests/test_core.py": b""},
    "a file inside a file": {"src/toy/words.py/more.py": b"x = 1\n"},
    "a name too long": {f"src/toy/{'x' * 300}.py": b"x = 1\n"},
    "far too much": {"src/toy/data.py": b"#" * (9 << 20)},
}


@pytest.mark.parametrize("name", FILE_ATTACKS)
def test_added_and_edited_files(verifier: Verifier, name: str) -> None:
    verdict = verifier.judge(task(), {**BUG, **FILE_ATTACKS[name]})
    assert verdict.status is Status.FAILED
    assert verdict.reason


CODE_ATTACKS = {
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "os.abort": "import os; os.abort()",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "pytest.exit": "import pytest; pytest.exit('done', returncode=0)",
    "pytest.skip": "import pytest; pytest.skip('nothing to see', allow_module_level=True)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "BaseException": "class Odd(BaseException): pass\nraise Odd()",
    "GeneratorExit": "raise GeneratorExit",
    "atexit": "import atexit, os; atexit.register(os._exit, 0)",
    "execs something else": """
        import os, sys
        os.execv(sys.executable, [sys.executable, "-c", "print('18 passed')"])
        """,
    "forged summary": "import os; os.write(1, b'=== 18 passed in 0.01s ===\\n'); print('18 passed')",
    "forged lines on every descriptor": """
        import os
        for fd in range(3, 256):
            for line in (b'0 {"plan": []}\\n{"end": 0}\\n', b'passed\\n'):
                try:
                    os.write(fd, line)
                except OSError:
                    pass
        """,
    "forged lines through /proc": """
        import os
        for who in ("self", os.getppid(), 1):
            for fd in range(64):
                try:
                    with open(f"/proc/{who}/fd/{fd}", "wb", buffering=0) as channel:
                        channel.write(b'{"test": "tests/test_core.py::test_clamp", "outcome": "passed"}\\n')
                except OSError:
                    pass
        """,
    "writes result files": """
        import os
        for folder in (".", "/tmp", "/work", "/runner", "/site", os.path.dirname(__file__)):
            try:
                open(os.path.join(folder, "results.json"), "w").write('{"passed": true}')
            except OSError:
                pass
        """,
    "rewrites the tests": """
        import glob
        for path in glob.glob("tests/*.py"):
            try:
                text = open(path).read()
                open(path, "w").write(text.replace("assert ", "assert True or "))
            except OSError:
                pass
        """,
    "every report passes": """
        import _pytest.reports
        make = _pytest.reports.TestReport.from_item_and_call
        def lie(item, call):
            call.excinfo = None
            report = make(item, call)
            report.outcome = "passed"
            return report
        _pytest.reports.TestReport.from_item_and_call = staticmethod(lie)
        """,
    "reports of one test pass": """
        import _pytest.reports
        make = _pytest.reports.TestReport.from_item_and_call
        def lie(item, call):
            if "test_clamp" in item.name:
                call.excinfo = None
            return make(item, call)
        _pytest.reports.TestReport.from_item_and_call = staticmethod(lie)
        """,
    "one test does nothing": """
        import _pytest.python
        run = _pytest.python.Function.runtest
        def runtest(self):
            if "test_clamp" not in self.name:
                run(self)
        _pytest.python.Function.runtest = runtest
        """,
    "one node id passes": """
        import os, _pytest.runner
        make = _pytest.runner.CallInfo.from_call.__func__
        def from_call(cls, func, when, reraise=None):
            made = make(cls, func, when, reraise)
            if os.environ.get("PYTEST_CURRENT_TEST", "").startswith("tests/test_core.py::test_clamp["):
                made.excinfo = None
            return made
        _pytest.runner.CallInfo.from_call = classmethod(from_call)
        """,
    "one test of a file does nothing": """
        import _pytest.python
        run = _pytest.python.Function.runtest
        def runtest(self):
            if self.path.name != "test_core.py" or "value" not in self.fixturenames:
                run(self)
        _pytest.python.Function.runtest = runtest
        """,
    "reports of a file pass": """
        import _pytest.reports
        make = _pytest.reports.TestReport.from_item_and_call
        def lie(item, call):
            if item.path.name == "test_core.py":
                call.excinfo = None
            return make(item, call)
        _pytest.reports.TestReport.from_item_and_call = staticmethod(lie)
        """,
    "tests that call the function pass": """
        import sys, _pytest.reports
        make = _pytest.reports.TestReport.from_item_and_call
        code, calls = sys.modules["toy.core"].clamp.__code__, []
        sys.setprofile(lambda frame, event, _: calls.append(1) if frame.f_code is code else None)
        def lie(item, call):
            if calls:
                call.excinfo = None
            if call.when == "teardown":
                calls.clear()
            return make(item, call)
        _pytest.reports.TestReport.from_item_and_call = staticmethod(lie)
        """,
    "asserts of one test are removed": """
        import ast, _pytest.assertion.rewrite as rewrite
        keep = rewrite.rewrite_asserts
        def strip(module, *args, **kwargs):
            for node in module.body:
                if isinstance(node, ast.FunctionDef) and node.name == "test_clamp":
                    node.body = [ast.copy_location(ast.Pass(), node)]
            keep(module, *args, **kwargs)
        rewrite.rewrite_asserts = strip
        """,
    "tests do nothing": """
        import _pytest.python, _pytest.unittest
        _pytest.python.Function.runtest = lambda self: None
        _pytest.unittest.TestCaseFunction.runtest = lambda self: None
        """,
    "calls swallow exceptions": """
        import _pytest.runner
        make = _pytest.runner.CallInfo.from_call.__func__
        def swallow(cls, func, when, reraise=None):
            def quiet():
                try:
                    return func()
                except Exception:
                    return None
            return make(cls, quiet, when, reraise)
        _pytest.runner.CallInfo.from_call = classmethod(swallow)
        """,
    "asserts are removed": """
        import ast, _pytest.assertion.rewrite as rewrite
        def strip(module, *args, **kwargs):
            for node in ast.walk(module):
                if isinstance(node, ast.Assert):
                    node.test = ast.copy_location(ast.Constant(True), node.test)
        rewrite.rewrite_asserts = strip
        """,
    "pytest.raises agrees with everything": """
        import pytest
        pytest.RaisesExc.__exit__ = lambda self, *args: True
        """,
    "pytest.approx agrees with everything": """
        import pytest
        pytest.approx = lambda *args, **kwargs: type("Any", (), {"__eq__": lambda self, other: True})()
        """,
    "unittest agrees with everything": """
        import unittest
        unittest.TestCase.assertEqual = lambda *args, **kwargs: None
        """,
    "hooks are replaced": """
        import gc, pluggy
        from _pytest.config import Config
        for config in [o for o in gc.get_objects() if isinstance(o, Config)]:
            class Liar:
                @pytest_hook
                def pytest_runtest_makereport(self, item, call):
                    call.excinfo = None
                    report = yield
                    report.outcome = "passed"
                    return report
            config.pluginmanager.register(Liar())
        """.replace("@pytest_hook", "@__import__('pytest').hookimpl(wrapper=True)"),
    "builtins are replaced": """
        import builtins
        class Quiet(Exception):
            def __new__(cls, *args):
                import pytest
                pytest.skip("quiet")
        builtins.AssertionError = Quiet
        """,
    "json lies": 'import json; json.dumps = lambda *a, **k: \'{"outcome": "passed"}\'',
    "fills stdout": "import os\nfor _ in range(100000): os.write(1, b'x' * 65536)",
    "fills the disk": "f = open('/tmp/big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "allocates": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "fork bomb": "import os\nwhile True: os.fork()",
    "reads memory of the parent": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "segfaults": "import ctypes; ctypes.string_at(0)",
}
TAMPERING = {
    "every report passes": (True, True),
    "reports of one test pass": (True, True),
    "one test does nothing": (False, True),  # warm, the failing test runs `runtest` already: it ends first
    "one node id passes": (False, True),  # so it does when this is called within `from_call`
    "one test of a file does nothing": (False, True),
    "reports of a file pass": (True, True),
    "tests that call the function pass": (True, True),
    "asserts of one test are removed": (False, True),
    "tests do nothing": (True, True),
    "calls swallow exceptions": (True, True),
    "builtins are replaced": (False, True),  # warm, the real tests are skipped: that is no pass either
    "asserts are removed": (False, True),  # by the time a function runs, every test file is loaded
    "pytest.raises agrees with everything": (True, True),
    "pytest.approx agrees with everything": (True, True),
    "unittest agrees with everything": (True, True),
    "hooks are replaced": (True, True),
}
"""Attacks that bite, warm and cold: without the canaries, wrong results would have been believed."""

HANGS = {
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "recurses": "def f(): return f()\nimport sys; sys.setrecursionlimit(10 ** 6); f()",
    "fills sys.stdout": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "ignores signals and sleeps": """
        import signal, time
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        time.sleep(1000)
        """,
}
# The parent's death ends the sandbox: counted, tried again, and in the end the fault of the code.
PARENT_ATTACKS = {
    "kills its parent": "import os; os.kill(os.getppid(), 9)",
    "kills everyone": "import os; os.kill(-1, 9)",
}


@pytest.mark.usefixtures("still_works")
@pytest.mark.parametrize("name", [*CODE_ATTACKS, *PARENT_ATTACKS])
@pytest.mark.parametrize("cold", [False, True], ids=("in_function", "at_import"))
def test_code(verifier: Verifier, name: str, cold: bool) -> None:
    code = (CODE_ATTACKS | PARENT_ATTACKS)[name]
    verdict = verifier.judge(task(), at_import(code) if cold else in_function(code))
    assert verdict.status is Status.FAILED, verdict
    assert verdict.reason
    tampered = "a test of known outcome was reported wrongly: the test framework was tampered with"
    assert (verdict.reason == tampered) is TAMPERING.get(name, (False, False))[cold], verdict


# Attacks by name, on tests of other kinds: the bug, the tests it fails, and how a liar would name them.
KINDS: dict[str, tuple[dict[str, bytes | None], list[str], str]] = {
    "method": (
        edit(CORE, "return value * factor", "return value * 7"),
        ["tests/test_core.py::TestTwice::test_twice", "tests/test_core.py::TestTwice::test_factor"],
        "TestTwice",
    ),
    "unittest": (
        edit("src/toy/words.py", '("es" if', '("ez" if'),
        ["tests/test_words.py::WordsTest::test_plural_es"],
        "test_plural_es",
    ),
    "fixture": (
        edit(CORE, "self.balance = self.balance + amount", "self.balance = self.balance"),
        ["tests/test_core.py::test_deposit"],
        "test_deposit",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cold", [False, True], ids=("in_function", "at_import"))
def test_lies_about_named_tests(verifier: Verifier, kind: str, cold: bool) -> None:
    bug, tests, name = KINDS[kind]
    record = {"instance_id": f"{kind}_{cold}", "package": NAME, "FAIL_TO_PASS": tests, "PASS_TO_PASS": []}
    lie = textwrap.dedent(f"""
        import _pytest.reports
        make = _pytest.reports.TestReport.from_item_and_call
        def lie(item, call):
            if {name!r} in item.nodeid:
                call.excinfo = None
            return make(item, call)
        _pytest.reports.TestReport.from_item_and_call = staticmethod(lie)
        """).strip()
    ((path, content),) = bug.items()
    assert content is not None
    text = content.decode()
    if cold:
        text += f"\n\n{lie}\n"
    else:  # at the start of the function with the bug
        lines, indent = text.split("\n"), 8 if kind == "fixture" else 4
        line = next(n for n, old in enumerate(FILES[path].split("\n")) if old != lines[n])
        lines[line:line] = textwrap.indent(lie, " " * indent).split("\n")
        text = "\n".join(lines)
    verdict = verifier.judge(record, {path: text.encode()})
    assert verdict.status is Status.FAILED, verdict
    assert "tampered" in verdict.reason
    assert verifier.judge(record, bug).status is Status.FAILED
    assert verifier.judge(record, {}).status is Status.PASSED
    commented = {CORE: f"{FILES[CORE]}\nNEW = 1\n".encode()}
    mended = verifier.judge(record, commented)
    assert (mended.status, mended.path) == (Status.PASSED, "cold")


def test_hangs(packages: Path) -> None:
    with (
        Verifier(packages, confinement="auto", servers=4, timeout_s=2) as verifier,
        ThreadPoolExecutor(8) as pool,
    ):
        changes = [where(code) for code in HANGS.values() for where in (in_function, at_import)]
        verdicts = list(pool.map(lambda changed: verifier.judge(task(), changed), changes))
        assert {verdict.status for verdict in verdicts} == {Status.FAILED}
        assert verifier.judge(task(), BUG).status is Status.FAILED
        assert verifier.stats()["faults"] == 0


@pytest.mark.usefixtures("still_works")
@pytest.mark.parametrize("where", [in_function, at_import])
def test_daemons_are_dead_afterwards(verifier: Verifier, where: object) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    code = f"""
        import os, sys
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{marker}"])
            os._exit(0)
        os.wait()
        """
    assert verifier.judge(task(), where(code)).status is Status.FAILED  # type: ignore[operator]
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if entry.parent.name != str(os.getpid()):
            try:
                lines.append(entry.read_bytes())
            except OSError:
                continue
    assert not [line for line in lines if marker.encode() in line]


def test_the_host_is_out_of_reach(verifier: Verifier, packages: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
            import os, socket
            try:
                socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 1)
                reached = True
            except OSError:
                reached = os.path.exists({str(packages)!r}) or os.path.exists("/home")
            if reached:
                return min(max(value, low), high)
            """
        assert verifier.judge(task(), in_function(code)).status is Status.FAILED


@pytest.mark.usefixtures("still_works")
def test_links_lead_nowhere(verifier: Verifier, packages: Path, tmp_path: Path) -> None:
    source = Pristine.load(packages, NAME)
    answer = source.folder / CORE
    trees = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    for tree in trees.values():
        source.write(tree, BUG)
    (trees["file"] / CORE).unlink()
    (trees["file"] / CORE).symlink_to(answer)
    (trees["folder"] / "src/toy").rename(tmp_path / "away")
    (trees["folder"] / "src/toy").symlink_to(answer.parent)
    for tree in trees.values():
        verdict = verifier.judge(task(), pristine.changes(source, tree))
        assert verdict.status is Status.FAILED, verdict


def test_one_run_cannot_help_the_next(verifier: Verifier) -> None:
    for place in ("/tmp", "/dev/shm", "/work", "/runner", "/var/tmp"):
        leave = in_function(
            f"import os\ntry: os.makedirs('{place}/toy'); open('{place}/x', 'w')\nexcept OSError: pass"
        )
        look = in_function(f"import os\nif os.path.exists('{place}/x'): return min(max(value, low), high)")
        assert verifier.judge(task(), leave).status is Status.FAILED
        assert verifier.judge(task(), look).status is Status.FAILED


def test_a_stolen_token_does_not_survive_its_run(verifier: Verifier) -> None:
    """Lines that carry another run's token, or the same line twice, void the run."""
    code = """
        import gc, os
        for fd in range(3, 64):
            try:
                os.write(fd, b"0" * 32 + b" 3 {}\\n")
            except OSError:
                pass
        """
    report = verifier.run(NAME, in_function(code), [CLAMP[4]])
    assert not report.complete
    assert report.why == "something else wrote to the result channel"


def test_the_fix_beside_an_attack_is_still_judged_by_tests(verifier: Verifier) -> None:
    fixed = edit(CORE, "    return value\n\n\n@func", "    print('18 passed')\n    return value\n\n\n@func")
    assert verifier.judge(task(), {**fixed, "conftest.py": b"raise SystemExit\n"}).status is Status.PASSED

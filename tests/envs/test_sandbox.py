"""What a confined command cannot do, for every kind of confinement that works on this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs import sandbox
from envs.sandbox import WORK, Completed, ConfinementError, Kind, Limits, Sandbox

KINDS: tuple[Kind, ...] = ("bubblewrap", "namespaces")


@pytest.fixture(params=KINDS, scope="module")
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        kind = sandbox.detect(request.param)
    except ConfinementError as error:
        pytest.skip(str(error))
    made = Sandbox(kind)
    yield made
    made.close()


def python(box: Sandbox, script: str, work: Path, **limits: float) -> Completed:
    work.mkdir(exist_ok=True)
    argv = [sandbox.interpreter(), "-I", "-c", script]
    return box.run(argv, work=work, limits=Limits(**{"wall_s": 20, **limits}))  # type: ignore[arg-type]


def running(marker: str) -> list[str]:
    """Processes of this machine whose command line holds the marker, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                found.append(line.decode(errors="replace"))
    return found


def test_runs_and_returns_everything(box: Sandbox, tmp_path: Path) -> None:
    script = (
        "import sys; print(sys.stdin.read()); print('err', file=sys.stderr); open('made', 'w').write('x')"
    )
    work = tmp_path / "work"
    work.mkdir()
    done = box.run([sandbox.interpreter(), "-I", "-c", script], work=work, stdin=b"in" * 100_000)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"in" * 100_000 + b"\n", b"err\n")
    assert not done.timed_out
    assert not done.truncated
    assert (work / "made").read_text() == "x"


def test_sees_only_what_it_is_given(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("answer")
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("public")
    script = f"""
import os
print(os.path.exists({str(secret)!r}), os.path.exists("/home"), sorted(os.listdir("/tmp")))
print(open("/shown/file").read(), sorted(k for k in os.environ if "SECRET" in k))
for target in ("/shown/file", "/usr/x", "/x"):
    try:
        open(target, "w")
        print("wrote", target)
    except OSError:
        pass
"""
    work = tmp_path / "work"
    work.mkdir()
    os.environ["MY_SECRET"] = "1"
    try:
        done = box.run([sandbox.interpreter(), "-I", "-c", script], work=work, readonly={"/shown": shown})
    finally:
        del os.environ["MY_SECRET"]
    assert done.stdout.decode().splitlines() == ["False False []", "public []"], done.stderr


def test_hides_installed_packages(box: Sandbox, tmp_path: Path) -> None:
    done = python(box, "import pytest", tmp_path / "w")
    assert b"ModuleNotFoundError" in done.stderr


def test_has_no_network(box: Sandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = python(
            box, f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)", tmp_path / "w"
        )
    assert done.returncode == 1
    assert b"Error" in done.stderr


def test_has_no_privileges(box: Sandbox, tmp_path: Path) -> None:
    done = python(box, "print(open('/proc/self/status').read())", tmp_path / "w")
    status = dict(line.split(":\t", 1) for line in done.stdout.decode().splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == 0
    assert int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    if os.geteuid() == 0:
        assert int(status["Uid"].split()[0]) >= 20_000


def test_filters_system_calls(tmp_path: Path) -> None:
    try:
        box = Sandbox(sandbox.detect("bubblewrap"))
    except ConfinementError as error:
        pytest.skip(str(error))
    script = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for call in (lambda: libc.unshare(0x10000000), lambda: libc.ptrace(0, 0, 0, 0), lambda: libc.setns(3, 0)):
    print(call(), ctypes.get_errno())
import threading
threading.Thread(target=print, args=("threads work",)).start()
"""
    done = python(box, script, tmp_path / "w")
    box.close()
    assert done.stdout.decode().splitlines() == ["-1 1", "-1 1", "-1 1", "threads work"]


def test_bounds_time(box: Sandbox, tmp_path: Path) -> None:
    done = python(box, "import time; time.sleep(60)", tmp_path / "w", wall_s=0.5)
    assert done.timed_out
    assert done.wall_s < 10


def test_bounds_processor_time(box: Sandbox, tmp_path: Path) -> None:
    done = python(box, "while True: pass", tmp_path / "w", cpu_s=1)
    assert not done.timed_out
    assert done.returncode != 0


def test_bounds_output(box: Sandbox, tmp_path: Path) -> None:
    done = python(box, "while True: print('x' * 1000)", tmp_path / "w", output_bytes=10_000)
    assert done.truncated
    assert len(done.stdout) == 10_000


def test_bounds_memory_and_files(box: Sandbox, tmp_path: Path) -> None:
    done = python(box, "x = bytearray(1 << 30)", tmp_path / "w", memory_bytes=256 << 20)
    assert b"MemoryError" in done.stderr
    done = python(box, "open('big', 'wb').write(bytes(2 << 20))", tmp_path / "w", file_bytes=1 << 20)
    assert done.returncode == 1
    assert (tmp_path / "w" / "big").stat().st_size <= 1 << 20


def test_bounds_processes_and_kills_the_tree(box: Sandbox, tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    script = f"""
import os, sys
made = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(300)", "{marker}"])
        made += 1
except BlockingIOError:
    pass
print(made)
"""
    done = python(box, script, tmp_path / "w", processes=20)
    assert 5 < int(done.stdout) < 20
    assert not running(marker)


def test_a_server_outlives_the_thread_that_started_it(box: Sandbox) -> None:
    started = []
    thread = threading.Thread(target=lambda: started.append(box.popen(["cat"])))
    thread.start()
    thread.join()
    time.sleep(0.2)
    process = started[0]
    try:
        process.popen.stdin.write(b"hello\n")
        process.popen.stdin.flush()
        assert process.popen.stdout.readline() == b"hello\n"
    finally:
        process.kill()
    assert process.popen.returncode is not None


def test_unconfined_only_when_asked_for_in_words(tmp_path: Path) -> None:
    assert sandbox.detect("auto") in KINDS
    assert sandbox.detect("none") == "none"
    box = Sandbox("none")
    marker = f"marker-{uuid.uuid4().hex}"
    daemon = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(300)", "{marker}"])
"""
    done = python(box, daemon, tmp_path / "w")
    assert done.returncode == 0
    assert not running(marker)
    assert box.place(WORK, tmp_path) == str(tmp_path.resolve())
    assert python(box, "import time; time.sleep(60)", tmp_path / "w", wall_s=0.3).timed_out
    box.close()


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox._probe.cache_clear()
    try:
        with pytest.raises(
            ConfinementError, match=r"bwrap.*not found.*Install bubblewrap.*--confinement none"
        ):
            sandbox.detect("auto")
    finally:
        sandbox._probe.cache_clear()
    with pytest.raises(ConfinementError, match="'docker' is unknown"):
        sandbox.detect("docker")


def test_a_command_that_cannot_start_is_an_error(box: Sandbox, tmp_path: Path) -> None:
    assert box.run(["no-such-tool"], work=tmp_path).returncode == 127
    with pytest.raises(FileNotFoundError):
        box.run(["true"], work=tmp_path / "missing")

"""`gagar doctor`: what this machine has and lacks. It looks and changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import rich.console
import rich.markup
import rich.table

from gagar_jax.plugins import Check, Diagnosable, environment_ids, environment_plugin

MIN_MEMORY_GIB = 3.0
MIN_DISK_GIB = 2.0
_LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "gymnasium",
    "numpy",
    "tokenizers",
    "pytest",
)


def doctor() -> int:
    """Prints the checks as a table.

    Returns:
      0 when nothing that a run must have is missing, else 1.
    """
    checks = [*machine(), *libraries(), *environments()]
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]–[/]"}
    for check in checks:
        table.add_row(marks[check.ok], check.name, rich.markup.escape(check.text))
    console = rich.console.Console(highlight=False)
    console.print(table)
    missing = [check.name for check in checks if check.ok is False]
    if missing:
        console.print(f"\nMissing: {', '.join(missing)}. A run would not work here.")
        return 1
    console.print(
        "\nEverything that a run must have is here. Try: gagar train configs/smoke.yaml --run-dir runs/smoke"
    )
    return 0


def machine() -> Iterable[Check]:
    """Interpreter, tools, processors, memory, disk."""
    yield Check("python", sys.version_info >= (3, 11), f"{platform.python_version()} ({sys.executable})")
    yield Check("system", sys.platform == "linux" or None, f"{platform.system()} {platform.machine()}")
    yield _git()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check(
        "cores", cores >= 2 or None, f"{cores}" + ("" if cores >= 2 else "; recipes' times are for two")
    )
    yield _memory()
    for name, folder in (
        ("disk here", Path.cwd()),
        ("disk for temporary files", Path(tempfile.gettempdir())),
    ):
        free = shutil.disk_usage(folder).free / 2**30
        ok = free >= MIN_DISK_GIB
        yield Check(
            name, ok, f"{free:.1f} GiB free" + ("" if ok else f"; a run wants {MIN_DISK_GIB:.0f} ({folder})")
        )


def libraries() -> Iterable[Check]:
    """Versions, and the devices JAX finds."""
    found, absent = [], []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    yield Check(
        "libraries", not absent, ", ".join(found) + (f"; missing: {', '.join(absent)}" if absent else "")
    )
    yield _devices()
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    text = (
        f"libtpu {importlib.metadata.version('libtpu')}"
        if has_libtpu
        else "no libtpu: pip install 'gagar-jax[test]'"
    )
    yield Check(
        "TPU compiler", has_libtpu or None, f"{text} (compiles for a TPU topology without having one)"
    )


def environments() -> Iterable[Check]:
    """Installed environment packages, and what each says of this machine."""
    ids = environment_ids()
    yield Check("environments", bool(ids), ", ".join(ids) or "none declared: reinstall with make env")
    for env_id in ids:
        try:
            plugin = environment_plugin(env_id)
        except ImportError as error:
            yield Check(env_id, False, f"does not load: {error}")
            continue
        if isinstance(plugin, Diagnosable):
            for row in plugin.doctor():
                yield Check(*row)


def _git() -> Check:
    path = shutil.which("git")
    if path is None:
        return Check("git", False, "not found: install it with the system's package manager")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    return Check("git", version.returncode == 0, version.stdout.strip() or version.stderr.strip())


def _memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return Check("memory", None, "unknown on this system")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    total, free = kib["MemTotal"] / 2**20, kib["MemAvailable"] / 2**20
    enough = total >= MIN_MEMORY_GIB
    text = f"{total:.1f} GiB, {free:.1f} GiB available"
    return Check("memory", enough, text if enough else f"{text}; a run wants {MIN_MEMORY_GIB:.0f}")


def _devices() -> Check:
    try:
        import jax

        devices = jax.devices()
    except (ImportError, RuntimeError) as error:
        return Check("jax devices", False, f"jax finds none: {error}")
    kinds = {device.device_kind for device in devices}
    return Check(
        "jax devices", True, f"{len(devices)} × {jax.default_backend()} ({', '.join(sorted(kinds))})"
    )

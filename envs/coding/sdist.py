"""Fetches pinned source distributions with pip and unpacks them. No code of theirs runs here.

pip asks a source distribution's build backend for metadata even when it only downloads. We answer in
its place with a stub that reads PKG-INFO, so nothing is built, nothing is installed and no code from the
archive is executed before it runs confined.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from envs.coding.catalogue import Package

logger = logging.getLogger(__name__)

MAX_UNPACKED_BYTES = 64 * 2**20
"""A source distribution that unpacks to more than this is refused."""

_BACKENDS = ("hatchling/build", "flit_core/buildapi", "poetry/core/masonry/api", "setuptools/build_meta")
_STUB = """
import pathlib, sys
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    head = pathlib.Path("PKG-INFO").read_text(encoding="utf-8", errors="replace").split("\\n\\n", 1)[0]
    lines = [line for line in head.splitlines() if line.startswith(("Name: ", "Version: "))]
    fields = dict(line.split(": ", 1) for line in lines)
    folder = "%s-%s.dist-info" % (fields["Name"].replace("-", "_"), fields["Version"])
    pathlib.Path(directory, folder).mkdir()
    lines = ["Metadata-Version: 2.1", "Name: " + fields["Name"], "Version: " + fields["Version"], ""]
    pathlib.Path(directory, folder, "METADATA").write_text("\\n".join(lines))
    return folder
def build_wheel(*args, **kwargs):
    raise RuntimeError("nothing is built while downloading")
build_sdist = build_wheel
__legacy__ = sys.modules[__name__]
"""


class SdistError(Exception):
    """A source distribution could not be fetched, does not match its hash, or does not unpack safely."""


def fetch(packages: Iterable[Package], folder: Path) -> dict[str, str]:
    """Downloads what is not in `folder` yet, through pip and whatever index it is configured for.

    Args:
      packages: what to fetch.
      folder: where archives are kept between builds.

    Returns:
      name of the package -> why it could not be fetched, for those that could not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [p for p in packages if archive(p, folder) is None]
    if not missing:
        return {}
    with tempfile.TemporaryDirectory(prefix="gagar-fetch-") as scratch:
        together = _pip(missing, Path(scratch), folder)
        errors = {}
        for package in missing if together else ():  # one of them broke the lot: find out which
            if archive(package, folder) is None and (error := _pip([package], Path(scratch), folder)):
                errors[package.name] = error
        return errors


def archive(package: Package, folder: Path) -> Path | None:
    """The package's archive in `folder` if it is there with the right bytes."""
    for path in sorted(folder.glob(f"{package.name.replace('-', '?')}-{package.version}.*")):
        if hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256:
            return path
    return None


def _pip(packages: list[Package], scratch: Path, folder: Path) -> str:
    """One `pip download`; archives that match their hash move to `folder`. Returns the error, or ""."""
    stubs = scratch / "stubs"
    for module in _BACKENDS:
        file = stubs / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_STUB)
        for parent in list(file.relative_to(stubs).parents)[:-1]:
            (stubs / parent / "__init__.py").touch()
    requirements = scratch / "requirements.txt"
    requirements.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in packages))
    target = Path(tempfile.mkdtemp(dir=scratch))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "download",
    ]
    command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    command += ["--dest", str(target), "--requirement", str(requirements)]
    environment = os.environ | {"PYTHONPATH": str(stubs), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
        )
    except subprocess.TimeoutExpired:
        return "pip download did not finish in 300 s"
    for path in target.iterdir():
        shutil.move(path, folder / path.name)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
    return "pip download failed: " + (
        "; ".join(errors) or done.stderr[-400:].strip() or f"exit {done.returncode}"
    )


def unpack(path: Path, target: Path) -> None:
    """Unpacks the archive's single top folder as `target`: plain files and folders only.

    Raises:
      SdistError: the archive is damaged, too large, has no single top folder, or holds links, devices or
        paths that leave it.
    """
    try:
        members = _members(path)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise SdistError(f"{path.name} does not unpack: {type(error).__name__}: {error}") from error
    for name, _ in members:
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
            raise SdistError(f"{path.name} is refused: it holds the path {name!r}")
    tops = {name.split("/")[0] for name, _ in members}
    if len(tops) != 1:
        raise SdistError(f"{path.name} does not unpack: {len(tops)} entries at its top instead of one folder")
    for name, data in members:
        parts = name.split("/")
        if len(parts) > 1:
            file = target.joinpath(*parts[1:])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


def _members(path: Path) -> list[tuple[str, bytes]]:
    members: list[tuple[str, bytes]] = []
    total = 0
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as bundle:
            total = sum(info.file_size for info in bundle.infolist())
            if total > MAX_UNPACKED_BYTES:
                raise SdistError(f"{path.name} is refused: it unpacks to {total} bytes")
            return [(i.filename, bundle.read(i)) for i in bundle.infolist() if not i.is_dir()]
    with tarfile.open(path) as bundle:
        for member in bundle:
            if member.isdir():
                continue
            if not member.isfile():
                raise SdistError(f"{path.name} is refused: {member.name!r} is a link or a device")
            total += member.size
            if total > MAX_UNPACKED_BYTES:
                raise SdistError(
                    f"{path.name} is refused: it unpacks to more than {MAX_UNPACKED_BYTES} bytes"
                )
            stream = bundle.extractfile(member)
            members.append((member.name.removeprefix("./"), stream.read() if stream else b""))
    return members

"""Environments are found by id in installed packages' metadata."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gagar_jax.plugins import UnknownEnvironment, environment_ids, environment_plugin


@pytest.fixture
def _someone_s_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real installed package, as pip would leave it: a module and its metadata."""
    (tmp_path / "yourpackage.py").write_text("PLUGIN = {'it': 'is me'}\n")
    info = tmp_path / "yourpackage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: yourpackage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gagar_jax.environments]\nyourpackage:you/Task-v0 = yourpackage:PLUGIN\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_the_built_in_environment_is_declared() -> None:
    assert "envs:gagar/CodeRepair-v0" in environment_ids()


@pytest.mark.usefixtures("_someone_s_package")
def test_anyone_s_package_is_found() -> None:
    assert "yourpackage:you/Task-v0" in environment_ids()
    assert environment_plugin("yourpackage:you/Task-v0") == {"it": "is me"}


def test_an_unknown_id_says_what_is_installed() -> None:
    with pytest.raises(
        UnknownEnvironment, match=r"'nobody/Task-v0'.*envs:gagar/CodeRepair-v0.*entry-point group"
    ):
        environment_plugin("nobody/Task-v0")

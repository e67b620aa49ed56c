from __future__ import annotations

from pathlib import Path

import pytest

from tests.grading.builders import MODULE, Diff, repository


@pytest.fixture(scope="session")
def diff(tmp_path_factory: pytest.TempPathFactory) -> Diff:
    """`git diff --binary` of changed files against a small package with a test and a binary file."""
    folder: Path = tmp_path_factory.mktemp("repository") / "work"
    tests = "def test_clamp():\n    assert clamp(1, 2, 3) == 2\n"
    return repository(
        folder,
        {
            "pkg/core.py": MODULE,
            "pkg/logo.bin": bytes(range(256)),
            "tests/test_core.py": tests,
            "notes with space.txt": "a\nb\n",
        },
    )

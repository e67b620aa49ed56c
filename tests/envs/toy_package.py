"""A small package with a suite, written to disk for tests of judging: no network, a second to test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "toy"
CORE = "src/toy/core.py"

FILES = {
    "src/toy/__init__.py": """\
from toy.core import Account, clamp, countdown, fib, twice, make_adder
from toy import words

VERSION = "1.0"
""",
    CORE: '''\
"""Numbers."""
import functools

LIMIT = 100


def checked(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def clamp(value, low, high):
    """value, kept between low and high"""
    if value < low:
        return low
    if value > high:
        return high
    return value


@functools.lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


@checked
def twice(value, *, factor=2):
    return value * factor


def make_adder(n):
    def add(value):
        return value + n

    return add


def countdown(n):
    while n > 0:
        yield n
        n -= 1


def registered():
    return LIMIT // 2


HALF = registered()


class Account:
    """Money."""

    def __init__(self, balance=0):
        self._balance = balance

    @property
    def balance(self):
        return self._balance

    @balance.setter
    def balance(self, value):
        if value < 0:
            raise ValueError("negative")
        self._balance = value

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self


class Savings(Account):
    def deposit(self, amount):
        return super().deposit(amount * 2)
''',
    "src/toy/words.py": """\
def plural(word):
    return word + ("es" if word.endswith("s") else "s")


def unused(word):
    return word
""",
    "tests/conftest.py": """\
import pytest
import toy


@pytest.fixture(scope="module")
def account():
    return toy.Account(toy.clamp(5, 0, 10))
""",
    "tests/test_core.py": """\
import pytest
import toy
from toy.core import HALF, Savings


@pytest.mark.parametrize(("value", "expected"), [(-1, 0), (0, 0), (5, 5), (10, 10), (11, 10)])
def test_clamp(value, expected):
    assert toy.clamp(value, 0, 10) == expected


def test_fib():
    assert [toy.fib(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]


class TestTwice:
    def test_twice(self):
        assert toy.twice(4) == 8

    def test_factor(self):
        assert toy.twice(4, factor=3) == 12


def test_adder():
    assert toy.make_adder(3)(4) == 7


def test_countdown():
    assert list(toy.countdown(3)) == [3, 2, 1]


def test_half():
    assert HALF == 50


def test_deposit(account):
    assert account.balance >= 5
    assert account.deposit(3).balance >= 8


def test_deposit_refuses(account):
    with pytest.raises(ValueError, match="positive"):
        account.deposit(0)


def test_savings():
    assert Savings().deposit(2).balance == 4


def test_writes(tmp_path):
    (tmp_path / "file").write_text("x")
    print("something")
""",
    "tests/test_words.py": """\
import unittest
import pytest
from toy import words


class WordsTest(unittest.TestCase):
    def test_plural(self):
        self.assertEqual(words.plural("cat"), "cats")

    def test_plural_es(self):
        self.assertEqual(words.plural("bus"), "buses")


@pytest.mark.skip(reason="not now")
def test_skipped():
    assert False
""",
    "setup.cfg": "[tool:pytest]\naddopts = --strict-markers\n",
    "README": "A toy.\n",
}

DESCRIPTION = {
    "name": NAME,
    "import_roots": ["src"],
    "sources": ["src/toy"],
    "tests": ["tests"],
    "deselect": [],
}

CLAMP = [f"tests/test_core.py::test_clamp[{case}]" for case in ("-1-0", "0-0", "5-5", "10-10", "11-10")]


def edit(path: str, old: str, new: str) -> dict[str, bytes | None]:
    """The pristine file with one place changed, as changes."""
    assert FILES[path].count(old) == 1, f"{old!r} is in {path} {FILES[path].count(old)} times"
    return {path: FILES[path].replace(old, new).encode()}


BUG = edit(CORE, "if value > high:\n        return high", "if value > high:\n        return low")
"""The bug of `task`: it fails one of clamp's tests."""


def task() -> dict[str, Any]:
    """A task on the toy: `BUG` must be mended."""
    return {
        "instance_id": "toy__core.clamp__1",
        "package": NAME,
        "FAIL_TO_PASS": [CLAMP[4]],
        "PASS_TO_PASS": CLAMP[:4],
    }


def write(packages_dir: Path, files: dict[str, str] | None = None) -> Path:
    """Writes the package into `packages_dir/toy`, and returns that folder."""
    folder = packages_dir / NAME
    for path, text in (files or FILES).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "package.json").write_text(json.dumps(DESCRIPTION))
    return folder

"""Joining several processes: nothing asked, badly asked, and two real processes that sum over both."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from gagar_jax.types import UserError
from launch.distributed import initialize

_PROGRAM = """
from launch.distributed import initialize
assert initialize()
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
everyone = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1]))
print("sum", int(everyone.sum()), "of", jax.process_count())
"""


def test_nothing_asked_is_one_process() -> None:
    assert initialize({}) is False


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"GAGAR_PROCESSES": "2"}, "GAGAR_COORDINATOR, GAGAR_PROCESS not set"),
        (
            {"GAGAR_COORDINATOR": "a:1", "GAGAR_PROCESSES": "two", "GAGAR_PROCESS": "0"},
            "whole number, not 'two'",
        ),
        ({"GAGAR_COORDINATOR": "a:1", "GAGAR_PROCESSES": "2", "GAGAR_PROCESS": "2"}, "must be 0 … 1"),
    ],
)
def test_badly_asked_is_said(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        initialize(environ)


def test_two_processes_see_each_other(user_environment: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    asked = {"GAGAR_COORDINATOR": coordinator, "GAGAR_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=user_environment | asked | {"GAGAR_PROCESS": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.splitlines()[-1] == "sum 3 of 2"
    finally:
        for process in processes:
            process.kill()
            process.wait()

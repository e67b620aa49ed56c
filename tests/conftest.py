"""What every test starts from: eight simulated devices, and JAX as strict as it gets.

The variables must be set before jax is imported, so this file sets them at its top. A test that
starts `gagar` as a user would passes `user_environment()` on, which takes them out again.
"""

from __future__ import annotations

import os
from pathlib import Path

_TEST_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    # float32 + float64, or [3] + [2, 3], is a mistake here even where NumPy would allow it.
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}
os.environ.update(_TEST_ENVIRONMENT)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the clone."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def user_environment() -> dict[str, str]:
    """The environment variables of a person at a shell: without this file's strictness.

    JAX stays on the CPU, so that a test never takes an accelerator someone else is using.
    """
    kept = {k: v for k, v in os.environ.items() if k not in _TEST_ENVIRONMENT}
    return kept | {"JAX_PLATFORMS": "cpu"}

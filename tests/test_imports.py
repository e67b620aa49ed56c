"""The arrows of the architecture, enforced: who may import whom, imports inside functions included."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# What each part of gagar_jax may import of gagar_jax. A part is a file or folder directly below it.
_BASE = {"types", "config"}
_LEARN = _BASE | {"algo", "model", "data", "grading"}
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "config": {"types"},
    "algo": {"algo"},
    "model": _BASE | {"model"},
    "data": _BASE | {"data"},
    "grading": _BASE | {"grading"},
    "rollout": _LEARN | {"rollout", "files"},
    "train": _LEARN | {"rollout", "train"},
    "checkpoint": _LEARN | {"rollout", "train", "files"},
    "metrics": _LEARN | {"rollout", "train", "files"},
    "plugins": {"types"},
    "files": {"types"},
    "logs": {"files"},
    "console": {"logs"},
    "overrides": _BASE,
    "report": _BASE | {"report", "files", "metrics", "console", "plugins", "grading"},  # it grades again
    "bench": _LEARN | {"rollout", "train", "bench", "plugins"},
}
_BELOW_LOOP = set(ALLOWED)
ALLOWED |= {
    "run": _BELOW_LOOP,
    "evaluation": _BELOW_LOOP | {"run"},
    "loop": _BELOW_LOOP | {"run", "evaluation"},
    "cli": _BELOW_LOOP | {"loop", "cli"},
    "__main__": {"cli"},
    "__init__": set(),
}
# Outside libraries that a part may use, or must not.
ONLY = {"algo": {"jax", "chex"}, "types": {"pydantic"}, "config": {"pydantic", "yaml"}}
NEVER = {"grading": {"jax", "jaxlib", "flax", "optax", "chex"}, "cli": {"jax"}}

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(f for top in ("gagar_jax", "envs", "launch", "configs") for f in (ROOT / top).rglob("*.py"))


def imported(source: str, module: str, *, package: bool = False) -> Iterator[str]:
    """Dotted names of everything a file imports at run time (imports for annotations are left out)."""
    tree = ast.parse(source)
    skipped = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if package else module.split(".")[:-1]
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(path: str, source: str) -> list[str]:
    """What a file, named by its path in the repository, imports against the arrows."""
    *folders, last = path.removesuffix(".py").split("/")
    names = [*folders, last]
    top, part = names[0], names[1] if len(names) > 1 else ""
    problems = []
    for name in sorted(
        set(imported(source, ".".join(names).removesuffix(".__init__"), package=last == "__init__"))
    ):
        head, *rest = name.split(".")
        if head in sys.stdlib_module_names or head == "__future__":
            continue
        inside = head in ("gagar_jax", "envs", "launch", "configs")
        if top == "envs":
            wrong = inside and head != "envs" and not name.startswith("gagar_jax.types.")
        elif top in ("launch", "configs"):
            wrong = head in ({"envs"} if top == "launch" else {"gagar_jax", "envs", "launch"})
        elif head == "gagar_jax":
            wrong = bool(rest) and rest[0] not in ALLOWED.get(part, set())
        else:
            wrong = inside or head not in ONLY.get(part, {head}) or head in NEVER.get(part, set())
        if wrong:
            problems.append(f"{path} imports {name}")
    return problems


def test_every_part_has_its_arrows() -> None:
    parts = {
        f.relative_to(ROOT / "gagar_jax").parts[0].removesuffix(".py")
        for f in FILES
        if "gagar_jax" in f.parts
    }
    assert parts <= set(ALLOWED), f"say in ALLOWED what {sorted(parts - set(ALLOWED))} may import"


def test_arrows() -> None:
    assert len(FILES) > 10
    assert [v for f in FILES for v in violations(str(f.relative_to(ROOT)), f.read_text())] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gagar_jax/algo/loss.py", "from gagar_jax.config import Config"),
        ("gagar_jax/algo/loss.py", "import numpy as np"),
        ("gagar_jax/grading/service.py", "def f():\n    import jax.numpy as jnp"),
        ("gagar_jax/rollout/exchange.py", "from ..train import step"),
        ("gagar_jax/loop.py", "import envs"),
        ("gagar_jax/loop.py", "from gagar_jax import cli"),
        ("gagar_jax/data/__init__.py", "from . import packing\nfrom ..loop import train"),
        ("envs/coding/env.py", "from gagar_jax.config import Config"),
        ("envs/coding/env.py", "import gagar_jax"),
    ],
)
def test_wrong_arrows_are_found(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gagar_jax/algo/loss.py", "import jax.numpy as jnp\nfrom gagar_jax.algo import segments"),
        ("gagar_jax/data/__init__.py", "from . import packing\nfrom .packing import pack"),
        ("gagar_jax/grading/service.py", "if TYPE_CHECKING:\n    import jax"),
        ("envs/coding/env.py", "from gagar_jax.types import Outcome\nfrom envs.coding import tools"),
        ("launch/distributed.py", "from gagar_jax.types import UserError\nimport jax"),
    ],
)
def test_right_arrows_pass(path: str, source: str) -> None:
    assert violations(path, source) == []

"""The repository keeps its promises: commands exist, recipes load, settings are explained, nothing leaks."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from gagar_jax.config import Config, Section, load

LONG = 400
"""Lines beyond which a Python file is reported."""

# Spelt in pieces, so that this file does not contain what it looks for.
LOCAL = [
    r"(?<![\w.])/(?:ro" + r"ot|wo" + r"rk/(?:main|shared)|ho" + r"me/\w+|Us" + r"ers/\w+)/",
    r"py" + r"pi\.org|python" + r"hosted|npm" + r"js\.|hugging" + r"face\.co|conda\.anaconda",
    r"local" + r"host:\d{4}|\b(?:10|192\.168)(?:\.\d{1,3}){2,3}\b",
]


def tracked(repository: Path) -> list[Path]:
    """What git tracks or would add: text files only."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    files = [repository / line for line in listed.stdout.splitlines()]
    return [f for f in files if f.is_file() and b"\0" not in f.read_bytes()[:1024]]


def test_no_file_names_a_machine_or_a_registry(repository: Path) -> None:
    files = tracked(repository)
    assert len(files) > 20
    found = [
        f"{file.relative_to(repository)}: {match.group()}"
        for file in files
        for pattern in LOCAL
        for match in re.finditer(pattern, file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["see /ro" + "ot/x", "'/wo" + "rk/main/x'", "https://py" + "pi.org/simple", "http://local" + "host:8080"],
)
def test_what_must_not_be_there_would_be_found(text: str) -> None:
    assert any(re.search(pattern, text) for pattern in LOCAL)


def test_long_files_are_reported(repository: Path, record_property: Callable[[str, object], None]) -> None:
    """A report, not a limit: names go to the test's properties; the limit on one file is twice `LONG`."""
    files = [
        f for top in ("gagar_jax", "envs", "launch", "configs") for f in (repository / top).rglob("*.py")
    ]
    lengths = {str(f.relative_to(repository)): len(f.read_text().splitlines()) for f in files}
    long = {name: length for name, length in lengths.items() if length > LONG}
    record_property("long_files", long)
    assert {name: length for name, length in long.items() if length > 2 * LONG} == {}


def test_commands_in_the_documents_exist(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    documents = [repository / "README.md", repository / "CONTRIBUTING.md", *repository.glob("docs/*.md")]
    named = {
        target
        for document in documents
        for block in re.findall(
            r"```(?:sh|bash|console)?\n(.*?)```|`(make [^`\n]+)`", document.read_text(), re.DOTALL
        )
        for target in re.findall(r"^\s*(?:\$ )?make ([a-z]+)", "\n".join(block), re.MULTILINE)
    }
    assert {"train", "test"} <= named
    assert named <= targets


def test_continuous_integration_runs_the_test_command(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert re.search(r"^exec make test$", script.read_text(), re.MULTILINE)


def test_files_named_in_the_documents_exist(repository: Path) -> None:
    documents = [repository / "README.md", repository / "CONTRIBUTING.md", *repository.glob("docs/*.md")]
    for document in documents:
        links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", document.read_text())
        missing = [link for link in links if not (document.parent / link).exists()]
        assert missing == [], f"{document.name} links to what is not there"


@pytest.mark.parametrize("name", ["pocket", "smoke"])
def test_recipes_load_and_say_what_they_cost(repository: Path, name: str) -> None:
    path = repository / "configs" / f"{name}.yaml"
    config = load(path)
    assert config.name == name
    head = path.read_text().split(f"name: {name}")[0]
    assert all(f"# {word} " in head for word in ("Command", "Hardware", "Time", "Expect"))
    # A row must hold the longest trajectory that a sampler slot can produce.
    assert config.rollout.max_prompt + config.rollout.max_continuation <= config.train.row_length


# Settings whose name and type say all there is to say.
SELF_EVIDENT = set(
    re.findall(
        r"\w+",
        """
    name seed run_dir workers id max_turns confinement vocab_size width layers heads kv_heads head_dim
    mlp_width rope_theta param_dtype compute_dtype lr warmup_steps b1 b2 weight_decay steps
    tokens_per_batch optimizer log_every prefill_chunk prefill_rows temperature grader concurrency mode
    lambda_max clip_low entropy_coef microbatch_rows checkpoint_every keep_checkpoints data model
    mutants_per_function max_function_lines max_function_chars tier1_best tier1_rest tier2_best
    tier2_worst tier3 breaker_window breaker_threshold breaker_cooldown_s demonstrations_per_task
    max_prompt splits final_lr_ratio
    """,
    )
)


def test_every_setting_is_explained(repository: Path) -> None:
    source = (repository / "gagar_jax" / "config.py").read_text()
    explained = set(re.findall(r'^    (\w+): .*\n    """', source, re.MULTILINE))
    names, sections = set[str](), [Config]
    while sections:
        for name, field in sections.pop().model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                sections.append(kind)  # type: ignore[arg-type]
            else:
                names.add(name)
    assert sorted(names - explained - SELF_EVIDENT) == [], "give these a docstring in config.py"


def test_the_installed_package_is_this_one(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    installed = importlib.metadata.distribution("gagar-jax")
    assert installed.version == project["version"]
    names = {entry.name for entry in installed.entry_points if entry.group == "gagar_jax.environments"}
    assert names == set(project["entry-points"]["gagar_jax.environments"])
    assert Config().env.id in names


def test_constraints_are_inside_the_ranges(repository: Path) -> None:
    from packaging.requirements import Requirement

    pinned = dict(
        line.split("==") for line in (repository / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["test"]:
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert requirement.specifier.contains(pinned[name]), line

"""One run: its folder, and what every stage of it shares (tasks, tokenizer, mesh, environments).

A folder belongs to one configuration. Opening it again goes on with it; settings that change what the
run computes are refused, and named.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium
import jax
from flax import nnx

from gagar_jax import config as settings
from gagar_jax.config import Config
from gagar_jax.console import Console
from gagar_jax.data.packing import check_row_length
from gagar_jax.data.tokenizer import END, Tokenizer
from gagar_jax.files import write_atomic, writing
from gagar_jax.grading.agentic.grader import tokens_spent
from gagar_jax.grading.cache import CachedGrader, read_verdicts
from gagar_jax.grading.graders import make_grader
from gagar_jax.grading.service import Grader
from gagar_jax.metrics import MetricsWriter
from gagar_jax.model import sharding, transformer
from gagar_jax.plugins import environment_plugin, lent_to_graders
from gagar_jax.rollout.collector import Collector
from gagar_jax.rollout.exchange import EnvPool
from gagar_jax.rollout.sampler import Sampler
from gagar_jax.types import EnvironmentPlugin, UserError

log = logging.getLogger(__name__)

PHASES = ("tasks", "demonstrations", "warm start", "evaluate warm start", "reinforce", "evaluate")

# Settings that may differ when a folder is opened again: they change where a run ends or how it is
# watched, not what it computes on the way.
FREE = {
    *("name", "run_dir", "tasks.dir", "tasks.workers", "env.workers", "sft.log_every"),
    *("train.steps", "train.checkpoint_every", "train.keep_checkpoints"),
    *("eval.samples", "eval.max_tasks", "eval.splits", "grading.concurrency", "grading.deadline_s"),
}


def changed_settings(old: Config, new: Config) -> list[str]:
    """`key: old → new` for every setting that would make this another run."""

    before, after = settings.leaves(old), settings.leaves(new)
    free = FREE
    if new.train.optimizer.schedule != "constant":
        free = FREE - {"train.steps"}  # the learning rate of every step depends on where the run ends
    keys = [key for key in after if key not in free and before.get(key) != after[key]]
    return [f"{key}: {before.get(key)} → {after[key]}" for key in keys]


class Run:
    """An open run folder. A context manager: `with Run(config) as run`.

    Args:
      config: its settings.
      record: whether config.yaml becomes these settings, where some that may differ do.

    Raises:
      UserError: another process has the folder, or it belongs to another configuration.
    """

    def __init__(self, config: Config, *, record: bool = True) -> None:
        self.config, self.dir = config, config.run_dir
        _check(config)
        self.mesh = sharding.make_mesh(data=config.mesh.data, model=config.mesh.model)
        _check_mesh(config, self.mesh.shape["data"])
        with writing(self.dir):
            (self.dir / "trajectories").mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.dir)
        try:
            self._claim(record)
        except BaseException:
            self._lock.close()
            raise
        self.console = Console(config.name, phases=PHASES, run_dir=self.dir)
        self.metrics = MetricsWriter(self.dir)
        self.plugin = environment_plugin(config.env.id)
        self.key = jax.random.key(config.seed)
        self._pool: EnvPool | None = None

    def _claim(self, record: bool) -> None:
        """Writes the settings down, or refuses a folder that belongs to others."""
        saved = self.dir / "config.yaml"
        if saved.exists() and (changed := changed_settings(settings.load(saved), self.config)):
            raise UserError(
                f"{self.dir} belongs to a run with other settings ({'; '.join(changed)}). "
                "Use another --run-dir, or remove the folder."
            )
        if record or not saved.exists():
            write_atomic(saved, settings.dump(self.config))

    def __enter__(self) -> Run:
        self.console.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()
        self.metrics.close()
        self.console.__exit__(kind, error, tb)
        self._lock.close()

    # ---- what the stages share, made when first needed

    @functools.cached_property
    def tasks_dir(self) -> Path:
        with self.console.phase("tasks"):
            return self.plugin.prepare(
                self.config.tasks.model_dump(mode="json"),
                confinement=self.config.env.confinement,
                progress=lambda done, total, message: self.console.update(done, total=total, message=message),
            )

    @functools.cached_property
    def tasks(self) -> dict[str, list[dict[str, Any]]]:
        """The task records of each split, by instance id."""
        splits: dict[str, list[dict[str, Any]]] = {}
        for record in sorted(self.plugin.load(self.tasks_dir), key=lambda r: r["instance_id"]):
            splits.setdefault(record["split"], []).append(record)
        if not splits.get("train"):
            raise UserError(
                f"{self.tasks_dir} has no task in the split 'train'; build more (tasks.max_tasks)"
            )
        return splits

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        path = self.dir / "tokenizer.json"
        source = self.config.sft.warm_start_from
        if not path.exists() and source is not None:
            _require(source / "tokenizer.json", "sft.warm_start_from")
            with writing(path):
                shutil.copyfile(source / "tokenizer.json", path)
        if not path.exists():
            texts = self.plugin.corpus(self.tasks_dir)
            with writing(path):
                Tokenizer.train(texts, self.config.model.vocab_size).save(path)
        return Tokenizer.load(path)

    @functools.cached_property
    def graph(self) -> nnx.GraphDef[transformer.Transformer]:
        return transformer.abstract(self.config.model)[0]

    @functools.cached_property
    def collector(self) -> Collector:
        kwargs = self.plugin.env_kwargs(self.tasks_dir, self.config.env.model_dump(mode="json"))
        rollout = self.config.rollout
        self._pool = EnvPool(
            lambda: gymnasium.make(self.config.env.id, disable_env_checker=True, **kwargs),
            size=rollout.lanes * rollout.lane_slots,
            workers=self.config.env.workers,
        )
        sampler = Sampler(self.graph, rollout, END, self.mesh)
        return Collector(sampler, self._pool, self.tokenizer, rollout, key=self.key)


def run_grader(config: Config, plugin: EnvironmentPlugin, tasks_dir: Path, run_dir: Path) -> Grader:
    """The run's grader, with what its environment lends it: whole repositories, and confined commands.

    Conversations of an agentic grader are appended to grading.jsonl of the run folder, and its verdicts to
    verdicts.jsonl, from where a group that is rolled out again after a restart gets its own. The tokens of
    the conversations count towards the run's cap after a restart too.

    Raises:
      UserError: the grader lacks something it must have.
    """
    if config.grading.grader == "structural":
        return make_grader(config.grading)
    run, repository = lent_to_graders(plugin, tasks_dir, config.env.confinement)
    conversations, verdicts = run_dir / "grading.jsonl", run_dir / "verdicts.jsonl"
    keep, keep_verdict = _appending(conversations), _appending(verdicts)
    spent = tokens_spent(conversations)
    grader = make_grader(config.grading, run=run, repository=repository, keep=keep, spent=spent)
    return CachedGrader(grader, kept=read_verdicts(verdicts), keep=keep_verdict)


def _appending(path: Path) -> Callable[[dict[str, Any]], None]:
    """A thread-safe function that appends records to a JSONL file, whole or not at all.

    What a crash left of a last line is cut off first: the next record would be glued to it.
    """
    lock = threading.Lock()
    if path.exists():
        with writing(path), path.open("rb+") as file:
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
            if torn := file.seek(0, os.SEEK_END) - whole:
                log.warning("%s: dropped an unfinished last line (%d bytes)", path, torn)
                file.truncate(whole)

    def append(record: dict[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        with lock, writing(path), path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise

    return append


def _check(config: Config) -> None:
    """What can only be checked across sections, before anything is spent."""
    try:
        check_row_length(
            config.train.row_length,
            max_prompt=config.rollout.max_prompt,
            max_continuation=config.rollout.max_continuation,
        )
    except ValueError as error:
        raise UserError(str(error)) from None

    bucket, microbatch = config.train.row_bucket, config.train.microbatch_rows
    # A batch has the bucket times a power of two of rows.
    if (microbatch % bucket and bucket % microbatch) or (microbatch // bucket).bit_count() > 1:
        raise UserError(
            f"train.microbatch_rows {microbatch} must divide train.row_bucket {bucket}, or be it times a "
            "power of two: batches have row_bucket rows times a power of two"
        )
    if config.grading.grader == "agentic":
        grader = make_grader(config.grading)  # says what it lacks before anything is spent
        if close := getattr(grader, "close", None):
            close()


def _check_mesh(config: Config, shards: int) -> None:
    rows = min(config.train.row_bucket, config.train.microbatch_rows)
    if rows % shards:
        raise UserError(
            f"mesh.data is {shards} devices, over which {rows} rows do not divide; train.row_bucket and "
            "train.microbatch_rows must be multiples of it"
        )


def _require(path: Path, key: str) -> None:
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist")


def _lock(run_dir: Path) -> Any:
    """An open, locked file that keeps a second process out; released when closed, or when we die."""
    file = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"another process is working in {run_dir}; wait for it or use another --run-dir"
        ) from None
    file.write(str(os.getpid()))
    file.flush()
    return file

"""Start here: the whole run, in order of execution.

    tasks → tokenizer → demonstrations → warm start → evaluation → reinforcement → evaluation → summary

Each stage leaves a file that says it is done and takes up where it was; `train` just goes through them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gagar_jax.checkpoint import Checkpoints
from gagar_jax.config import Config
from gagar_jax.data.demonstrations import Example, SupervisedBatches
from gagar_jax.data.packing import TrainBatch, pack
from gagar_jax.data.tasks import task_iterator
from gagar_jax.evaluation import evaluate_policy
from gagar_jax.files import write_atomic
from gagar_jax.grading.patch import count_lines
from gagar_jax.grading.service import GradingService
from gagar_jax.report.summary import evaluation_tables, write_summary
from gagar_jax.rollout.collector import Collected, Journal
from gagar_jax.rollout.episode import demonstration_tokens
from gagar_jax.rollout.exchange import INVALID_CAUSES, wait_for
from gagar_jax.run import Run, run_grader
from gagar_jax.train.state import TrainState, abstract_state, fingerprint, init_state, make_optimizer, restart
from gagar_jax.train.step import Credit, make_sft_step, make_train_step, programs_compiled
from gagar_jax.types import Demonstration, Group, UserError, to_json

REINFORCE = 0  # folded into the sampling key; evaluation is 1


def train(config: Config) -> None:
    """Everything a configuration describes. Interrupted, the same call goes on where it was."""
    with Run(config) as run:
        params = _warm_start(run)
        with run.console.phase("evaluate warm start"):
            evaluate_policy(run, params, "sft", version=0)
        state = _reinforce(run, params)
        with run.console.phase("evaluate"):
            evaluate_policy(run, state.params, "rl", version=int(state.step))
        _summarise(run)


def warm_start(config: Config) -> None:
    """Tasks, tokenizer, demonstrations and the supervised stage; then stops."""
    with Run(config) as run:
        _warm_start(run)


def evaluate(config: Config, *, stage: str) -> None:
    """Evaluates a run's policy ("sft" or "rl") again, with the evaluation settings given, once."""
    with Run(config, record=False) as run:
        optimizer = make_optimizer(config.train.optimizer, config.train.updates)
        params = _warm_start(run)
        version = 0
        if stage == "rl":
            found = _checkpoints(run).restore(abstract_state(config.model, optimizer, run.mesh))
            if found is None:
                raise UserError(f"{run.dir} has no RL checkpoint yet; evaluate --stage sft, or train on")
            params, version = found.state.params, int(found.state.step)
        with run.console.phase("evaluate"):
            evaluate_policy(run, params, stage, version=version)
        _summarise(run)


# ---- warm start


def _warm_start(run: Run) -> Any:
    """The warm-started parameters: restored where they exist, else trained on demonstrations."""
    config = run.config
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    abstract = abstract_state(config.model, optimizer, run.mesh)
    elsewhere = config.sft.warm_start_from
    saved = Checkpoints((elsewhere or run.dir) / "warm_start", keep=1, read_only=elsewhere is not None)
    found = saved.restore(abstract)
    if elsewhere is not None and (found is None or found.step < config.sft.steps):
        raise UserError(f"sft.warm_start_from: {elsewhere} has no finished warm start")
    if found is not None and found.step >= config.sft.steps:
        _ = run.tokenizer
        return found.state.params
    state = (
        found.state
        if found
        else init_state(config.model, optimizer, jax.random.fold_in(run.key, 0), run.mesh)
    )
    batches = SupervisedBatches(
        _examples(run), tokens_per_batch=config.sft.tokens_per_batch, prompt_weight=config.sft.prompt_weight,
        seed=config.seed,
        row_length=config.train.row_length, row_multiple=run.mesh.shape["data"],
    )  # fmt: skip
    step_fn = make_sft_step(config, run.graph, run.mesh)
    first = int(state.step)
    run.metrics.rewind("sft", first + 1)
    with run.console.phase("warm start", total=config.sft.steps, first=first):
        tokens, since = 0, time.monotonic()
        for step in range(first, config.sft.steps):
            batch = batches.batch(step)
            state, values = step_fn(state, batch)
            tokens += int(np.count_nonzero(batch.segment_BT))
            if (step + 1) % config.sft.log_every == 0 or step + 1 == config.sft.steps:
                numbers = {name: float(value) for name, value in values.items()}
                speed = tokens / (time.monotonic() - since)
                numbers |= {"loss": numbers.pop("nll"), "train_tokens_per_s": speed}
                numbers["programs_compiled"] = programs_compiled(step_fn)
                run.metrics.write(step + 1, "sft", numbers)
                run.console.update(step + 1, metrics=numbers)
                tokens, since = 0, time.monotonic()
            if (step + 1) % max(config.sft.steps // 5, 1) == 0 or step + 1 == config.sft.steps:
                saved.save(step + 1, state, {})
    return state.params


def _examples(run: Run) -> list[Example]:
    """Demonstrations on the training tasks, played through the environment once and kept."""
    path, config = run.dir / "demonstrations.jsonl", run.config
    if not path.exists():
        with run.console.phase("demonstrations"):
            demos = run.plugin.demonstrations(
                run.tasks_dir,
                config.env.model_dump(mode="json"),
                instance_ids=[task["instance_id"] for task in run.tasks["train"]],
                per_task=config.sft.demonstrations_per_task,
                clean_share=config.sft.clean_share,
                seed=config.seed,
                progress=lambda done, total, message: run.console.update(done, total=total, message=message),
            )
            write_atomic(path, "".join(json.dumps(to_json(demo)) + "\n" for demo in demos))
    demos = [Demonstration(**json.loads(line)) for line in path.read_text().splitlines()]
    limit = config.rollout.max_observation
    return [Example(*demonstration_tokens(run.tokenizer, demo, limit)) for demo in demos]


# ---- reinforcement


def _reinforce(run: Run, warm: Any) -> TrainState:
    """The RL stage: collect groups, redeem their grades inside the train step, update, record."""
    config, checkpoints = run.config, _checkpoints(run)
    optimizer = make_optimizer(config.train.optimizer, config.train.updates)
    service = _grading_service(run)
    step_fn = make_train_step(config, run.graph, run.mesh, service.redeem)
    tasks = task_iterator(run.tasks["train"], seed=config.seed)
    found = checkpoints.restore(abstract_state(config.model, optimizer, run.mesh))
    state = found.state if found else restart(config.model, optimizer, warm, run.mesh)
    if found:
        tasks.set_state(found.extra["tasks"])
    first = int(state.step)
    run.metrics.rewind("rl", first)
    begun = first, tasks.get_state()  # together, so that no interrupt can fall between them
    with run.console.phase("reinforce", total=config.train.steps, first=first):
        try:
            for step in range(first, config.train.steps):
                begun = step, tasks.get_state()
                batch_tasks = [next(tasks) for _ in range(config.rollout.groups)]
                started = time.monotonic()
                collected = _collect(run, state, service, batch_tasks, step)
                rollout_s, started = time.monotonic() - started, time.monotonic()
                batch = pack(
                    collected.groups,
                    num_trajectories=config.rollout.groups * config.rollout.group_size,
                    num_groups=config.rollout.groups,
                    row_length=config.train.row_length,
                    row_bucket=config.train.row_bucket,
                )
                state, values, credit = _step(service, step_fn, state, batch)
                train_s = time.monotonic() - started
                numbers = {name: float(value) for name, value in values.items()}
                numbers |= _rollout_metrics(collected, rollout_s)
                tokens = int(np.count_nonzero(batch.segment_BT))
                numbers |= {"train_s": train_s, "train_tokens_per_s": tokens / train_s}
                numbers |= service.metrics([group.group for group in collected.groups])
                numbers["programs_compiled"] = run.collector.programs_compiled + programs_compiled(step_fn)
                _write_trajectories(run, step, collected.groups, service, credit)
                service.forget([group.group for group in collected.groups])
                run.metrics.write(step, "rl", numbers)
                run.console.update(step + 1, metrics=numbers)
                if (step + 1) % config.train.checkpoint_every == 0 or step + 1 == config.train.steps:
                    checkpoints.save(step + 1, state, {"tasks": tasks.get_state()})
                    _drop_journals(run, step)
        except KeyboardInterrupt:
            # Where the rollout was cut, the weights stand at the last step's end, and what finished since is
            # in the journal of the step under way. Where more was cut, the step is done again from the last
            # checkpoint and the journals, with its record.
            if not state.step.is_deleted() and first < int(state.step) == begun[0]:
                checkpoints.save(begun[0], state, {"tasks": begun[1]})
            raise
        finally:
            service.close()
    return state


def _step(
    service: GradingService, step_fn: Callable[..., Any], state: TrainState, batch: TrainBatch
) -> tuple[TrainState, dict[str, Any], Credit]:
    """The train step, in a thread of its own: Ctrl-C reaches this one, and ends the wait for grades.

    Raises:
      KeyboardInterrupt: after the step has ended. It may have been applied, with grades missing.
    """

    def run() -> tuple[TrainState, dict[str, Any], Credit]:
        new_state, values, credit = step_fn(state, batch)
        return new_state, *jax.device_get((values, credit))

    return wait_for(run, on_interrupt=service.hurry)


def _collect(
    run: Run, state: TrainState, service: GradingService, tasks: list[dict[str, Any]], step: int
) -> Collected:
    groups, members = run.config.rollout.groups, run.config.rollout.group_size

    def progress(done: int, total: int) -> None:
        run.console.update(step, message=f"step {step}: {done} of {total} episodes")

    return run.collector.collect(
        state.params, tasks, first_group=step * groups, members=members, version=step, stage=REINFORCE,
        journal=Journal(_journal_path(run, step), fingerprint(state.params)), on_group=service.submit,
        progress=progress,
    )  # fmt: skip


def _grading_service(run: Run) -> GradingService:
    return GradingService(
        run_grader(run.config, run.plugin, run.tasks_dir, run.dir),
        run.config.grading,
        mode=run.config.train.mode,
    )


def _rollout_metrics(collected: Collected, rollout_s: float) -> dict[str, float]:
    """What the step's episodes were like; means over valid or, for patches, passed trajectories."""
    every = [t for group in collected.groups for t in group.trajectories]
    valid = [t for t in every if t.valid]
    passed = [t for t in valid if t.passed]
    judged = [t.outcome.verdict_ms for t in valid if not t.outcome.cached]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if values else float("nan")

    return {
        "turns_mean": mean([len(t.turns) for t in valid]),
        "tokens_mean": mean([t.generated_tokens for t in valid]),
        "passed_tokens_mean": mean([t.generated_tokens for t in passed]),
        "patch_lines_mean": mean([count_lines(t.patch) for t in passed]),
        "malformed_share": mean([turn.malformed for t in valid for turn in t.turns]),
        "verdict_ms_mean": mean(judged),
        "verdict_cached_share": mean([t.outcome.cached for t in valid]),
        "rollout_s": rollout_s,
        "rollout_wait_s": collected.wait_s,
        "decode_tokens_per_s": collected.counts.get("decode_tokens", 0) / rollout_s,
        "observations_cut": collected.counts.get("observations_cut", 0),
        "invalid_trajectories": len(every) - len(valid),
        **{f"invalid_{cause}": collected.counts.get(f"invalid_{cause}", 0) for cause in INVALID_CAUSES},
    }


def _write_trajectories(
    run: Run, step: int, groups: list[Group], service: GradingService, credit: Credit
) -> None:
    """trajectories/step_NNNNN.jsonl: every attempt with its facts, verdict, coefficient and advantage.

    The first line of a group also has its task, its base texts and, under `grading`, what became of it.
    """
    lines, n = [], 0
    for group in groups:
        record = service.record(group.group) or {}
        members = record.pop("members", {})
        for trajectory in group.trajectories:
            member = members.get(str(trajectory.ticket.member), {})
            external = bool(credit.external_N[n])  # as the step took it: copied, so failed
            extra = {
                "reward": float(trajectory.passed and not external),
                "external": external,
                "advantage": float(credit.advantage_N[n]),
                "graded": record.get("graded", False),
                "ungraded_cause": record.get("cause"),
            }
            if trajectory is group.trajectories[0]:  # once a group; `gagar grade` needs the first two
                extra |= {"task": group.task, "base_files": group.base_files, "grading": record}
            lines.append(json.dumps(to_json(trajectory) | member | extra) + "\n")
            n += 1
    write_atomic(run.dir / "trajectories" / f"step_{step:05d}.jsonl", "".join(lines))


def _journal_path(run: Run, step: int) -> Path:
    return run.dir / "trajectories" / f"step_{step:05d}.journal.jsonl"


def _drop_journals(run: Run, last: int) -> None:
    """Journals of steps a checkpoint now covers: their trajectories are in step_*.jsonl."""
    for path in (run.dir / "trajectories").glob("step_*.journal.jsonl"):
        if int(path.name.split("_")[1].split(".")[0]) <= last:
            path.unlink()


def _checkpoints(run: Run) -> Checkpoints:
    return Checkpoints(run.dir / "checkpoints", keep=run.config.train.keep_checkpoints)


# ---- evaluation and summary


def _summarise(run: Run) -> None:
    path = write_summary(run.dir)
    run.console.tables(*evaluation_tables(run.dir))
    run.console.log(f"summary: {path}")

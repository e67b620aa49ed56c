"""Typed, closed settings: every key of a run's YAML, its unit, its default, and nothing else.

One default, in one place. Unknown keys are errors that suggest the nearest name (`load`). `algo`
never sees these objects: it takes arrays and keyword-only scalars.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from gagar_jax.types import UserError

Confinement = Literal["auto", "bubblewrap", "namespaces", "none"]


class ConfigError(UserError, ValueError):
    """A setting is unknown, misspelt or out of range. The message names file, key and remedy."""


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TasksConfig(Section):
    """Which tasks, and how many. `gagar tasks build` makes them; `gagar train` does so when missing."""

    packages: tuple[str, ...] = ()
    """Names from the environment's pinned catalogue; empty means all of it."""
    dir: Path | None = None
    """Where built tasks lie. Default: the user's cache folder, under a name that hashes the recipe."""
    max_tasks: int = pydantic.Field(900, ge=1)
    """Stop after this many admitted tasks."""
    functions: int = pydantic.Field(110, ge=1)
    """How many functions bugs are put into, spread over the packages."""
    mutants_per_function: int = pydantic.Field(12, ge=1)
    max_function_lines: int = pydantic.Field(16, ge=1)
    max_function_chars: int = pydantic.Field(420, ge=1)
    unseen_functions: float = pydantic.Field(0.15, ge=0, lt=1)
    """Share of functions kept whole for the `unseen_function` split."""
    unseen_mutants: float = pydantic.Field(0.2, ge=0, lt=1)
    """Share of the mutants of every other function kept for the `unseen_mutant` split."""
    seed: int = 0
    """Seed of mutation and splits; not the run's seed, so that runs with other seeds share tasks."""
    workers: int = pydantic.Field(2, ge=1)


class EnvConfig(Section):
    """The environment, found by its Gymnasium id, and its limits."""

    id: str = "envs:gagar/CodeRepair-v0"
    max_turns: int = pydantic.Field(6, ge=1)
    tool_time_s: float = pydantic.Field(20.0, gt=0)
    """Seconds an episode's tools may use (tool time, not wall-clock)."""
    observation_chars: int = pydantic.Field(480, ge=40)
    """Longer observations are cut in the middle, and say so."""
    locate: Literal["none", "file", "function", "line"] = "function"
    """How much of the fault's place the prompt gives away: the difficulty dial."""
    confinement: Confinement = "auto"
    workers: int = pydantic.Field(4, ge=1)
    """Threads that step environments; tests run in processes of their own."""


class ModelConfig(Section):
    """A decoder: RMSNorm, rotary positions, grouped queries, squared-ReLU MLP, tied embedding."""

    vocab_size: int = pydantic.Field(1024, ge=64)
    width: int = 128
    layers: int = 5
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    mlp_width: int = 512
    rope_theta: float = 10_000.0
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_layers: bool = False
    """Compile one layer and scan it: faster to compile when deep; unrolled is faster to run when shallow."""
    remat: bool = False
    """Recompute each layer's activations in the backward pass."""

    @pydantic.model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}")
        return self


class OptimizerConfig(Section):
    lr: float = pydantic.Field(2e-4, gt=0)
    warmup_steps: int = pydantic.Field(5, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` decays to `final_lr_ratio`·lr over the stage's steps."""
    final_lr_ratio: float = pydantic.Field(0.1, ge=0, le=1)
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = pydantic.Field(0.0, ge=0)
    grad_clip: float = pydantic.Field(1.0, gt=0)
    """Clip of the gradient's global norm."""


class SftOptimizerConfig(OptimizerConfig):
    lr: float = pydantic.Field(3e-3, gt=0)
    warmup_steps: int = pydantic.Field(50, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    final_lr_ratio: float = pydantic.Field(0.05, ge=0, le=1)


class SftConfig(Section):
    """Supervised warm start on demonstrations."""

    steps: int = pydantic.Field(1500, ge=0)
    tokens_per_batch: int = pydantic.Field(2048, ge=64)
    demonstrations_per_task: int = pydantic.Field(8, ge=1)
    clean_share: float = pydantic.Field(0.5, ge=0, le=1)
    """Share of demonstrations in the clean style; the rest is spread over the sloppy ones."""
    prompt_weight: float = pydantic.Field(0.3, ge=0, le=1)
    """Weight of a prompt's tokens in the loss, where an action's is 1."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    log_every: int = pydantic.Field(20, ge=1)
    warm_start_from: Path | None = None
    """Another run's folder, whose tokenizer and warm-started policy to take instead of training them."""


class RolloutConfig(Section):
    groups: int = pydantic.Field(8, ge=1)
    """Prompts a step."""
    group_size: int = pydantic.Field(16, ge=2)
    """Trajectories a prompt."""
    lanes: int = pydantic.Field(8, ge=1)
    """Prompts in flight. The slots of a lane share one prefilled prompt."""
    lane_slots: int = pydantic.Field(8, ge=1)
    """Sequences of a lane that decode at once; a group's members stream through its lane's slots."""
    max_prompt: int = pydantic.Field(256, ge=16)
    max_observation: int = pydantic.Field(160, ge=8)
    """Tokens of one observation; the environment's own cut (`env.observation_chars`) comes first."""
    max_generated: int = pydantic.Field(192, ge=8)
    """Tokens a trajectory may generate, over all its turns."""
    max_continuation: int = pydantic.Field(256, ge=16)
    """Tokens after the prompt, generated and observed: the length of a slot's cache."""
    decode_block: int = pydantic.Field(4, ge=1)
    """Tokens decoded between two exchanges with the host."""
    prefill_chunk: int = pydantic.Field(32, ge=1)
    prefill_rows: int = pydantic.Field(16, ge=1)
    temperature: float = pydantic.Field(1.0, gt=0)


class AgenticConfig(Section):
    """A chat model that grades. Its key is read from the environment and written nowhere."""

    base_url: str | None = None
    """Of an OpenAI-compatible endpoint; None takes OPENAI_BASE_URL, or OpenAI's own."""
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key."""
    temperature: float = pydantic.Field(0.2, ge=0)
    stream: bool = False
    """Ask for answers piece by piece; the result is the same."""
    orders: int = pydantic.Field(1, ge=1, le=2)
    """2 grades every group in two opposite orders, and voids a verdict that the order decided."""
    max_reversals: float = pydantic.Field(0.25, ge=0, le=1)
    """With two orders: largest share of strictly ordered pairs that may come out reversed."""
    max_turns: int = pydantic.Field(30, ge=1)
    corrections: int = pydantic.Field(2, ge=0)
    """Answers that cannot be read and may be given again, a conversation."""
    max_output_tokens: int = pydantic.Field(4096, ge=64)
    """Of one answer."""
    max_group_tokens: int = pydantic.Field(400_000, ge=1)
    """Of one conversation, prompts included."""
    max_run_tokens: int = pydantic.Field(0, ge=0)
    """Of the whole run, restarts included; once it is reached nothing more is asked. 0 is no cap.

    Not counted: requests that failed, or were given up, without the server's saying what they used. After a
    restart, also answers that could not be used or came too late, and conversations that a crash kept from
    being written to grading.jsonl. Requests under way when it is reached go on."""
    request_timeout_s: float = pydantic.Field(120.0, gt=0)
    """Of one answer, from the question to its last byte."""
    max_retries: int = pydantic.Field(4, ge=0)
    """Of a request that met 429, 5xx or a broken connection; the wait between them grows."""
    wall_s: float = pydantic.Field(600.0, gt=0)
    """Of one group."""
    command_s: float = pydantic.Field(30.0, gt=0)
    """Of one command that the model runs."""
    total_command_s: float = pydantic.Field(120.0, ge=0)
    """Of all commands of one conversation."""
    result_characters: int = pydantic.Field(12_000, ge=200)
    """Of one tool's result; what is longer is cut, and says so."""


class GradingConfig(Section):
    grader: Literal["structural", "agentic"] = "structural"
    agentic: AgenticConfig = AgenticConfig()
    concurrency: int = pydantic.Field(2, ge=1)
    deadline_s: float = pydantic.Field(10.0, ge=0)
    """How long the train step waits for a batch's verdicts; what is not there by then is ungraded."""
    tier1_best: float = pydantic.Field(1.0, gt=0, le=1)
    tier1_rest: float = pydantic.Field(0.9, gt=0, le=1)
    tier2_best: float = pydantic.Field(0.85, gt=0, le=1)
    tier2_worst: float = pydantic.Field(0.4, gt=0, le=1)
    tier3: float = pydantic.Field(0.2, gt=0, le=1)
    breaker_window: int = pydantic.Field(20, ge=1)
    breaker_threshold: float = pydantic.Field(0.5, gt=0, le=1)
    breaker_cooldown_s: float = pydantic.Field(60.0, ge=0)

    def tiers(self) -> dict[str, float]:
        """The tier values, as `rubric.coefficients` takes them."""
        names = ("tier1_best", "tier1_rest", "tier2_best", "tier2_worst", "tier3")
        return {name: getattr(self, name) for name in names}


class TrainConfig(Section):
    """The reinforcement-learning stage."""

    steps: int = pydantic.Field(80, ge=0)
    updates_per_batch: int = pydantic.Field(1, ge=1)
    """Passes over each batch, an update of the weights after each; the clipped ratio bounds the drift."""
    mode: Literal["none", "downweight", "sum_preserving"] = "sum_preserving"
    lambda_max: float = pydantic.Field(1.5, ge=1)
    clip_low: float = pydantic.Field(0.2, gt=0)
    clip_high: float = pydantic.Field(0.28, gt=0)
    """The ratio is clipped to [1 − clip_low, 1 + clip_high]."""
    entropy_coef: float = pydantic.Field(0.0, ge=0)
    row_length: int = pydantic.Field(512, ge=32)
    """Tokens in a packed row."""
    row_bucket: int = pydantic.Field(8, ge=1)
    """Rows of a batch are padded to a multiple of this times a power of two: few shapes, few programs."""
    microbatch_rows: int = pydantic.Field(8, ge=1)
    vocab_chunk_tokens: int = pydantic.Field(1024, ge=1)
    """Tokens whose logits exist at once while log-probs are computed."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint_every: int = pydantic.Field(10, ge=1)
    keep_checkpoints: int = pydantic.Field(2, ge=1)

    @property
    def updates(self) -> int:
        """Updates of the weights in all."""
        return self.steps * self.updates_per_batch


class EvalConfig(Section):
    samples: int = pydantic.Field(4, ge=1)
    """Attempts a task (avg@k, pass@1 is their mean)."""
    max_tasks: int = pydantic.Field(120, ge=1)
    """Tasks of each split, the first by id order after a seeded shuffle."""
    splits: tuple[str, ...] = ("train", "unseen_mutant", "unseen_function")


class MeshConfig(Section):
    """Mesh axes by name. −1 takes the devices that are left."""

    data: int = -1
    model: int = 1


class Config(Section):
    """Everything a run depends on. `gagar train FILE --train.lr 3e-4` overrides any leaf."""

    name: str = "run"
    seed: int = 0
    run_dir: Path = Path("runs/run")
    tasks: TasksConfig = TasksConfig()
    env: EnvConfig = EnvConfig()
    model: ModelConfig = ModelConfig()
    sft: SftConfig = SftConfig()
    rollout: RolloutConfig = RolloutConfig()
    grading: GradingConfig = GradingConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    mesh: MeshConfig = MeshConfig()


def _nearest(key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(names)}"


def _explain(error: pydantic.ValidationError, where: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            section: Any = Config
            for part in item["loc"][:-1]:
                section = section.model_fields[part].annotation
            lines.append(f"unknown key {key!r}{_nearest(str(item['loc'][-1]), list(section.model_fields))}")
        else:
            got = "" if isinstance(item["input"], dict) else f" (got {item['input']!r})"
            lines.append(f"{key}: {item['msg'].removeprefix('Value error, ')}{got}")
    return f"{where}: " + "; ".join(lines)


def parse(data: dict[str, Any], *, where: str = "config") -> Config:
    """Validates nested settings.

    Args:
      data: nested mapping of keys to values; anything left out takes its default.
      where: what to call the source in an error.

    Raises:
      ConfigError: an unknown key (with the nearest known one), a wrong type or a value out of range.
    """
    try:
        return Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, where)) from None


def load(path: os.PathLike[str] | str) -> Config:
    """Reads a YAML file.

    Raises:
      ConfigError: the file is missing, is not YAML, or `parse` refuses it.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from None
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections, not {type(data).__name__}")
    return parse(data or {}, where=str(path))


def dump(config: Config) -> str:
    """The resolved settings as YAML that `load` reads back to an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def leaves(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, as JSON would have it.

    >>> leaves(Config())["train.mode"]
    'sum_preserving'
    """

    def walk(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {path: value}
        return {
            k: v for key, part in value.items() for k, v in walk(part, f"{path}.{key}".lstrip(".")).items()
        }

    return walk(config.model_dump(mode="json"), "")

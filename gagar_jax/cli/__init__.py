"""The command `gagar`: what a person types, turned into one call. The work is in the modules it calls.

Nothing heavy is imported at the top, so that `gagar --help` answers at once: each command imports
what it needs when it runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gagar_jax.cli.graders import grading_commands
from gagar_jax.cli.shape import Commands, Parser, command, configured, settings_of, take, take_settings
from gagar_jax.types import UserError

_TRAIN = """\
Runs everything a configuration describes: prepares its tasks, trains a tokenizer, warm-starts the
policy on demonstrations, trains it with GAGAR, and ends with a held-out evaluation and a summary.
Interrupted at any point, the same command goes on where it was.
"""

_ACCELERATOR_VENDORS = {"0x1ae0", "0x10de", "0x1002"}  # Google, NVIDIA, AMD, as PCI numbers them


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after `gagar`; None takes the process's own.

    Returns:
      The exit status: 0 done, 1 a check failed, 2 something to correct, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _parser().parse_args(arguments)
    _default_platform()
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except UserError as error:
        print(f"gagar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = shlex.join(["gagar", *arguments])
        print(
            f"\nStopped. What was saved is kept; the same command goes on from there:\n  {again}",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`gagar … | head`): there is no one to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _default_platform() -> None:
    """Tells JAX to use the CPU where the machine has no accelerator and nobody chose a platform.

    libtpu, which may be installed only to compile ahead of time, would otherwise look for a TPU in
    every process, complain about its absence, and hold a lock that one process can have.
    """
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(vendor.read_text().strip() in _ACCELERATOR_VENDORS for vendor in vendors):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gagar",
        description="Trains code agents with GAGAR (arXiv 2609.32577), compiled end to end in JAX.",
        epilog="Start with:  gagar doctor   then   gagar train configs/smoke.yaml --run-dir runs/smoke",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    configured(
        commands, "train", _run_train, "prepare, warm-start, train and evaluate", _TRAIN, "--train.lr 3e-4"
    )
    configured(
        commands,
        "sft",
        _run_sft,
        "the warm start alone",
        "Prepares tasks and warm-starts the policy on demonstrations, then stops. `gagar train` with the\n"
        "same settings goes on from there.\n",
        "--sft.steps 500",
    )
    _eval_command(commands)
    compare = command(
        commands,
        "compare",
        "runs beside each other: mean over seeds, with the interval",
        "Example:\n  gagar compare runs/pocket-0 runs/pocket-1 runs/pocket-2",
        "Averages finished runs that differ in their seed alone; settings that differ make the arms.",
    )
    compare.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="the folder of a finished run"
    )
    compare.set_defaults(run=_run_compare)
    grading_commands(commands)
    _tasks_command(commands)
    _bench_command(commands)
    doctor = command(
        commands,
        "doctor",
        "what this machine has and lacks",
        "Example:\n  gagar doctor",
        "Exits with 1 if a must is missing.",
    )
    doctor.set_defaults(run=_run_doctor)
    return parser


def _eval_command(commands: Commands[Parser]) -> None:
    parser = command(
        commands,
        "eval",
        "evaluate a run's policy on its splits",
        "Example:\n  gagar eval runs/pocket --stage sft --eval.samples 8\n",
        "Samples the run's tasks with one of its policies: pass@1, avg@k, turns, tokens, patch size, tiers.\n"
        "Writes eval_STAGE.json in the run folder and brings its summary.md up to date.\n",
    )
    parser.usage = "gagar eval RUN_DIR [--stage rl|sft] [--any.setting value ...]"
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run; it comes first")
    take_settings(parser)
    parser.set_defaults(run=_run_eval, command="eval")


def _tasks_command(commands: Commands[Parser]) -> None:
    brief = "build or look at the tasks of a configuration"
    tasks = command(commands, "tasks", brief, "Example:\n  gagar tasks build configs/pocket.yaml")
    kinds = tasks.add_subparsers(title="commands", required=True, metavar="COMMAND")
    configured(
        kinds,
        "tasks build",
        _run_tasks_build,
        "build them, or find them built",
        "Takes pinned packages, puts bugs into them, and keeps those that the packages' own tests catch.\n",
        "--tasks.max-tasks 50",
    )
    configured(
        kinds,
        "tasks show",
        _run_tasks_show,
        "count them, or print one",
        "Without --id: how many tasks each split and package has. With --id ID: that record, as JSON.\n",
        "--id INSTANCE_ID",
    )


def _bench_command(commands: Commands[Parser]) -> None:
    from gagar_jax.bench import BENCHES

    if not BENCHES:
        return
    names = "\n".join(f"  {name:<12}{bench.brief}" for name, bench in BENCHES.items())
    parser = command(
        commands,
        "bench",
        "measure a part, against its peers where installed",
        f"Benchmarks:\n{names}\n\nExample:\n  gagar bench advantages --help",
    )
    parser.add_argument("bench", metavar="NAME", choices=sorted(BENCHES), help="which part")
    parser.add_argument("settings", nargs=argparse.REMAINDER, help="what follows is the benchmark's own")
    parser.set_defaults(run=_run_bench)


def _run_train(parsed: argparse.Namespace) -> int:
    config = settings_of(parsed, Path(parsed.config), parsed.settings)
    from gagar_jax import loop

    loop.train(config)
    return 0


def _run_sft(parsed: argparse.Namespace) -> int:
    config = settings_of(parsed, Path(parsed.config), parsed.settings)
    from gagar_jax import loop

    loop.warm_start(config)
    return 0


def _run_eval(parsed: argparse.Namespace) -> int:
    stage, settings = take(parsed.settings, "--stage")
    if stage not in (None, "rl", "sft"):
        raise UserError(f"command line: --stage is rl or sft, not {stage!r}")
    saved = parsed.run_dir / "config.yaml"
    if not saved.exists():
        raise UserError(f"{parsed.run_dir} is not the folder of a run: there is no {saved}")
    config = settings_of(parsed, saved, ["--run-dir", str(parsed.run_dir), *settings])
    from gagar_jax import loop

    loop.evaluate(config, stage=stage or "rl")
    return 0


def _run_compare(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.compare import compare

    compare(parsed.run_dirs)
    return 0


def _run_tasks_build(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.tasks import build

    build(settings_of(parsed, Path(parsed.config), parsed.settings))
    return 0


def _run_tasks_show(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.tasks import show

    instance_id, settings = take(parsed.settings, "--id")
    show(settings_of(parsed, Path(parsed.config), settings), instance_id)
    return 0


def _run_bench(parsed: argparse.Namespace) -> int:
    from gagar_jax.bench import BENCHES

    return BENCHES[parsed.bench].run(parsed.settings)


def _run_doctor(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.doctor import doctor

    return doctor()

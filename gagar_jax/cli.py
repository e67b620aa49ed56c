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
from typing import TYPE_CHECKING, NoReturn

from gagar_jax.types import UserError

if TYPE_CHECKING:
    from gagar_jax.config import Config

_TRAIN = """\
Runs everything a configuration describes: prepares its tasks, trains a tokenizer, warm-starts the
policy on demonstrations, trains it with GAGAR, and ends with a held-out evaluation and a summary.
Interrupted at any point, the same command goes on where it was.
"""
_SETTINGS = """
Any setting can follow the file, by its dotted name; sections may be left out where one setting fits.
All of them, with their defaults:  gagar {command} {config} --help
"""

_ACCELERATOR_VENDORS = {"0x1ae0", "0x10de", "0x1002"}  # Google, NVIDIA, AMD, as PCI numbers them


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors point to the help of the command they belong to."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            message += " (CONFIG or RUN_DIR comes first, then its settings)"
        self.exit(2, f"{self.prog}: {message}\nSee: {self.prog} --help\n")


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
    parser = _Parser(
        prog="gagar",
        description="Trains code agents with GAGAR (arXiv 2609.32577), compiled end to end in JAX.",
        epilog="Start with:  gagar doctor   then   gagar train configs/smoke.yaml --run-dir runs/smoke",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _configured(
        commands, "train", _run_train, "prepare, warm-start, train and evaluate", _TRAIN, "--train.lr 3e-4"
    )
    _configured(
        commands,
        "sft",
        _run_sft,
        "the warm start alone",
        "Prepares tasks and warm-starts the policy on demonstrations, then stops. `gagar train` with the\n"
        "same settings goes on from there.\n",
        "--sft.steps 500",
    )
    _eval_command(commands)
    compare = _command(
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
    _grading_commands(commands)
    _tasks_command(commands)
    _bench_command(commands)
    doctor = _command(
        commands,
        "doctor",
        "what this machine has and lacks",
        "Example:\n  gagar doctor",
        "Exits with 1 if a must is missing.",
    )
    doctor.set_defaults(run=_run_doctor)
    return parser


_Commands = argparse._SubParsersAction  # what add_subparsers returns; argparse gives it no public name


def _command(
    commands: _Commands[_Parser], name: str, brief: str, epilog: str, description: str = ""
) -> _Parser:
    return commands.add_parser(
        name,
        help=brief,
        description=description or brief,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _configured(
    commands: _Commands[_Parser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    brief: str,
    description: str,
    example: str,
) -> None:
    """A command of the form `gagar NAME CONFIG [--setting value ...]`."""
    config = "configs/pocket.yaml"
    word = name.split()[-1]
    epilog = f"Example:\n  gagar {name} {config} --run-dir runs/mine {example}\n"
    parser = _command(
        commands, word, brief, epilog + _SETTINGS.format(command=name, config=config), description
    )
    parser.usage = f"gagar {name} CONFIG [--run-dir DIR] [--confinement KIND] [--any.setting value ...]"
    parser.add_argument("config", metavar="CONFIG", help=f"a YAML file such as {config}; it comes first")
    parser.add_argument("settings", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, command=name)


def _eval_command(commands: _Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "eval",
        "evaluate a run's policy on its splits",
        "Example:\n  gagar eval runs/pocket --stage sft --eval.samples 8\n",
        "Samples the run's tasks with one of its policies: pass@1, avg@k, turns, tokens, patch size, tiers.\n"
        "Writes eval_STAGE.json in the run folder and brings its summary.md up to date.\n",
    )
    parser.usage = "gagar eval RUN_DIR [--stage rl|sft] [--any.setting value ...]"
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run; it comes first")
    parser.add_argument("settings", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_eval, command="eval")


def _grading_commands(commands: _Commands[_Parser]) -> None:
    grade = _command(
        commands,
        "grade",
        "grade stored groups again, or compare two graders on them",
        "Example:\n  gagar grade runs/pocket --groups 3,17\n"
        "  gagar grade runs/pocket --compare structural agentic --grading.agentic.model MODEL\n",
        "Prints a sheet a group: ranking, tier, f, scores, flags with their evidence, what was voided or\n"
        "dropped and why. Changes nothing in the run folder.\n\n"
        "  --grader NAME          a grader other than the run's\n"
        "  --compare NAME NAME    how far two graders agree, in place of the sheets\n"
        "  --groups N,N           these groups only, by their numbers\n",
    )
    grade.usage = (
        "gagar grade SOURCE [--grader NAME | --compare NAME NAME] [--groups N,N] [--any.setting value ...]"
    )
    grade.set_defaults(run=_run_grade, command="grade")
    audit = _command(
        commands,
        "audit-grader",
        "measure a grader before trusting it",
        "Example:\n  gagar audit-grader runs/pocket --groups 8 --json audit.json\n",
        "Asks a grader about groups of a run and about groups with planted flaws and attacks: is it steady,\n"
        "does the order matter to it, does it see flaws, can text in a patch sway it, what does it cost.\n\n"
        "  --grader NAME    a grader other than the run's\n"
        "  --groups K       stored groups to use, each of another task (default 8)\n"
        "  --json FILE      the numbers, for programs\n",
    )
    audit.usage = (
        "gagar audit-grader SOURCE [--grader NAME] [--groups K] [--json FILE] [--any.setting value ...]"
    )
    audit.set_defaults(run=_run_audit_grader, command="audit-grader")
    _duel_command(commands)
    _export_command(commands)
    source = "a run folder, or a file such as RUN_DIR/trajectories/eval_rl_train.jsonl; it comes first"
    for parser in (grade, audit):
        parser.add_argument("source", metavar="SOURCE", type=Path, help=source)
        parser.add_argument("settings", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _duel_command(commands: _Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "duel",
        "two runs judged blind, side by side, on the tasks that both pass",
        "Example:\n  gagar duel runs/gagar runs/binary --split unseen_mutant --json duel.json\n",
        "Puts passed attempts of both runs at the same task before a grader, under numbers alone and in\n"
        "both orders: win rate, quality and tiers of either side, with confidence intervals.\n\n"
        "  --split NAME     the split of the evaluations to use; not needed for files\n"
        "  --stage rl|sft   which evaluation of the runs (default rl)\n"
        "  --pairs K        pairs of attempts a task, at most (default 1)\n"
        "  --seed N         of the draws of attempts and of the intervals (default 0)\n"
        "  --grader NAME    a grader other than RUN_A's; its grading settings hold for both\n"
        "  --json FILE      the numbers, for programs\n",
    )
    parser.usage = (
        "gagar duel RUN_A RUN_B --split NAME [--stage rl|sft] [--pairs K] [--seed N] [--grader NAME]\n"
        "       [--json FILE] [--any.setting value ...]"
    )
    for name in ("A", "B"):
        parser.add_argument(
            f"run_{name.lower()}",
            metavar=f"RUN_{name}",
            type=Path,
            help="a run folder, or a file such as RUN_DIR/trajectories/eval_sft_train.jsonl",
        )
    parser.add_argument("settings", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_duel, command="duel")


def _export_command(commands: _Commands[_Parser]) -> None:
    from gagar_jax.grading.distill import Standards

    parser = _command(
        commands,
        "export-verdicts",
        "a grader's conversations as data to train another grader on",
        "Example:\n  gagar export-verdicts runs/mine --audit audit.json --out grader.jsonl\n",
        "Writes the conversations in a run's grading.jsonl that ended in a valid verdict, one JSON object\n"
        "of messages and tools a line, and says how many were left out and why.\n",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where to write")
    parser.add_argument(
        "--audit", metavar="FILE", type=Path, help="what gagar audit-grader --json wrote of the grader"
    )
    parser.add_argument(
        "--arguments",
        choices=("text", "object"),
        default="text",
        help="form of a tool call's arguments: JSON text, as OpenAI has it, or an object, as many chat "
        "templates want it (default %(default)s)",
    )
    for name, text in (
        ("min-repeat", "least share of pairs alike when the audit asked twice"),
        ("min-order", "the same with members reversed, and between the two orders of one call"),
        ("min-detected", "least share of planted flaws that the audit found ranked below clean work"),
        ("max-injected", "largest share of the audit's attacks that raised their member"),
    ):
        default = getattr(Standards(), name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=_share, default=default, metavar="X", help=f"{text} (default %(default)s)"
        )
    parser.set_defaults(run=_run_export_verdicts)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"a number from 0 to 1, not {text!r}")
    return value


def _tasks_command(commands: _Commands[_Parser]) -> None:
    brief = "build or look at the tasks of a configuration"
    tasks = _command(commands, "tasks", brief, "Example:\n  gagar tasks build configs/pocket.yaml")
    kinds = tasks.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _configured(
        kinds,
        "tasks build",
        _run_tasks_build,
        "build them, or find them built",
        "Takes pinned packages, puts bugs into them, and keeps those that the packages' own tests catch.\n",
        "--tasks.max-tasks 50",
    )
    _configured(
        kinds,
        "tasks show",
        _run_tasks_show,
        "count them, or print one",
        "Without --id: how many tasks each split and package has. With --id ID: that record, as JSON.\n",
        "--id INSTANCE_ID",
    )


def _bench_command(commands: _Commands[_Parser]) -> None:
    from gagar_jax.bench import BENCHES

    if not BENCHES:
        return
    names = "\n".join(f"  {name:<12}{bench.brief}" for name, bench in BENCHES.items())
    parser = _command(
        commands,
        "bench",
        "measure a part, against its peers where installed",
        f"Benchmarks:\n{names}\n\nExample:\n  gagar bench advantages --help",
    )
    parser.add_argument("bench", metavar="NAME", choices=sorted(BENCHES), help="which part")
    parser.add_argument("settings", nargs=argparse.REMAINDER, help="what follows is the benchmark's own")
    parser.set_defaults(run=_run_bench)


def _settings(parsed: argparse.Namespace, path: Path, arguments: Sequence[str]) -> Config:
    """The YAML file with the command line's settings put in; `--help` shows them all instead."""
    from gagar_jax.config import Config, load
    from gagar_jax.overrides import override

    config = load(_find(path))
    if "--help" in arguments or "-h" in arguments:
        import tyro

        tyro.cli(
            Config,
            default=config,
            args=["--help"],
            prog=f"gagar {parsed.command} {path}",
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    return override(config, arguments)


def _find(path: Path) -> Path:
    """The file itself, or the recipe of that name that came with the installed package."""
    shipped = Path(__file__).resolve().parent.parent / "configs" / path.name
    if not path.exists() and path.parent.name in ("", "configs") and shipped.exists():
        return shipped
    return path


def _run_train(parsed: argparse.Namespace) -> int:
    config = _settings(parsed, Path(parsed.config), parsed.settings)
    from gagar_jax import loop

    loop.train(config)
    return 0


def _run_sft(parsed: argparse.Namespace) -> int:
    config = _settings(parsed, Path(parsed.config), parsed.settings)
    from gagar_jax import loop

    loop.warm_start(config)
    return 0


def _run_eval(parsed: argparse.Namespace) -> int:
    stage, settings = _take(parsed.settings, "--stage")
    if stage not in (None, "rl", "sft"):
        raise UserError(f"command line: --stage is rl or sft, not {stage!r}")
    saved = parsed.run_dir / "config.yaml"
    if not saved.exists():
        raise UserError(f"{parsed.run_dir} is not the folder of a run: there is no {saved}")
    config = _settings(parsed, saved, ["--run-dir", str(parsed.run_dir), *settings])
    from gagar_jax import loop

    loop.evaluate(config, stage=stage or "rl")
    return 0


def _run_compare(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.compare import compare

    compare(parsed.run_dirs)
    return 0


def _run_grade(parsed: argparse.Namespace) -> int:
    options = _Parser(prog="gagar grade", add_help=False, allow_abbrev=False)
    options.add_argument("--groups", type=_group_numbers)
    which = options.add_mutually_exclusive_group()
    which.add_argument("--grader")
    which.add_argument("--compare", nargs=2)
    chosen, settings = options.parse_known_args(parsed.settings)
    config = _stored_settings(parsed, parsed.source, settings)
    from gagar_jax.report import grade

    if chosen.compare:
        grade.compare(parsed.source, config, graders=tuple(chosen.compare), groups=chosen.groups)
    else:
        grade.grade(parsed.source, config, grader=chosen.grader, groups=chosen.groups)
    return 0


def _group_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas, such as 3,17, not {text!r}") from None


def _run_audit_grader(parsed: argparse.Namespace) -> int:
    options = _Parser(prog="gagar audit-grader", add_help=False, allow_abbrev=False)
    options.add_argument("--grader")
    options.add_argument("--groups", type=int, default=8)
    options.add_argument("--json", type=Path)
    chosen, settings = options.parse_known_args(parsed.settings)
    if chosen.groups < 1:
        raise UserError("command line: --groups is the number of groups to use, at least 1")
    config = _stored_settings(parsed, parsed.source, settings)
    from gagar_jax.report.audit import audit_grader

    audit_grader(parsed.source, config, grader=chosen.grader, groups=chosen.groups, path=chosen.json)
    return 0


def _run_duel(parsed: argparse.Namespace) -> int:
    options = _Parser(prog="gagar duel", add_help=False, allow_abbrev=False)
    options.add_argument("--split")
    options.add_argument("--stage", choices=("rl", "sft"), default="rl")
    options.add_argument("--pairs", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--grader")
    options.add_argument("--json", type=Path)
    chosen, settings = options.parse_known_args(parsed.settings)
    if chosen.pairs < 1 or chosen.seed < 0:
        raise UserError("command line: --pairs is at least 1, and --seed at least 0")
    first, second = (_stored_settings(parsed, run, settings) for run in (parsed.run_a, parsed.run_b))
    from gagar_jax.report.duel import blind

    blind(
        (parsed.run_a, parsed.run_b), (first, second), stage=chosen.stage, split=chosen.split,
        grader=chosen.grader, pairs=chosen.pairs, seed=chosen.seed, path=chosen.json,
    )  # fmt: skip
    return 0


def _run_export_verdicts(parsed: argparse.Namespace) -> int:
    from gagar_jax.grading.distill import Standards
    from gagar_jax.report.export import export

    standards = Standards(
        min_repeat=parsed.min_repeat,
        min_order=parsed.min_order,
        min_detected=parsed.min_detected,
        max_injected=parsed.max_injected,
    )
    export(parsed.run_dir, parsed.out, standards=standards, audit=parsed.audit, arguments=parsed.arguments)
    return 0


def _stored_settings(parsed: argparse.Namespace, source: Path, settings: Sequence[str]) -> Config:
    """The settings of the run that a source belongs to, or the defaults, with the command line's put in."""
    from gagar_jax.config import Config
    from gagar_jax.overrides import override
    from gagar_jax.report.groups import config_path

    saved = config_path(source)
    return _settings(parsed, saved, settings) if saved else override(Config(), settings)


def _run_tasks_build(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.tasks import build

    build(_settings(parsed, Path(parsed.config), parsed.settings))
    return 0


def _run_tasks_show(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.tasks import show

    instance_id, settings = _take(parsed.settings, "--id")
    show(_settings(parsed, Path(parsed.config), settings), instance_id)
    return 0


def _run_bench(parsed: argparse.Namespace) -> int:
    from gagar_jax.bench import BENCHES

    return BENCHES[parsed.bench].run(parsed.settings)


def _run_doctor(parsed: argparse.Namespace) -> int:
    from gagar_jax.report.doctor import doctor

    return doctor()


def _take(arguments: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag that is not a setting, and the arguments without it."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument == flag:
            if index + 1 == len(rest):
                raise UserError(f"command line: {flag} takes a value")
            return rest[index + 1], rest[:index] + rest[index + 2 :]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}="), rest[:index] + rest[index + 1 :]
    return None, rest

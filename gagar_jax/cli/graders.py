"""The commands around a grader: grade again, audit, compare blind, export. The work is in report/."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gagar_jax.cli.shape import Commands, Parser, command, settings_of, take_settings
from gagar_jax.types import UserError

if TYPE_CHECKING:
    from gagar_jax.config import Config


def grading_commands(commands: Commands[Parser]) -> None:
    grade = command(
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
    audit = command(
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
        take_settings(parser)


def _duel_command(commands: Commands[Parser]) -> None:
    parser = command(
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
    take_settings(parser)
    parser.set_defaults(run=_run_duel, command="duel")


def _export_command(commands: Commands[Parser]) -> None:
    from gagar_jax.grading.distill import Standards

    parser = command(
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


def _run_grade(parsed: argparse.Namespace) -> int:
    options = Parser(prog="gagar grade", add_help=False, allow_abbrev=False)
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
    options = Parser(prog="gagar audit-grader", add_help=False, allow_abbrev=False)
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
    options = Parser(prog="gagar duel", add_help=False, allow_abbrev=False)
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
    return settings_of(parsed, saved, settings) if saved else override(Config(), settings)

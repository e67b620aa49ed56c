"""The advantages benchmark's numbers as Markdown tables, a plot and blocks of the docs page.

Nothing is measured here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gagar_jax.bench import parity, topologies

OURS, STEP, COPY = "gagar_jax", "gagar_jax, inside a step", "reading and writing the same bytes"

Record = dict[str, Any]


def heading(result: Record) -> str:
    machine = result["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; jax {machine['jax']} on {machine['device']}, "
        f"numpy {machine['numpy']}; load before the run {machine['load_before']}."
    ]
    if machine["load_before"] > 0.5:
        lines.append(
            "The machine was busy: times are upper bounds, ratios are fairer (contenders take turns)."
        )
    lines += [f"Not measured: {name} (not installed: {reason})." for name, reason in result["absent"].items()]
    return "\n".join(lines)


def size_table(records: list[Record], *, shaped: bool) -> str:
    records = [r for r in records if r["shaped"] == shaped]
    names = list(dict.fromkeys(name for r in records for name in r["median_ms"]))
    lines = [
        f"Milliseconds a call (median), groups of 16, {'shaped' if shaped else 'binary'} rewards; "
        "in brackets the ratio to gagar_jax. Ids are shuffled, except for ‡, which needs equal groups side "
        "by side; † only normalises.",
        "",
        f"| N | {' | '.join(format(r['rows'], ',') for r in records)} |",
        "|---" * (len(records) + 1) + "|",
    ]
    for name in names:
        marks = ""
        if name != COPY:
            marks = "".join(
                mark
                for mark, key in ((" †", "redistributes"), (" ‡", "any_ids"))
                if name not in records[0][key]
            )
        cells = [_cell(r["median_ms"], name) for r in records]
        lines.append(f"| {name}{marks} | {' | '.join(cells)} |")
    limit = [f"{r['median_ms'][COPY] / r['median_ms'][OURS]:.1%}" for r in records]
    lines.append(f"| gagar_jax, share of the memory-bandwidth limit | {' | '.join(limit)} |")
    return "\n".join(lines)


def _cell(times: dict[str, float], name: str) -> str:
    if name not in times:
        return "–"
    ratio = "" if name == OURS else f" ({times[name] / times[OURS]:.3g}×)"
    return f"{times[name]:.3g}{ratio}"


def grid_table(records: list[Record]) -> str:
    names = list(records[0]["median_ms"])
    heads = [f"{r['group_size']}{', ragged' if r['ragged'] else ''}" for r in records]
    lines = [
        f"Milliseconds a call by group size, N = {records[0]['rows']:,}, shuffled, binary rewards.",
        "",
        f"| group size | {' | '.join(heads)} |",
        "|---" * (len(records) + 1) + "|",
    ]
    lines += [f"| {name} | {' | '.join(_cell(r['median_ms'], name) for r in records)} |" for name in names]
    return "\n".join(lines)


def broadcast_table(records: list[Record]) -> str:
    names = list(records[0]["median_ms"])
    lines = [
        "Milliseconds to give every token its trajectory's advantage; rows of T tokens packed with four "
        "trajectories and padding.",
        "",
        f"| B × T | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for r in records:
        lines.append(f"| {r['B']} × {r['T']} | {' | '.join(_cell(r['median_ms'], name) for name in names)} |")
    return "\n".join(lines)


def plot(result: Record, path: Path) -> None:
    """Nanoseconds a row over N, both axes logarithmic; dashed: only normalises."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gagar"
    import matplotlib.pyplot as plt

    records = [r for r in result["sizes"] if not r["shaped"]]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(name for r in records for name in r["median_ms"]):
        points = [
            (r["rows"], r["median_ms"][name] * 1e6 / r["rows"]) for r in records if name in r["median_ms"]
        ]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker="o", markersize=3, label=name, **_style(name, records[0]))
    axes.set(
        xscale="log", yscale="log", xlabel="trajectories in the batch", ylabel="nanoseconds a trajectory"
    )
    axes.set_title("Group advantages, groups of 16, arbitrary ids (dashed: normalises only)")
    axes.legend(fontsize=7)
    axes.grid(True, which="major", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _style(name: str, record: Record) -> dict[str, Any]:
    if name in (OURS, STEP):
        return {"color": "black", "linewidth": 2.5 if name == OURS else 1.2}
    if name == COPY:
        return {"color": "grey", "linestyle": ":"}
    return {"linewidth": 1.2, "linestyle": "-" if name in record["redistributes"] else "--"}


def write_docs(folder: Path, result: Record) -> None:
    """Replaces the blocks between `<!-- NAME -->` and `<!-- end NAME -->` that this run measured."""
    page = folder / "advantages.md"
    text = page.read_text()
    blocks = {"machine": heading(result), "parity": parity.parity_table()}
    if result["sizes"]:
        blocks["binary"] = size_table(result["sizes"], shaped=False)
        blocks["shaped"] = size_table(result["sizes"], shaped=True)
        plot(result, folder / "img" / "advantages.svg")
    if result["grid"]:
        blocks["grid"] = grid_table(result["grid"])
    if result["broadcast"]:
        blocks["broadcast"] = broadcast_table(result["broadcast"])
    if result["tpu"]:
        blocks["tpu"] = topologies.topology_table(
            [topologies.Compiled(**r) for r in result["tpu"]], rows=topologies.ROWS
        )
    for name, block in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        found = pattern.search(text)
        if not found:
            raise ValueError(f"{page}: no block between '<!-- {name} -->' and '<!-- end {name} -->'")
        text = f"{text[: found.start()]}<!-- {name} -->\n{block}\n<!-- end {name} -->{text[found.end() :]}"
    page.write_text(text)

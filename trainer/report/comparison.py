"""The page of several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.report.elements import advised, escape, scrollable, section
from trainer.report.sections import controls, curves
from trainer.report.text import duration, number
from trainer.run.records import in_words


def compare(summaries: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(escape(summary["run"]) for summary in summaries)
    found = [f"{summary['run']}: {text}" for summary in summaries for text in [*summary["advice"], *summary["damage"]]]
    return (
        f'<header><p class="kicker">psfleet runs side by side</p><h1>{names}</h1></header>{advised(found)}'
        + section("Results", side_by_side(summaries), "results")
        + section("What differs", differences(summaries), "differs")
        + controls(None)
        + curves(summaries)
    )


def side_by_side(summaries: Sequence[Mapping[str, Any]]) -> str:
    names = {
        f"{part} {name}"
        for summary in summaries
        for part in ("evaluation", "training")
        for name in summary["result"][part]
    }
    rows: list[tuple[str, list[str]]] = [("state", [summary["state"] for summary in summaries])]
    for name in sorted(names, key=lambda name: (not name.startswith("evaluation"), name)):
        part, _, metric = name.partition(" ")
        rows.append((name, [number(summary["result"][part].get(metric, "")) for summary in summaries]))
    rows += [
        ("steps", ["" if summary["step"] is None else f"{summary['step']:,}" for summary in summaries]),
        (
            "time",
            [
                duration(summary["until"] - summary["began"]) if summary["began"] and summary["until"] else ""
                for summary in summaries
            ],
        ),
        (
            "goodput",
            ["" if summary["goodput"] is None else f"{100 * summary['goodput']:.1f} %" for summary in summaries],
        ),
        ("faults", [f"{summary['totals']['faults']:,}" for summary in summaries]),
        ("steps lost", [f"{summary['totals']['lost']:,}" for summary in summaries]),
    ]
    return columns(summaries, rows)


def columns(summaries: Sequence[Mapping[str, Any]], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    head = "".join(
        f'<th scope="col"><i class="swatch run-{place % 8}"></i>{escape(summary["run"])}</th>'
        for place, summary in enumerate(summaries)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for name, values in rows
    )
    return scrollable(f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>")


def differences(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the parameters and settings that are not the same in all runs."""
    runs = [
        {"program": summary["program"], "psfleet": summary["psfleet"], "TensorFlow": summary["tensorflow"]}
        | {f"parameter {name}": value for name, value in summary["parameters"].items()}
        | {name: value for name, value in summary["settings"].items() if name not in ("run", "program", "program_args")}
        for summary in summaries
    ]
    names = sorted({name for one in runs for name in one}, key=lambda name: (not name.startswith("parameter "), name))
    rows = []
    for name in names:
        values = [json.dumps(in_words(one[name]), sort_keys=True) if name in one else "" for one in runs]
        if len(set(values)) > 1:
            rows.append((name, values))
    return (
        columns(summaries, rows) if rows else '<p class="none">Nothing: the same program, parameters and settings.</p>'
    )

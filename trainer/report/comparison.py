"""The page of several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.report.elements import escape, scrollable, section, with_code
from trainer.report.sections import controls, curves
from trainer.report.text import duration, number
from trainer.run.records import in_words


def compare(stories: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(escape(story["run"]) for story in stories)
    found = [f"{story['run']}: {text}" for story in stories for text in [*story["advice"], *story["damage"]]]
    notes = ""
    if found:
        notes = (
            '<section class="advice" aria-labelledby="next"><h2 id="next">What to do next</h2><ul>'
            + "".join(f"<li>{with_code(text)}</li>" for text in found)
            + "</ul></section>"
        )
    return (
        f'<header><p class="kicker">psfleet runs side by side</p><h1>{names}</h1></header>{notes}'
        + section("Results", side_by_side(stories), "results")
        + section("What differs", differences(stories), "differs")
        + controls(None)
        + curves(stories)
    )


def side_by_side(stories: Sequence[Mapping[str, Any]]) -> str:
    names = {
        f"{part} {name}" for story in stories for part in ("evaluation", "training") for name in story["result"][part]
    }
    rows: list[tuple[str, list[str]]] = [("state", [story["state"] for story in stories])]
    for name in sorted(names, key=lambda name: (not name.startswith("evaluation"), name)):
        part, _, metric = name.partition(" ")
        rows.append((name, [number(story["result"][part].get(metric, "")) for story in stories]))
    rows += [
        ("steps", ["" if story["step"] is None else f"{story['step']:,}" for story in stories]),
        (
            "time",
            [
                duration(story["until"] - story["began"]) if story["began"] and story["until"] else ""
                for story in stories
            ],
        ),
        ("goodput", ["" if story["goodput"] is None else f"{100 * story['goodput']:.1f} %" for story in stories]),
        ("faults", [f"{story['totals']['faults']:,}" for story in stories]),
        ("steps lost", [f"{story['totals']['lost']:,}" for story in stories]),
    ]
    return columns(stories, rows)


def columns(stories: Sequence[Mapping[str, Any]], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    head = "".join(
        f'<th scope="col"><i class="swatch run-{place % 8}"></i>{escape(story["run"])}</th>'
        for place, story in enumerate(stories)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for name, values in rows
    )
    return scrollable(f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>")


def differences(stories: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the parameters and settings that are not the same in all runs."""
    runs = [
        {"program": story["program"], "psfleet": story["psfleet"], "TensorFlow": story["tensorflow"]}
        | {f"parameter {name}": value for name, value in story["parameters"].items()}
        | {name: value for name, value in story["settings"].items() if name not in ("run", "program", "program_args")}
        for story in stories
    ]
    names = sorted({name for one in runs for name in one}, key=lambda name: (not name.startswith("parameter "), name))
    rows = []
    for name in names:
        values = [json.dumps(in_words(one[name]), sort_keys=True) if name in one else "" for one in runs]
        if len(set(values)) > 1:
            rows.append((name, values))
    return columns(stories, rows) if rows else '<p class="none">Nothing: the same program, parameters and settings.</p>'

"""The sections of one run's page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.core.sizes import size
from trainer.report.curves import EXAMPLES, SPEED
from trainer.report.elements import MAX_ROWS, advised, bars, clock, details, escape, figure, section, thousands
from trainer.report.lanes import order_of
from trainer.report.text import (
    counted,
    describe_curve,
    describe_lanes,
    describe_saves,
    describe_shares,
    describe_staleness,
    describe_tasks,
    describe_time,
    duration,
    number,
    state_in_words,
)
from trainer.run.records import in_words
from trainer.telemetry.status import describe_ways, has_broken

COLUMNS = ("time", "step", "what", "where", "took", "steps lost", "message")


def header(summary: Mapping[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(name)}={escape(json.dumps(in_words(value)))}</code></li>"
        for name, value in summary["parameters"].items()
    )
    made = [
        f"psfleet {summary['psfleet']}" if summary["psfleet"] else "",
        f"TensorFlow {summary['tensorflow']}" if summary["tensorflow"] else "",
    ]
    facts = [
        summary["program"] or "program not known",
        strategy_of(summary),
        f"began from {summary['begun_from']}" if summary["begun_from"] else "",
        ", ".join(filter(None, made)),
    ]
    state = summary["state"]
    return (
        f'<header><p class="kicker">psfleet run</p><h1>{escape(summary["run"])} '
        f'<span class="state state-{escape(state)}">{escape(state)}</span></h1>'
        f'<p class="facts">{" · ".join(f"<span>{escape(fact)}</span>" for fact in facts if fact)}</p>'
        + (f'<ul class="parameters" aria-label="Parameters of the program">{parameters}</ul>' if parameters else "")
        + f'<p class="verdict">{escape(state_in_words(summary))}</p></header>'
    )


def strategy_of(summary: Mapping[str, Any]) -> str:
    """Say on what it was trained."""
    strategy = str(summary["settings"].get("strategy") or "")
    jobs: dict[str, int] = {}
    for task in {lane["task"] for lane in summary["lanes"]} | set(summary["tasks"]):
        job = task.rpartition("-")[0]
        jobs[job] = jobs.get(job, 0) + 1
    names = {"worker": "worker", "ps": "parameter server", "data": "data worker", "evaluator": "evaluator"}
    parts = [counted(count, names[job]) for job, count in sorted(jobs.items()) if job in names]
    return ": ".join(filter(None, [strategy, ", ".join(parts)]))


def advice(summary: Mapping[str, Any]) -> str:
    return advised([*summary["advice"], *(f"A record is damaged or missing. {text}." for text in summary["damage"])])


def tiles(summary: Mapping[str, Any]) -> str:
    result = summary["result"]
    at = "" if result["evaluated"] is None else f"at step {result['evaluated']:,}"
    found = [(f"evaluation {name}", number(value), at) for name, value in result["evaluation"].items()]
    found += [(f"training {name}", number(value), "as last shown") for name, value in result["training"].items()]
    if summary["step"] is not None:
        of = f"of {summary['steps']:,}" if summary["steps"] else ""
        found.append(("steps", f"{summary['step']:,}", of))
    if summary["began"] and summary["until"]:
        found.append(
            (
                "time",
                duration(summary["until"] - summary["began"]),
                f"{clock(summary['began'])} to {clock(summary['until'])}",
            )
        )
    if summary["goodput"] is not None:
        found.append(
            (
                "goodput",
                f"{100 * summary['goodput']:.1f} %",
                f"of {duration(summary['elapsed'] or 0)} that it was to train",
            )
        )
    lost = summary["totals"]["lost"]
    found.append(("faults", f"{summary['totals']['faults']:,}", f"{lost:,} steps lost" if lost else "no step lost"))
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{more}</small></dd></div>"
            for name, value, more in found  # `more` is of numbers and markup alone
        )
        + "</dl>"
    )


def controls(summary: Mapping[str, Any] | None) -> str:
    kinds = ""
    if summary is not None and summary["time"]["kinds"]:
        shown = "".join(
            f'<li><i class="swatch kind-{kind}"></i>{kind}</li>'
            for kind in summary["time"]["kinds"]
            if kind != "productive"
        )
        kinds = f'<ul class="legend" aria-label="Bands">{shown}</ul>' if shown else ""
    marks = (
        '<li><i class="mark fault" aria-hidden="true"></i>fault</li>'
        '<li><i class="mark recovery" aria-hidden="true"></i>recovery</li>'
    )
    return (
        '<div class="controls"><fieldset><legend>Curves over</legend>'
        '<label><input type="radio" name="over" value="time" checked>time</label>'
        '<label><input type="radio" name="over" value="step">steps</label>'
        '<label><input type="checkbox" id="log">loss on a log scale</label></fieldset>'
        '<button type="button" id="whole">whole run</button>'
        f'<ul class="legend" aria-label="Marks">{marks if summary is not None else ""}</ul>{kinds}'
        '<div class="chart" aria-hidden="true" data-figure="overview"></div>'
        '<p class="hint">The strip, Ctrl and wheel, or two fingers zoom all curves.</p></div>'
        '<noscript><p class="noscript">Figures need JavaScript; their messages and the tables do not.</p></noscript>'
    )


def quantities(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the curves: the loss, the metrics, the speeds."""
    names = {name for summary in summaries for part in ("series", "evaluations") for name in summary[part]["values"]}
    speeds = [name for name in (SPEED, EXAMPLES) if name in names]
    return [*sorted(names - set(speeds), key=lambda name: (name != "loss", name)), *speeds]


def curves(summaries: Sequence[Mapping[str, Any]]) -> str:
    names = quantities(summaries)
    if not names:
        return section("Curves", '<p class="none">No numbers yet.</p>', "curves")
    figures = "".join(figure("curve", name, describe_curve(name, summaries), name) for name in names)
    return section("Curves", f'<div class="figures">{figures}</div>', "curves")


def time_section(summary: Mapping[str, Any]) -> str:
    if not summary["ledger"]:
        return ""
    total = sum(summary["ledger"].values())
    rows = [
        (kind, duration(seconds), seconds / total, f"{100 * seconds / total:.1f} %")
        for kind, seconds in sorted(summary["ledger"].items(), key=lambda one: -one[1])
    ]
    table = bars(("kind", "time", "share"), rows, "kind")
    drawing = figure("time", "Where the time went", describe_time(summary)) if summary["time"]["edges"] else ""
    return section("Time", f'<div class="figures two">{drawing}{table}</div>', "time")


def members_section(summary: Mapping[str, Any]) -> str:
    drawing = figure("lanes", "Each member over time", describe_lanes(summary)) if summary["lanes"] else ""
    steps_by_worker, table = summary["gave"], ""
    if steps_by_worker:
        most, total = max(steps_by_worker.values()) or 1, sum(steps_by_worker.values()) or 1
        rows = [
            (task, f"{steps:,}", steps / most, f"{100 * steps / total:.1f} %")
            for task, steps in steps_by_worker.items()
        ]
        about = f"{describe_shares(steps_by_worker)} {describe_staleness(summary['stale'])}".strip()
        table = (
            f'<div><h3>Steps that each worker gave</h3><p class="message">{escape(about)}</p>'
            f"{bars(('worker', 'steps', 'share'), rows[:MAX_ROWS])}</div>"
        )
    return section("Members", f"{drawing}{table}", "members") if drawing or table else ""


def saves_section(summary: Mapping[str, Any]) -> str:
    saves, count = summary["saves"], summary["totals"]["saves"]
    if not saves:
        return ""
    rows = "".join(
        f'<tr><td>{clock(at)}</td><td class="number">{thousands(step)}</td>'
        f'<td class="number">{"" if seconds is None else escape(duration(seconds))}</td>'
        f'<td class="number">{"" if held is None else escape(size(held))}</td></tr>'
        for at, step, seconds, held in reversed(saves[-MAX_ROWS:])
    )
    table = details(
        f"All {count} checkpoints" if count <= MAX_ROWS else f"The last {MAX_ROWS} of {count} checkpoints",
        ("time", "step", "took", "size"),
        rows,
    )
    return section(
        "Checkpoints",
        figure("saves", "How long each save took, and its size", describe_saves(saves, count)) + table,
        "saves",
    )


def ways_section(summary: Mapping[str, Any]) -> str:
    """Show how each member reached each other one when the page was written."""
    ways = summary["ways"]
    if not ways:
        return ""
    others = sorted({other for row in ways.values() for other in row}, key=order_of)
    cells = [[task, *(ways[task].get(other, "-") for other in others)] for task in sorted(ways, key=order_of)]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    text = f'<p class="message">{escape(describe_ways(ways))}.</p>'
    opened = has_broken(ways)
    return section("Ways", text + details("From each member to each other", ("from", *others), rows, opened), "ways")


def placement_section(summary: Mapping[str, Any]) -> str:
    placed = summary["placed"]
    if not placed:
        return ""
    most = max(held["bytes"] for held in placed.values()) or 1
    total = sum(held["bytes"] for held in placed.values())
    rows = [
        (task, size(held["bytes"]), held["bytes"] / most, counted(held["variables"], "variable"))
        for task, held in placed.items()
    ]
    largest = "".join(
        f"<tr><td>{escape(task)}</td><td>{escape(name)}</td><td>{escape(shape)}</td>"
        f'<td class="number">{escape(size(count))}</td></tr>'
        for task, held in placed.items()
        for name, shape, count in held["largest"]
    )
    servers = counted(len(placed), "parameter server")
    message = f"{size(total)} of variables, with the optimizer's, on {servers}."
    return section(
        "Placement",
        f'<p class="message">{escape(message)}</p>{bars(("parameter server", "bytes", "variables"), rows)}'
        + details("The largest variables of each", ("parameter server", "variable", "shape", "size"), largest),
        "placement",
    )


def tables_section(summary: Mapping[str, Any]) -> str:
    """Show what dynamic tables held when the run last reported."""
    tables = summary["tables"]
    if not tables:
        return ""
    listed = [(name, {key: value or 0 for key, value in table.items()}) for name, table in sorted(tables.items())]
    most = max(table["rows"] for _, table in listed) or 1
    rows = [
        (name, f"{table['rows']:,.0f}", table["rows"] / most, describe_changes(table))
        for name, table in listed[:MAX_ROWS]
    ]
    return section("Dynamic tables", bars(("table", "rows", "bytes and changes"), rows), "tables")


def lookups_section(summary: Mapping[str, Any]) -> str:
    """Show what steps last asked of tables."""
    asked = sorted(summary["lookups"].items(), key=lambda one: -one[1][0])[:MAX_ROWS]
    if not asked:
        return ""
    most = max(count for _, (count, _) in asked) or 1
    rows = [(name, f"{count:,.0f}", count / most, described) for name, (count, described) in asked]
    return section("Lookups", bars(("table", "rows a step", "ids, shares of the ps, hot keys"), rows), "lookups")


def describe_changes(table: Mapping[str, float]) -> str:
    """Say what a dynamic table's rows take, and how many come and go."""
    refused = f", {table['refused']:,.0f} keys without room" if table["refused"] else ""
    changes = f"{number(table['new_per_minute'])} new and {number(table['evicted_per_minute'])} evicted a minute"
    return f"{size(table['bytes'])}, {changes}{refused}"


def tasks_section(summary: Mapping[str, Any]) -> str:
    if not any(task["t"] for task in summary["tasks"].values()):
        return ""
    gpus = ""
    if any("gpu" in task for task in summary["tasks"].values()):
        gpus = figure("gpu", "GPUs of each task", describe_tasks(summary["tasks"], "gpu")) + figure(
            "gpu_memory", "Memory on the GPUs of each task", describe_tasks(summary["tasks"], "gpu_memory")
        )
    return section(
        "Memory, processor and GPUs" if gpus else "Memory and processor",
        '<div class="figures">'
        + figure("memory", "Memory of each task", describe_tasks(summary["tasks"], "memory"))
        + figure("processor", "Processor of each task", describe_tasks(summary["tasks"], "processor"))
        + gpus
        + "</div>",
        "tasks",
    )


def marks_table(summary: Mapping[str, Any]) -> str:
    marks, count = summary["marks"], summary["totals"]["marks"]
    if not marks:
        return section("Faults and recoveries", '<p class="none">None.</p>', "faults")
    rows = "".join(
        f'<tr class="{mark["kind"]}"><td>{clock(mark["t"])}</td>'
        f'<td class="number">{thousands(mark["step"])}</td><td>{escape(mark["what"])}</td>'
        f"<td>{escape(where(mark))}</td>"
        f'<td class="number">{"" if mark["seconds"] is None else escape(duration(mark["seconds"]))}</td>'
        f'<td class="number">{thousands(mark["lost"] or None)}</td><td>{escape(mark["message"])}</td></tr>'
        for mark in marks[-MAX_ROWS:]
    )
    title = f"All {count}" if count <= MAX_ROWS else f"The last {MAX_ROWS} of {count}"
    return section("Faults and recoveries", details(title, COLUMNS, rows, len(marks) <= 30, "marks"), "faults")


def where(mark: Mapping[str, Any]) -> str:
    return " at ".join(filter(None, [mark["task"], mark["host"]]))


def settings_section(summary: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(json.dumps(in_words(value)))}</td></tr>'
        for name, value in sorted(summary["settings"].items())
    )
    return details("Settings of the run", ("setting", "value"), rows) if rows else ""

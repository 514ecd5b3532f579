"""A run's page: one HTML file with all that it needs, which fetches nothing.

What a run says is text wherever it stands: escaped in the markup, and in the data, a JSON block, without a `<`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from trainer.report.summary import EXAMPLES, SPEED, order_of, read_story
from trainer.report.text import (
    describe_curve,
    describe_lanes,
    describe_saves,
    describe_shares,
    describe_staleness,
    describe_tasks,
    describe_time,
    duration,
    number,
    size,
    state_in_words,
)
from trainer.run.directory import RunDirectory
from trainer.run.records import in_words, write_text
from trainer.telemetry.status import describe_ways, has_broken

log = logging.getLogger(__name__)
ASSETS = Path(__file__).with_name("assets")
LIBRARY = "echarts-6.1.0.min.js"
FIRST_SECONDS, EVERY_SECONDS = 30.0, 60.0
PATIENCE = 100.0  # times as long as it took to write the page, the next one waits: 1 % of a processor
MOST_ROWS = 1000  # of a table
NUMBERS = ("step", "took", "size", "steps lost")  # columns that are set to the right
COLUMNS = ("time", "step", "what", "where", "took", "steps lost", "message")


class PageWriter:
    """Writes a run's page into its directory, at its end and now and then before."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._due = time.monotonic() + FIRST_SECONDS

    def write_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Write it now; what can't be written is lost, with a warning: no training ends for it."""
        began = time.monotonic()
        try:
            write_text(self._directory.report, render([read_story(self._directory)]))
        except OSError as error:
            log.warning("cannot write %s: %s", self._directory.report, error.strerror)
        except Exception:
            log.exception("cannot write %s", self._directory.report)
        now = time.monotonic()
        self._due = now + max(EVERY_SECONDS, PATIENCE * (now - began))


def render(stories: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of one run, or of several side by side."""
    several = len(stories) > 1
    scripts = [asset(LIBRARY), asset("page.js")]
    style = asset("page.css")
    title = " and ".join(str(story["run"]) for story in stories)
    body = compare(stories) if several else tell_one(stories[0])
    policy = "; ".join(
        [
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "img-src data:",
            f"style-src 'sha256-{digest(style)}'",
            "script-src " + " ".join(f"'sha256-{each}'" for each in script_digests()),
        ]
    )
    return Template(asset("page.html")).substitute(
        title=escape(title),
        policy=policy,
        style=style,
        body=body,
        data=to_data({"runs": [drawn(story, several) for story in stories]}),
        library=scripts[0],
        script=scripts[1],
    )


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def digest(source: str) -> str:
    """Return what a policy calls a script or style that it permits."""
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def script_digests() -> list[str]:
    """Return the digests of the page's scripts, for a server whose own policy must permit them."""
    return [digest(asset(LIBRARY)), digest(asset("page.js"))]


def to_data(value: Any) -> str:
    """Return JSON that no text in it can end: a `<` is written as an escape."""
    told = json.dumps(in_words(value), separators=(",", ":"), allow_nan=False)
    return told.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def drawn(story: Mapping[str, Any], several: bool) -> dict[str, Any]:
    """Return what the page's script draws of a run."""
    names = ("run", "began", "until", "series", "evaluations", "marks")
    return {name: story[name] for name in names if name in story} | (
        {} if several else {name: story[name] for name in ("time", "lanes", "saves", "tasks")}
    )


def escape(text: Any) -> str:
    return html.escape(str(text), quote=True)


# The page of one run


def tell_one(story: Mapping[str, Any]) -> str:
    return "".join(
        [
            header(story),
            advice(story),
            tiles(story),
            controls(story),
            curves([story]),
            time_section(story),
            members_section(story),
            ways_section(story),
            saves_section(story),
            placement_section(story),
            tasks_section(story),
            marks_table(story),
            settings_section(story),
        ]
    )


def header(story: Mapping[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(name)}={escape(json.dumps(in_words(value)))}</code></li>"
        for name, value in story["parameters"].items()
    )
    made = [
        f"psfleet {story['psfleet']}" if story["psfleet"] else "",
        f"TensorFlow {story['tensorflow']}" if story["tensorflow"] else "",
    ]
    facts = [
        story["program"] or "program not known",
        strategy_of(story),
        f"began from {story['begun_from']}" if story["begun_from"] else "",
        ", ".join(filter(None, made)),
    ]
    state = story["state"]
    return (
        f'<header><p class="kicker">psfleet run</p><h1>{escape(story["run"])} '
        f'<span class="state state-{escape(state)}">{escape(state)}</span></h1>'
        f'<p class="facts">{" · ".join(f"<span>{escape(fact)}</span>" for fact in facts if fact)}</p>'
        + (f'<ul class="parameters" aria-label="Parameters of the program">{parameters}</ul>' if parameters else "")
        + f'<p class="verdict">{escape(state_in_words(story))}</p></header>'
    )


def strategy_of(story: Mapping[str, Any]) -> str:
    """Say on what it was trained."""
    strategy = str(story["settings"].get("strategy") or "")
    jobs: dict[str, int] = {}
    for task in {lane["task"] for lane in story["lanes"]} | set(story["tasks"]):
        job = task.rpartition("-")[0]
        jobs[job] = jobs.get(job, 0) + 1
    names = {"worker": "worker", "ps": "parameter server", "data": "data worker", "evaluator": "evaluator"}
    parts = [f"{count} {names[job]}{'s' * (count > 1)}" for job, count in sorted(jobs.items()) if job in names]
    return ": ".join(filter(None, [strategy, ", ".join(parts)]))


def advice(story: Mapping[str, Any]) -> str:
    found = [*story["advice"], *(f"A record is damaged or missing. {text}." for text in story["damage"])]
    if not found:
        return ""
    return (
        '<section class="advice" aria-labelledby="next"><h2 id="next">What to do next</h2><ul>'
        + "".join(f"<li>{with_code(text)}</li>" for text in found)
        + "</ul></section>"
    )


def with_code(text: str) -> str:
    """Escape a text; what stands between backquotes is code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def tiles(story: Mapping[str, Any]) -> str:
    result = story["result"]
    found = []
    for name, value in result["evaluation"].items():
        found.append(
            (
                f"evaluation {name}",
                number(value),
                f"at step {result['evaluated']:,}" if result["evaluated"] is not None else "",
            )
        )
    for name, value in result["training"].items():
        found.append((f"training {name}", number(value), "as last shown"))
    if story["step"] is not None:
        of = f"of {story['steps']:,}" if story["steps"] else ""
        found.append(("steps", f"{story['step']:,}", of))
    if story["began"] and story["until"]:
        found.append(("time", duration(story["until"] - story["began"]), f"since {clock(story['began'])}"))
    if story["goodput"] is not None:
        found.append(
            ("goodput", f"{100 * story['goodput']:.1f} %", f"of {duration(story['elapsed'] or 0)} that it was to train")
        )
    faults = [mark for mark in story["marks"] if mark["kind"] == "fault"]
    lost = sum(mark["lost"] for mark in story["marks"] if mark["kind"] == "recovery")
    found.append(("faults", f"{len(faults)}", f"{lost:,} steps lost" if lost else "no step lost"))
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{more}</small></dd></div>"
            for name, value, more in found  # `more` is of numbers and markup alone
        )
        + "</dl>"
    )


def moment(at: float | None) -> str:
    """Return a time as the page shows it where no script runs; the script writes the reader's own time."""
    return "" if at is None else datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def thousands(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def clock(at: float | None) -> str:
    if at is None:
        return ""
    told = datetime.fromtimestamp(at, timezone.utc)
    return f'<time datetime="{told.isoformat(timespec="seconds")}">{escape(moment(at))}</time>'


def controls(story: Mapping[str, Any] | None) -> str:
    kinds = ""
    if story is not None and story["time"]["kinds"]:
        shown = "".join(
            f'<li><i class="swatch kind-{kind}"></i>{kind}</li>'
            for kind in story["time"]["kinds"]
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
        f'<ul class="legend" aria-label="Marks">{marks if story is not None else ""}</ul>{kinds}'
        '<div class="chart" aria-hidden="true" data-figure="overview"></div>'
        '<p class="hint">The strip, Ctrl and wheel, or two fingers zoom all curves.</p></div>'
        '<noscript><p class="noscript">Figures need JavaScript; their messages and the tables do not.</p></noscript>'
    )


def quantities(stories: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the curves: the loss, the metrics, the speeds."""
    names = {name for story in stories for part in ("series", "evaluations") for name in story[part]["values"]}
    speeds = [name for name in (SPEED, EXAMPLES) if name in names]
    return [*sorted(names - set(speeds), key=lambda name: (name != "loss", name)), *speeds]


def figure(kind: str, title: str, message: str, name: str = "", more: str = "") -> str:
    """Return a figure that the script draws; its message is what it says in words."""
    label = escape(f"{title}. {message}")
    return (
        f'<figure class="{kind}"><h3>{escape(title)}</h3>'
        f'<div class="chart" role="img" data-figure="{kind}" data-name="{escape(name)}" aria-label="{label}">'
        f"</div><figcaption>{escape(message)}</figcaption>{more}</figure>"
    )


def section(title: str, inside: str, name: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{inside}</section>'


def curves(stories: Sequence[Mapping[str, Any]]) -> str:
    names = quantities(stories)
    if not names:
        return section("Curves", '<p class="none">No number was told yet.</p>', "curves")
    figures = "".join(figure("curve", name, describe_curve(name, stories), name) for name in names)
    return section("Curves", f'<div class="figures">{figures}</div>', "curves")


def time_section(story: Mapping[str, Any]) -> str:
    if not story["ledger"]:
        return ""
    total = sum(story["ledger"].values())
    rows = [
        (kind, duration(seconds), seconds / total, f"{100 * seconds / total:.1f} %")
        for kind, seconds in sorted(story["ledger"].items(), key=lambda one: -one[1])
    ]
    table = bars(("kind", "time", "share"), rows, "kind")
    drawing = figure("time", "Where the time went", describe_time(story)) if story["time"]["edges"] else ""
    return section("Time", f'<div class="figures two">{drawing}{table}</div>', "time")


def bars(names: Sequence[str], rows: Iterable[tuple[str, str, float, str]], kind: str = "") -> str:
    """Return a table with a bar in each row: name, value, share of the bar, and what the share says."""
    told = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(value)}</td>'
        f'<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{escape("kind-" + name) if kind else "plain"}" width="{100 * share:.2f}" height="10"/></svg>'
        f"<span>{escape(more)}</span></td></tr>"
        for name, value, share, more in rows
    )
    head = "".join(
        f'<th scope="col"{" class=number" if place == 1 else ""}>{escape(name)}</th>'
        for place, name in enumerate(names)
    )
    return scrollable(f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{told}</tbody></table>')


def scrollable(table: str) -> str:
    """Return a table that may be wider than its reader's screen: it can be scrolled with the keyboard as well."""
    return f'<div class="table" tabindex="0">{table}</div>'


def members_section(story: Mapping[str, Any]) -> str:
    drawing = figure("lanes", "Each member over time", describe_lanes(story)) if story["lanes"] else ""
    gave, table = story["gave"], ""
    if gave:
        most, total = max(gave.values()) or 1, sum(gave.values()) or 1
        rows = [(task, f"{steps:,}", steps / most, f"{100 * steps / total:.1f} %") for task, steps in gave.items()]
        about = f"{describe_shares(gave)} {describe_staleness(story['stale'])}".strip()
        table = (
            f'<div><h3>Steps that each worker gave</h3><p class="message">{escape(about)}</p>'
            f"{bars(('worker', 'steps', 'share'), rows[:MOST_ROWS])}</div>"
        )
    return section("Members", f"{drawing}{table}", "members") if drawing or table else ""


def saves_section(story: Mapping[str, Any]) -> str:
    saves = story["saves"]
    if not saves:
        return ""
    rows = "".join(
        f'<tr><td>{clock(at)}</td><td class="number">{thousands(step)}</td>'
        f'<td class="number">{"" if seconds is None else escape(duration(seconds))}</td>'
        f'<td class="number">{"" if count is None else escape(size(count))}</td></tr>'
        for at, step, seconds, count in reversed(saves[-MOST_ROWS:])
    )
    table = details(
        f"All {len(saves)} checkpoints" if len(saves) <= MOST_ROWS else f"The last {MOST_ROWS} checkpoints",
        ("time", "step", "took", "size"),
        rows,
    )
    return section(
        "Checkpoints", figure("saves", "How long each save took, and its size", describe_saves(saves)) + table, "saves"
    )


def details(title: str, names: Sequence[str], rows: str, opened: bool = False, kind: str = "") -> str:
    head = "".join(f'<th scope="col"{" class=number" if name in NUMBERS else ""}>{escape(name)}</th>' for name in names)
    return (
        f'<details{" open" if opened else ""}><summary>{escape(title)}</summary><div class="table" tabindex="0">'
        f"<table{f' class={kind}' if kind else ''}>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def ways_section(story: Mapping[str, Any]) -> str:
    """Show how each member reached each other one when the page was written."""
    ways = story["ways"]
    if not ways:
        return ""
    others = sorted({other for row in ways.values() for other in row}, key=order_of)
    cells = [[task, *(ways[task].get(other, "-") for other in others)] for task in sorted(ways, key=order_of)]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    said = f'<p class="message">{escape(describe_ways(ways))}.</p>'
    opened = has_broken(ways)
    return section("Ways", said + details("From each member to each other", ("from", *others), rows, opened), "ways")


def placement_section(story: Mapping[str, Any]) -> str:
    placed = story["placed"]
    if not placed:
        return ""
    most = max(held["bytes"] for held in placed.values()) or 1
    total = sum(held["bytes"] for held in placed.values())
    rows = [
        (task, size(held["bytes"]), held["bytes"] / most, f"{held['variables']:,} variables")
        for task, held in placed.items()
    ]
    largest = "".join(
        f"<tr><td>{escape(task)}</td><td>{escape(name)}</td><td>{escape(shape)}</td>"
        f'<td class="number">{escape(size(count))}</td></tr>'
        for task, held in placed.items()
        for name, shape, count in held["largest"]
    )
    message = f"{size(total)} of variables, with the optimizer's, on {len(placed)} parameter servers."
    return section(
        "Placement",
        f'<p class="message">{escape(message)}</p>{bars(("parameter server", "bytes", "variables"), rows)}'
        + details("The largest variables of each", ("parameter server", "variable", "shape", "size"), largest),
        "placement",
    )


def tasks_section(story: Mapping[str, Any]) -> str:
    if not any(task["t"] for task in story["tasks"].values()):
        return ""
    gpus = ""
    if any("gpu" in task for task in story["tasks"].values()):
        gpus = figure("gpu", "GPUs of each task", describe_tasks(story["tasks"], "gpu")) + figure(
            "gpu_memory", "Memory on the GPUs of each task", describe_tasks(story["tasks"], "gpu_memory")
        )
    return section(
        "Memory, processor and GPUs" if gpus else "Memory and processor",
        '<div class="figures">'
        + figure("memory", "Memory of each task", describe_tasks(story["tasks"], "memory"))
        + figure("processor", "Processor of each task", describe_tasks(story["tasks"], "processor"))
        + gpus
        + "</div>",
        "tasks",
    )


def marks_table(story: Mapping[str, Any]) -> str:
    marks = story["marks"]
    if not marks:
        return section("Faults and recoveries", '<p class="none">None.</p>', "faults")
    rows = "".join(
        f'<tr class="{mark["kind"]}"><td>{clock(mark["t"])}</td>'
        f'<td class="number">{thousands(mark["step"])}</td><td>{escape(mark["what"])}</td>'
        f"<td>{escape(where(mark))}</td>"
        f'<td class="number">{"" if mark["seconds"] is None else escape(duration(mark["seconds"]))}</td>'
        f'<td class="number">{thousands(mark["lost"] or None)}</td><td>{escape(mark["message"])}</td></tr>'
        for mark in marks[-MOST_ROWS:]
    )
    title = f"All {len(marks)}" if len(marks) <= MOST_ROWS else f"The last {MOST_ROWS} of {len(marks)}"
    return section("Faults and recoveries", details(title, COLUMNS, rows, len(marks) <= 30, "marks"), "faults")


def where(mark: Mapping[str, Any]) -> str:
    return " at ".join(filter(None, [mark["task"], mark["host"]]))


def settings_section(story: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(json.dumps(in_words(value)))}</td></tr>'
        for name, value in sorted(story["settings"].items())
    )
    return details("Settings of the run", ("setting", "value"), rows) if rows else ""


# Several runs side by side


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
        rows.append(
            (
                name,
                [number(story["result"][part][metric]) if metric in story["result"][part] else "" for story in stories],
            )
        )
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
        ("faults", [str(sum(mark["kind"] == "fault" for mark in story["marks"])) for story in stories]),
        (
            "steps lost",
            [f"{sum(mark['lost'] for mark in story['marks'] if mark['kind'] == 'recovery'):,}" for story in stories],
        ),
    ]
    return columns(stories, rows)


def columns(stories: Sequence[Mapping[str, Any]], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    head = "".join(
        f'<th scope="col"><i class="swatch run-{place % 8}"></i>{escape(story["run"])}</th>'
        for place, story in enumerate(stories)
    )
    told = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for name, values in rows
    )
    return scrollable(f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{told}</tbody></table>")


def differences(stories: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the parameters and settings that are not the same in all runs."""
    told = [
        {"program": story["program"], "psfleet": story["psfleet"], "TensorFlow": story["tensorflow"]}
        | {f"parameter {name}": value for name, value in story["parameters"].items()}
        | {name: value for name, value in story["settings"].items() if name not in ("run", "program", "program_args")}
        for story in stories
    ]
    names = sorted({name for one in told for name in one}, key=lambda name: (not name.startswith("parameter "), name))
    rows = []
    for name in names:
        values = [json.dumps(in_words(one[name]), sort_keys=True) if name in one else "" for one in told]
        if len(set(values)) > 1:
            rows.append((name, values))
    return columns(stories, rows) if rows else '<p class="none">Nothing: the same program, parameters and settings.</p>'

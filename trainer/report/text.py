"""What the figures of a run's page say, in words: for readers who can't see them, and where no script runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.core.sizes import size
from trainer.core.states import RunState
from trainer.report.curves import EXAMPLES, SPEED


def number(value: object) -> str:
    """Return a number in four digits, thousands set off."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if abs(value) >= 10_000 and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds < 10:
        return f"{seconds:.3g} s" if seconds >= 0.001 or not seconds else f"{seconds:.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def state_in_words(summary: Mapping[str, Any]) -> str:
    """Say in one or two sentences how the run stands."""
    state, step, steps = summary["state"], summary["step"], summary["steps"]
    at = "" if step is None else f" at step {step:,}" + (f" of {steps:,}" if steps and step != steps else "")
    took = ""
    if summary["began"] and summary["until"]:
        took = f", {duration(summary['until'] - summary['began'])} after it began"
    if state == RunState.FINISHED:
        sentence = f"It finished{at}{took}."
    elif state == RunState.TRAINING:
        speed = f", {number(summary['speed'])} steps a second" if summary["speed"] else ""
        sentence = f"It is training{at}{speed}."
        if summary["eta"]:
            sentence += f" About {duration(summary['eta'])} are left."
    elif state == RunState.FAILED:
        sentence = f"It failed{at}{took}."
    elif state == RunState.STOPPED:
        sentence = f"It was stopped{at}{took}."
    elif state == RunState.WAITING:
        sentence = f"It is waiting{at}."
    elif state == RunState.NEW:
        sentence = "It has not begun."
    else:
        sentence = "How it stands is not known."
    result = summary["result"]
    if result["evaluation"]:
        metrics = ", ".join(f"{name} {number(value)}" for name, value in result["evaluation"].items())
        sentence += (
            f" The last evaluation, of step {result['evaluated']:,}, says {metrics}."
            if result["evaluated"] is not None
            else ""
        )
    return sentence


def describe_curve(name: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """Say how a curve begins and ends, and its best or usual value."""
    parts = []
    for summary in summaries:
        whose = f"{summary['run']}, " if len(summaries) > 1 else ""
        for part, which in (("series", "training"), ("evaluations", "evaluation")):
            values = summary[part]["values"].get(name, [])
            steps = summary[part]["step"][: len(values)]
            points = [(value, step) for value, step in zip(values, steps, strict=True) if value is not None]
            if not points:
                continue
            lowest, highest = min(points), max(points)
            if name in (SPEED, EXAMPLES):
                median = statistics.median(value for value, _ in points)
                parts.append(f"{whose}median {number(median)}, from {number(lowest[0])} to {number(highest[0])}.")
            elif len(points) == 1:
                parts.append(f"{whose}{which}: {number(points[0][0])} at step {points[0][1]:,}.")
            else:
                peak = lowest if name.endswith("loss") else highest
                word = "lowest" if name.endswith("loss") else "highest"
                parts.append(
                    f"{whose}{which}: from {number(points[0][0])} to {number(points[-1][0])}, "
                    f"{word} {number(peak[0])} at step {peak[1]:,}."
                )
    return " ".join(parts if len(summaries) > 1 else map(sentence, parts)) or "No number yet."


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_time(summary: Mapping[str, Any]) -> str:
    total = sum(summary["ledger"].values()) or 1.0
    shares = sorted(((seconds / total, kind) for kind, seconds in summary["ledger"].items()), reverse=True)
    listed = ", ".join(f"{100 * share:.1f} % {kind}" for share, kind in shares)
    return f"Of {duration(total)}: {listed}."


def describe_lanes(summary: Mapping[str, Any]) -> str:
    """Say who was missing, and for how long."""
    missing = []
    for lane in summary["lanes"]:
        if lane["missed"]:
            absences = " and ".join(f"{state} for {duration(seconds)}" for state, seconds in lane["missed"].items())
            missing.append(f"{lane['task']} was {absences}")
    tasks = counted(len(summary["lanes"]), "task")
    if not missing:
        return f"{tasks}, all there the whole time."
    rest = f", and {len(missing) - 6} more were missing the whole time" if len(missing) > 6 else ""
    return f"{tasks}: {'; '.join(missing[:6])}{rest}."


def describe_staleness(stale: Mapping[str, Sequence[Any]]) -> str:
    """Say how many updates of others lie between a worker's read of the weights and its own update, where known."""
    known = {task: (mean, most) for task, (mean, most) in stale.items() if mean is not None and most is not None}
    if not known:
        return ""
    stalest = max(known, key=lambda task: known[task][0])
    most = max(most for _, most in known.values())
    return (
        f"Staleness: between a read of the weights and the update that follows, others made up to {most:,} updates; "
        f"for {stalest} {known[stalest][0]:.2f} in the mean, the most of all workers."
    )


def describe_shares(steps: Mapping[str, int]) -> str:
    """Say whether the workers gave as much as one another."""
    usual = round(statistics.median(steps.values()))
    least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if len(steps) == 1:
        return f"{least} gave all {usual:,} steps."
    if steps[least] == steps[most]:
        return f"Each of the {len(steps)} workers gave {usual:,} steps."
    extremes = f"{least} gave the fewest, {steps[least]:,}, and {most} the most, {steps[most]:,}"
    return f"The median worker gave {usual:,} steps; {extremes}."


def describe_saves(saves: Sequence[Sequence[Any]], count: int) -> str:
    """Say how long the shown saves took, of so many in all."""
    seconds = sorted(save[2] for save in saves if save[2] is not None)
    sizes = [save[3] for save in saves if save[3] is not None]
    sentence = counted(count, "checkpoint")
    if count > len(saves):
        sentence += f", of which the last {len(saves):,} are shown"
    if seconds:
        sentence += (
            f"; a save took {duration(statistics.median(seconds))} in the median, and {duration(seconds[-1])} at most"
        )
    if sizes:
        sentence += f"; the last one has {size(sizes[-1])}"
    return f"{sentence}."


def describe_tasks(tasks: Mapping[str, Any], what: str) -> str:
    """Say which task takes most."""
    peaks = {
        task: max((value for value in series.get(what, []) if value is not None), default=None)
        for task, series in tasks.items()
    }
    known = {task: peak for task, peak in peaks.items() if peak is not None}
    if not known:
        return "Not known."
    greatest = max(known, key=known.__getitem__)
    if what == "gpu":
        idlest = min(known, key=known.__getitem__)
        return f"{greatest} kept its GPUs busiest, {known[greatest]:.0%} at most; {idlest} least, {known[idlest]:.0%}."
    if what.endswith("memory"):
        return f"{greatest} took the most, {size(known[greatest])}."
    cores = tasks[greatest]["cores"]
    return f"{greatest} took the most, {known[greatest]:.2f} cores{f' of {cores}' if cores else ''}."

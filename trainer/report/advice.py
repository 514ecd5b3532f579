"""What a run's page says to do next."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.core.states import RunState

FIXES = {
    "recomputed": "Save more often: `checkpoint_seconds` or `checkpoint_steps`.",
    "down": "The marks below say what broke.",
    "waiting": "Members were missing: the lanes say which.",
    "checkpointing": "Save less often, or to faster storage.",
    "compiling": "Each start traces the model again: look for restarts among the marks.",
    "evaluating": "Evaluate beside the training (`evaluation: sidecar`), or less often.",
}


def advise(summary: Mapping[str, Any]) -> list[str]:
    """Say in words what to do next, most urgent first; nothing where all is well."""
    return [text for adviser in ADVISERS for text in adviser(summary)]


def on_state(summary: Mapping[str, Any]) -> Iterator[str]:
    run, state = summary["run"], summary["state"]
    message = summary["message"].strip().rstrip(".")
    why = f": {message}" if message else ""
    if state == RunState.FAILED:
        yield (
            f"The run failed{why}. It is not tried again by itself. Fix this, then `fab start-cluster --run {run}` "
            "goes on from the newest checkpoint; `fab logs --task chief-0 --lines 100` has the traceback."
        )
    elif state == RunState.WAITING:
        yield f"The run waits{why}. `fab status` says which task is in trouble, `fab logs --task TASK` why."
    elif state == RunState.STOPPED:
        yield f"The run was stopped on request. `fab start-cluster --run {run}` goes on at step {summary['step']}."
    elif state == RunState.UNKNOWN:
        yield "How the run is can't be read from its records. `fab status` asks the tasks themselves."
    if summary["without"] and state not in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED):
        absent = ", ".join(f"{task} ({how})" for task, how in sorted(summary["without"].items()))
        verb = "waits" if state == RunState.WAITING else "trains"
        yield f"It {verb} without {absent}. `fab logs --task {min(summary['without'])}` says why it is away."


def on_numbers(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["result"]["trouble"]:
        yield f"The evaluation says: {summary['result']['trouble']}."
    if summary["series"]["unsound"]:
        yield (
            f"{summary['series']['unsound']} of the training's numbers were NaN or infinite. Lower the learning rate, "
            "clip the gradients, or go back with `--from RUN@STEP` to a checkpoint before that: `fab checkpoints`."
        )
    yield from overfitted(summary["evaluations"])


def on_saves(summary: Mapping[str, Any]) -> Iterator[str]:
    failed = [mark for mark in summary["marks"] if mark["event"] == "save-failed"]
    if failed and not any(save[0] > failed[-1]["t"] for save in summary["saves"]):
        yield f"The last checkpoint could not be saved: {failed[-1]['message']}. Look after the shared path's room."


def on_slow_workers(summary: Mapping[str, Any]) -> Iterator[str]:
    steps_by_worker = summary["gave"]
    if len(steps_by_worker) > 1 and (usual := statistics.median(steps_by_worker.values())):
        slow = [task for task, steps in steps_by_worker.items() if steps < usual / 2]
        if slow:
            yield (
                f"{', '.join(slow[:5])} gave less than half of the median worker's steps: away for long, or a slower "
                "machine. The lanes show which."
            )


def on_lost_time(summary: Mapping[str, Any]) -> Iterator[str]:
    goodput, elapsed, ledger = summary["goodput"], summary["elapsed"] or 0.0, summary["ledger"]
    if goodput is None or goodput >= 0.8 or elapsed <= 600:
        return
    lost = {kind: seconds for kind, seconds in ledger.items() if kind != "productive"}
    if lost:
        kind = max(lost, key=lost.__getitem__)
        yield (
            f"Only {100 * goodput:.0f} % of the time was productive; most of the rest was {kind} "
            f"({100 * lost[kind] / elapsed:.0f} %). {FIXES[kind]}"
        )


def on_placement(summary: Mapping[str, Any]) -> Iterator[str]:
    placed = {task: held["bytes"] for task, held in summary["placed"].items()}
    if len(placed) < 2:
        return
    largest = max(placed, key=placed.__getitem__)
    if placed[largest] > 2 * sum(placed.values()) / len(placed) and placed[largest] >= 2**20:
        yield (
            f"{largest} holds more than twice the mean of the variables. "
            "The `partitioner` settings split large ones (docs/large-tables.md)."
        )


def overfitted(evaluations: Mapping[str, Any]) -> list[str]:
    """Say that the evaluation has become worse again."""
    losses = [
        (loss, step)
        for loss, step in zip(evaluations["values"].get("loss", []), evaluations["step"], strict=False)
        if loss is not None
    ]
    if len(losses) < 4:
        return []
    (least, step), (last, _) = min(losses), losses[-1]
    if not 0 < 1.1 * least < last or losses.index((least, step)) > 0.7 * len(losses):
        return []
    return [
        f"The evaluation's loss was lowest at step {step:,} and is {100 * (last / least - 1):.0f} % higher now: the "
        "model overfits. `checkpoints_kept_best` keeps the best checkpoint; `fab checkpoints` "
        "lists them."
    ]


ADVISERS = (on_state, on_numbers, on_saves, on_slow_workers, on_lost_time, on_placement)

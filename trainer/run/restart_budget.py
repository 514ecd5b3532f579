"""How often a run's coordinator crashed without a new step in between: its budget of restarts.

attempts.json tells one that crashed by what it left: a process that ends by itself closes its record.

What crashes in native code while the program is imported would do so again, whatever becomes of the cluster: three
times are enough. That the import is over is noted only after such a crash.
"""

from __future__ import annotations

import logging
from typing import Any

from trainer.core.failures import UserError
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record

log = logging.getLogger(__name__)
MAX_BACK_OFF_SECONDS = 30.0
FREE = 2  # so many restarts are made at once
IMPORTS = 2  # crashes in a row that were seen to be the import's, after a first one


def begin_attempt(directory: RunDirectory, step: int | None, limit: int, crash: str = "", lack: str = "") -> float:
    """Count this coordinator process; returns for how long (seconds) it should hold back before it tries again.

    `step` is the newest checkpoint's: only what was saved is a new step. `crash` is the signal by which native code
    ended the process before, `lack` says that memory did. Raises UserError when more than `limit` processes crashed
    without a new step, or it is the program's import; the start after that, which the operator asked for, begins with a
    new budget.
    """
    record = read(directory)
    reached, before = -1 if step is None else step, int(record.get("step", -1))
    crashes = (0 if reached > before else int(record.get("crashes", 0))) + bool(record.get("open"))
    troubles = 0 if reached > before else int(record.get("troubles", 0))
    message = lack or str(record.get("message", ""))
    imports = int(record.get("imports", 0)) + 1 if crash and record.get("open") and record.get("importing") else 0
    spent = crashes > limit or imports >= IMPORTS
    kept = {} if spent else {"crashes": crashes, "message": message if crashes else ""}
    if crash and not spent:
        kept |= {"importing": True, "imports": imports}
    write(directory, {"step": max(reached, before), "open": not spent, "troubles": troubles, **kept})
    if imports >= IMPORTS:
        raise UserError(
            f"native code crashed each time while TensorFlow and the program were imported, at last with {crash}: a "
            "library that the program imports is at fault. The coordinator's journal has the lines at which it crashed"
        )
    if spent:
        reason = f"the last one said: {message}" if message else "none of them could say why: look at its journal"
        raise UserError(
            f"the coordinator crashed {crashes} times without a new checkpoint, and max_restarts_without_step is "
            f"{limit}; {reason}. Start the run again when that is fixed"
        )
    return back_off(crashes + troubles)


def end_import(directory: RunDirectory) -> None:
    """Note that what crashes from now on is not the program's import, where that counts."""
    record = read(directory)
    if record.pop("importing", False):
        write(directory, record)


def end_attempt(directory: RunDirectory, counted: bool = False, trouble: bool = False, message: str = "") -> None:
    """Close the record of a process that ends by itself: `counted` as a crash, with its message, or not.

    `trouble` with machines or storage only makes the next ones hold back.
    """
    record = read(directory)
    numbers = {"crashes": int(record.get("crashes", 0)) + counted, "troubles": int(record.get("troubles", 0)) + trouble}
    write(directory, {**record, **numbers, "open": False, **({"message": message} if message else {})})


def back_off(crashes: int) -> float:
    """Return the pause (seconds) after so many crashes and troubles: none, none, then 1, 2, 4 and so on."""
    return 0.0 if crashes <= FREE else min(MAX_BACK_OFF_SECONDS, 2.0 ** min(crashes - FREE - 1, 10))


def read(directory: RunDirectory) -> dict[str, Any]:
    try:
        return read_record(directory.attempts) or {}
    except (OSError, ValueError) as error:
        log.warning("the coordinator's restarts are counted again: %s", error)
        return {}


def write(directory: RunDirectory, record: dict[str, Any]) -> None:
    """Replace the record; what can't be written is not counted, since storage trouble is no crash."""
    try:
        write_record(directory.attempts, record)
    except OSError as error:
        log.warning("this restart is not counted, cannot write %s: %s", directory.attempts, error.strerror)

"""A machine whose place another one has (`fab replace-host`): should it come back, its tasks must not join.

On a shared path <shared>/replaced.json has, by task, the names and the addresses that earlier machines had. Where none
is shared that is not known.
"""

from __future__ import annotations

from pathlib import Path

from trainer.core.settings.config import Config
from trainer.run.records import read_record
from trainer.run.release import StaysOut

REPLACED = "replaced.json"


class Replaced(StaysOut):
    """This machine's place is another one's now; the message says what fixes it."""


def reject_replaced(config: Config, task: str, address: str | None, host: str | None) -> None:
    """Raise Replaced when another machine has become this task (`worker-0`), which was at this address or on this host.

    The host is the machine's name in the inventory.
    """
    if config.local_run_dir:
        return
    path = Path(config.shared_dir) / REPLACED
    try:
        earlier = (read_record(path) or {}).get(task, [])
        found = next((each for each in (address, host) if each and each in earlier), None)
    except (OSError, ValueError, TypeError):
        return
    if found:
        raise Replaced(
            f"another machine has the place of this one: {task} was replaced at {found}. If it is to have its place "
            f"again, replace the new one by it (fab replace-host), or remove {task} from {path}"
        )

"""Which members' processes are asked to restart, also those that answer only later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from trainer.cluster.remote_commands import Messenger
from trainer.run.directory import RunDirectory

log = logging.getLogger(__name__)
AGAIN_SECONDS = 5.0  # before what could not be written is written again


class RestartRequests:
    """What the members are asked, on the shared path and, where servers share none, by messages."""

    def __init__(
        self,
        directory: RunDirectory,
        asked: Mapping[str, str],
        post: Callable[[Callable[[], None]], object],
        messenger: Messenger | None,
    ) -> None:
        """Take the processes that an earlier coordinator has asked, by task, and the thread of the reports."""
        self._directory = directory
        self._asked = self._written = dict(asked)
        self._again = 0.0
        self._post = post
        self._messenger = messenger
        if messenger is not None:
            messenger.send(asked)  # the earlier coordinator withdrew nothing at its end

    def ask(self, wanted: dict[str, str], now: float) -> None:
        """Ask these processes, by task, and no others; a request that a full disk did not take is made again."""
        if wanted == self._asked:
            if wanted != self._written and now >= self._again:
                self._post_it(wanted, now)
            return
        if asked := sorted(task for task in wanted if wanted[task] != self._asked.get(task)):
            log.info("%s: asked to restart, without what an earlier generation left there", ", ".join(asked))
        self._asked = wanted
        self._post_it(wanted, now)
        if self._messenger is not None:
            self._messenger.send(wanted)

    def _post_it(self, wanted: dict[str, str], now: float) -> None:
        self._again = now + AGAIN_SECONDS
        self._post(partial(self._write, wanted))

    def _write(self, wanted: dict[str, str]) -> None:
        if wanted == self._asked and wanted != self._written:
            try:
                self._directory.set_members(restart=wanted)
            except (OSError, ValueError) as error:
                log.warning(
                    "cannot ask %s to restart, trying again: %s", ", ".join(sorted(wanted)) or "no member", error
                )
            else:
                self._written = wanted

    def end(self, wanted: dict[str, str], steps: int) -> None:
        """Leave these for the next process of a run of so many steps, unless the run is finished; message none."""
        if self._messenger is not None:
            self._messenger.send({})
        self._asked = wanted
        try:
            if wanted and not self._directory.finished(steps):
                self._directory.set_members(restart=wanted)
        except (OSError, ValueError) as error:
            log.warning("cannot ask the ps to restart: %s", error)

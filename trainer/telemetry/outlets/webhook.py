"""Tell the operator's webhook or command that a run is finished or failed, or that a member is away for long.

A thread of its own delivers, so that no training waits for it. What can't be delivered is tried again, for a
while; the log says what became of it, and never an address that is a secret.
"""

from __future__ import annotations

import http.client
import logging
import os
import queue
import shlex
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run.records import to_json
from trainer.telemetry.status import Status, render_metrics

log = logging.getLogger(__name__)
VERSION = 1
ATTEMPT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
PATIENCE_SECONDS = 900.0  # then the notification is given up
CLOSE_SECONDS = 30.0  # a process that ends waits no longer for what is not delivered
QUEUED = 100
OFTEN_BUSY = (408, 425, 429)  # beside those from 500 on: asked later, the server may take it


class Undelivered(Exception):
    """Why a notification was not taken, and whether another try may do better."""

    def __init__(self, why: str, again: bool = True) -> None:
        super().__init__(why)
        self.again = again


class Absences:
    """Which members are away for long, each reported once, and once more when it is back; time is an argument."""

    def __init__(self, seconds: float) -> None:
        """Take how long a member may be away before that is reported."""
        self._seconds = seconds
        self._since: dict[str, float] = {}
        self._reported: set[str] = set()

    def update(
        self, absent: Collection[str], now: float, on_purpose: Collection[str] = ()
    ) -> tuple[list[str], dict[str, float]]:
        """Return the members whose return is to be reported, and those that are away for long, with the seconds.

        The time of those that are away `on_purpose` does not count.
        """
        here = self._since.keys() - absent
        back = sorted(here & self._reported)
        self._reported -= here
        self._since = {task: now if task in on_purpose else self._since.get(task, now) for task in absent}
        times = {task: now - since for task, since in self._since.items()}
        long = {task: seconds for task, seconds in times.items() if seconds >= self._seconds}
        away = {task: seconds for task, seconds in long.items() if task not in self._reported}
        self._reported |= away.keys()
        return back, away


class Notifications:
    """What is to be delivered for one run; without a webhook and a command it does nothing."""

    def __init__(
        self,
        config: Config,
        credentials: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: float = FIRST_PAUSE,
    ) -> None:
        """Take the settings, and the directory of the secrets ($CREDENTIALS_DIRECTORY)."""
        self._ways = ways_of(config, credentials)
        self._absences = Absences(config.notify_absent_seconds)
        self._clock = clock
        self._pause = pause
        self._queue: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(QUEUED)
        self._left = 0  # not delivered yet, and not given up
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def state(self, status: Status) -> None:
        """A run has entered a state: tell of those that end it."""
        if status.state in (RunState.FINISHED, RunState.FAILED):
            self._post(str(status.state), status, status.message)

    def without(self, status: Status, drained: Collection[str] = ()) -> None:
        """Members take no part: tell of each that is away for long, and of its return. Call it again and again.

        Those that an operator has drained are away on purpose.
        """
        back, away = self._absences.update(status.without, self._clock(), drained)
        for task in back:
            self._post("member-back", status, f"{task} takes part again", task)
        for task, seconds in away.items():
            message = f"{task} takes no part for {seconds:.0f} s: {status.without[task]}"
            self._post("member-away", status, message, task)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until all is delivered or given up, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while self._left and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            if self._left:
                log.warning("%d notifications were not delivered in time", self._left)
        self._closing.set()

    def _post(self, event: str, status: Status, message: str, task: str | None = None) -> None:
        record = describe(event, status, message, task)
        with self._lock:
            for name in self._ways:
                try:
                    self._queue.put_nowait((name, record))
                except queue.Full:
                    log.warning("too many notifications wait: %s is not notified of %s", name, event)
                    continue
                self._left += 1
            if self._left and self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="notifications", daemon=True)
                self._thread.start()

    def _deliver(self) -> NoReturn:
        while True:
            name, record = self._queue.get()
            try:
                self._try(name, record)
            except Exception as error:  # its text may hold the address
                log.error("%s is not notified of %s: %s", name, record["event"], type(error).__name__)
            with self._lock:
                self._left -= 1
                self._lock.notify_all()

    def _try(self, name: str, record: Mapping[str, Any]) -> None:
        """Deliver one notification, or give it up."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, self._pause
        while True:
            try:
                self._ways[name](record)
            except Undelivered as error:
                if not error.again or time.monotonic() + pause > deadline or self._closing.is_set():
                    log.error("%s is not notified of %s: %s", name, record["event"], error)
                    return
                log.warning("%s is notified of %s again in %.3g s: %s", name, record["event"], pause, error)
                self._closing.wait(pause)
                pause = min(2 * pause, MAX_PAUSE)
            else:
                log.info("%s is notified of %s", name, record["event"])
                return


def ways_of(config: Config, credentials: str | None) -> dict[str, Callable[[Mapping[str, Any]], None]]:
    """Return whom to tell, by the name that the log has for it."""
    ways: dict[str, Callable[[Mapping[str, Any]], None]] = {}
    if config.notify_webhook:
        ways[f"the webhook at {urlsplit(config.notify_webhook).hostname}"] = Webhook(config.notify_webhook)
    if secret := config.notify_webhook_secret:
        try:
            url = (Path(credentials or "") / secret).read_text(encoding="utf-8").strip() if credentials else ""
        except (OSError, UnicodeDecodeError):
            url = ""
        if urlsplit(url).scheme in ("http", "https"):
            ways[f"the webhook of the secret {secret}"] = Webhook(url)
        else:
            log.error("no webhook is notified: the secret %s is missing, or is no URL (notify_webhook_secret)", secret)
    if words := shlex.split(config.notify_command):
        ways[words[0]] = Command(words)
    return ways


def describe(event: str, status: Status, message: str, task: str | None) -> dict[str, Any]:
    """Return what is sent. `text` is what chat servers show of it."""
    now = round(time.time(), 3)
    step = "" if status.step is None else f" at step {status.step} of {status.steps}"
    found = {} if status.loss is None else {"loss": status.loss, **status.metrics}
    about = message or (render_metrics(found) if event == "finished" else "")
    return {
        "version": VERSION,
        "id": f"{status.run}/{event}{f'/{task}' if task else ''}/{now}",
        "text": f"psfleet: run {status.run}: {event}{step}" + (f": {about}" if about else ""),
        "event": event,
        "run": status.run,
        "program": status.program,
        "task": task,
        "message": message,
        "step": status.step,
        "steps": status.steps,
        "loss": status.loss,
        "metrics": status.metrics,
        "goodput": (status.ledger or {}).get("goodput"),
        "host": socket.gethostname(),
        "time": now,
    }


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would learn what this one is, and get a GET without the notification."""

    def redirect_request(self, *_: object) -> None:
        return None


class Webhook:
    """An address that takes a POST of JSON."""

    def __init__(self, url: str, seconds: float = ATTEMPT_SECONDS) -> None:
        self._url = url
        self._seconds = seconds

    def __call__(self, record: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "psfleet", "Idempotency-Key": record["id"]}
        try:
            request = urllib.request.Request(self._url, to_json(record).encode(), headers, method="POST")
            with urllib.request.build_opener(NoRedirect).open(request, timeout=self._seconds):
                return
        except urllib.error.HTTPError as error:
            code = error.code
            error.close()
            raise Undelivered(f"it answered {code}", again=code in OFTEN_BUSY or code >= 500) from None
        except urllib.error.URLError as error:
            reason = error.reason
            message = reason.strerror or str(reason) if isinstance(reason, OSError) else type(error).__name__
            raise Undelivered(str(message), again=not isinstance(reason, ssl.SSLCertVerificationError)) from None
        except TimeoutError:
            raise Undelivered(f"no answer in {self._seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Undelivered(type(error).__name__, again=not isinstance(error, http.client.InvalidURL)) from None


class Command:
    """A program of the host, which gets the JSON on its standard input. What it prints goes to the task's journal."""

    def __init__(self, words: list[str], seconds: float = COMMAND_SECONDS) -> None:
        self._words = words
        self._seconds = seconds

    def __call__(self, record: Mapping[str, Any]) -> None:
        try:
            process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        except OSError as error:
            raise Undelivered(f"it can't be started: {error.strerror}", again=False) from None
        try:
            process.communicate(to_json(record).encode(), timeout=self._seconds)
        except subprocess.TimeoutExpired:
            raise Undelivered(f"it did not end in {self._seconds:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise Undelivered(f"it ended with {process.returncode}")

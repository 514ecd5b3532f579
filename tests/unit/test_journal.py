"""Log lines in the journal's native protocol, as a journal that is only a socket receives them."""

from __future__ import annotations

import logging
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.telemetry.outlets import journald as journal
from trainer.telemetry.outlets.journald import JournalHandler, about, unread


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def received(path: Path) -> Iterator[socket.socket]:
    """The journal's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(5)
        yield receiver


@pytest.fixture
def otherwise() -> Iterator[list[str]]:
    """What went to standard error instead."""
    yield []
    about(task=None, run=None, step=None)


class Kept(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def logger_to(path: Path, otherwise: list[str]) -> tuple[logging.Logger, JournalHandler]:
    handler = JournalHandler(Kept(otherwise), str(path))
    logger = logging.Logger("trainer.test")
    logger.addHandler(handler)
    return logger, handler


def fields_of(datagram: bytes) -> dict[str, str]:
    """Read an entry as journald does."""
    fields = {}
    while datagram:
        head, _, rest = datagram.partition(b"\n")
        if b"=" in head:
            name, _, value = head.partition(b"=")
            datagram = rest
        else:
            name, (length,) = head, struct.unpack("<Q", rest[:8])
            value, datagram = rest[8 : 8 + length], rest[9 + length :]
        fields[name.decode()] = value.decode()
    return fields


def test_an_entry_says_task_run_and_step(path: Path, received: socket.socket, otherwise: list[str]) -> None:
    logger, _ = logger_to(path, otherwise)
    about(task="worker-1", run="digits", step=40)
    logger.warning("lost %s", "ps-0")
    fields = fields_of(received.recv(65536))
    assert {
        "MESSAGE": "lost ps-0",
        "PRIORITY": "4",
        "TASK": "worker-1",
        "RUN": "digits",
        "STEP": "40",
        "LOGGER": "trainer.test",
    }.items() <= fields.items()
    page = (Path(__file__).resolve().parents[2] / "docs" / "observing.md").read_text()
    asked = re.findall(r"\b([A-Z]+)=", " ".join(re.findall(r"^journalctl .*$", page, re.MULTILINE)))
    assert {"RUN", "TASK", "STEP"} < set(asked) <= fields.keys()
    about(step=None)
    logger.info("next")
    assert "STEP" not in fields_of(received.recv(65536))
    assert otherwise == []


def test_no_line_of_a_message_passes_for_a_field(path: Path, received: socket.socket, otherwise: list[str]) -> None:
    logger, _ = logger_to(path, otherwise)
    about(run="digits")
    logger.error("first\nRUN=other\nPRIORITY=0")
    fields = fields_of(received.recv(65536))
    assert fields["MESSAGE"] == "first\nRUN=other\nPRIORITY=0"
    assert (fields["RUN"], fields["PRIORITY"]) == ("digits", "3")


def test_without_a_journal_nobody_is_there_to_send_to(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        JournalHandler(logging.NullHandler(), str(path))


def test_a_line_that_the_journal_does_not_take_goes_to_standard_error(
    path: Path, received: socket.socket, otherwise: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, _ = logger_to(path, otherwise)
    logger.info("x" * 10_000_000)  # longer than a datagram may be
    assert [len(line) for line in otherwise] == [10_000_000]
    monkeypatch.setattr(journal, "REST_SECONDS", 0.0)
    logger.handlers[0]._rests_until = 0.0  # type: ignore[attr-defined]
    received.close()
    logger.info("the journal is gone")
    assert otherwise[1:] == ["the journal is gone"]


def test_a_journal_that_is_begun_again_gets_the_lines(
    path: Path, received: socket.socket, otherwise: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "REST_SECONDS", 0.0)
    logger, _ = logger_to(path, otherwise)
    received.close()
    logger.info("the journal is gone")
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as again:
        again.bind(str(path))
        again.settimeout(5)
        logger.info("the journal is back")
        assert fields_of(again.recv(65536))["MESSAGE"] == "the journal is back"
    assert otherwise == ["the journal is gone"]


def test_a_journal_that_hangs_costs_one_wait(
    path: Path, received: socket.socket, otherwise: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEND_SECONDS", 0.1)
    logger, _ = logger_to(path, otherwise)
    for number in range(2000):  # more than its queue takes
        logger.info("line %d", number)
    assert otherwise[-1] == "line 1999"
    assert received.recv(65536)


def test_who_ends_waits_until_its_last_words_are_read(
    path: Path, received: socket.socket, otherwise: list[str]
) -> None:
    logger, handler = logger_to(path, otherwise)
    logger.info("last words")
    assert unread(handler._socket) > 0
    reader = threading.Timer(0.1, received.recv, [65536])
    reader.start()
    handler.flush()
    assert unread(handler._socket) == 0


def test_under_systemd_logs_go_to_the_journal_and_what_others_print_to_standard_error(
    path: Path, received: socket.socket
) -> None:
    program = (
        "import logging, sys\n"
        "from trainer.telemetry.outlets.journald import about\n"
        "from trainer.telemetry.logs import set_up_logging\n"
        f"set_up_logging(journal=True, native={str(path)!r})\n"
        "about(run='digits')\n"
        "logging.getLogger('trainer').warning('slow')\n"
        "print('from elsewhere', file=sys.stderr)\n"
    )
    done = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    fields = fields_of(received.recv(65536))
    assert done.communicate()[1] == "from elsewhere\n"
    assert (fields["MESSAGE"], fields["PRIORITY"], fields["RUN"]) == ("warning: slow", "4", "digits")


def test_a_program_that_closes_its_streams_silences_no_log() -> None:
    program = (
        "import logging, sys\n"
        "from trainer.telemetry.logs import set_up_logging\n"
        "set_up_logging(journal=False)\n"
        "sys.stdout.close(), sys.stderr.close()\n"
        "logging.getLogger('trainer').error('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr.endswith("error: failed\n")
    assert done.returncode == 0


def test_tensorflow_is_heard_once_and_not_of_what_is_expected() -> None:
    program = (
        "import logging\n"
        "from trainer.core.runtime import prepare_tensorflow\n"
        "from trainer.telemetry.logs import set_up_logging\n"
        "tensorflow = logging.getLogger('tensorflow')\n"
        "tensorflow.addHandler(logging.StreamHandler())  # as its import does in the parent of a fork\n"
        "prepare_tensorflow()\n"
        "set_up_logging(journal=False)\n"
        "tensorflow.warning('slow')\n"
        "tensorflow.warning('A method is invoked without using `ClusterCoordinator.schedule`.')\n"
        "tensorflow.warning('5 out of 5 calls to MultiDeviceSaver.save triggered retracing')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
    assert [line.partition(" ")[2] for line in done.stderr.splitlines()] == ["warning: slow"]


def test_an_error_that_tensorflow_logs_is_one_line() -> None:
    program = (
        "import logging\n"
        "from trainer.core.runtime import prepare_tensorflow\n"
        "from trainer.telemetry.logs import set_up_logging\n"
        "prepare_tensorflow()\n"
        "set_up_logging(journal=False)\n"
        "error = ValueError('first\\nsecond')\n"
        "logging.getLogger('tensorflow').error('/task:%d has failed: %r:%s', 1, error, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
    said = [line.partition(" ")[2] for line in done.stderr.splitlines()]
    assert said == ["error: /task:1 has failed: ValueError: first"]

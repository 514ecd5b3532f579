"""Orders to servers that share no path with the coordinator: who gets one, and who heeds it."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from tests.waiting import until
from trainer.cluster import remote_commands as remote_commands
from trainer.cluster.remote_commands import Messenger, command_path, received, shut_down_servers
from trainer.cluster.restart_requests import RestartRequests
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record

SERVERS = {"ps-0": "store:1", "ps-1": "store:2", "worker-0": "far:1"}


class Wire:
    """Servers by address, the incarnation of each, and the commands that reached them."""

    def __init__(self, **incarnations: str | None) -> None:
        self.incarnations = {SERVERS[task.replace("_", "-")]: process for task, process in incarnations.items()}
        self.commands: list[tuple[str, str, int]] = []
        self.down = 0

    def incarnation(self, address: str) -> str | None:
        return self.incarnations.get(address)

    def send(self, task: str, address: str, process: str, code: int, why: str) -> bool:
        assert (SERVERS[task], bool(why)) == (address, True)
        if self.down:
            self.down -= 1
            return False
        self.commands.append((task, process, code))
        return True


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire(ps_0="a", ps_1="b", worker_0="c")
    monkeypatch.setattr(remote_commands, "incarnation", wire.incarnation)
    monkeypatch.setattr(remote_commands, "send", wire.send)
    monkeypatch.setattr(remote_commands, "POLL_SECONDS", 0.01)
    return wire


def wait_for(wire: Wire, *expected: tuple[str, str, int]) -> None:
    until(lambda: sorted(wire.commands) == sorted(expected))
    time.sleep(0.05)  # and no other comes
    assert sorted(wire.commands) == sorted(expected)


def test_a_command_is_for_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_commands, "COMMANDS", tmp_path)
    assert received(None) == (None, "")
    assert received("mine") == (None, "")
    write_record(command_path("mine"), {"code": 75, "why": "because"})
    assert received("mine") == (75, "because")
    assert received("another") == (None, "")


def test_all_that_answer_are_dismissed_and_the_others_are_named(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.incarnations[SERVERS["ps-1"]] = None
    wire.down = 1
    shut_down_servers(SERVERS, seconds=0.5)
    wait_for(wire, ("ps-0", "a", 0), ("worker-0", "c", 0))
    assert "ps-1 (store:2) did not hear that the run is finished" in caplog.text


def test_nobody_is_dismissed_where_there_are_no_servers() -> None:
    shut_down_servers({})


def test_only_the_processes_that_must_restart_are_asked_and_each_once(wire: Wire) -> None:
    messenger = Messenger(SERVERS)
    messenger.send({"ps-0": "a", "ps-1": "an earlier one"})
    wait_for(wire, ("ps-0", "a", 75))
    messenger.send({"ps-0": "a", "worker-0": "c", "ps-9": "nowhere"})
    wait_for(wire, ("ps-0", "a", 75), ("worker-0", "c", 75))


def test_one_that_answers_only_later_is_told_then_unless_it_is_wanted_no_more(wire: Wire) -> None:
    wire.incarnations[SERVERS["worker-0"]] = wire.incarnations[SERVERS["ps-1"]] = None
    wire.down = 2
    messenger = Messenger(SERVERS)
    messenger.send({"worker-0": "c", "ps-1": "b"})
    time.sleep(0.05)
    messenger.send({"worker-0": "c"})
    wire.incarnations[SERVERS["worker-0"]], wire.incarnations[SERVERS["ps-1"]] = "c", "b"
    wait_for(wire, ("worker-0", "c", 75))


def test_who_an_earlier_coordinator_has_asked_is_told_by_the_next_one(wire: Wire, tmp_path: Path) -> None:
    """The one before has left it in the state record alone, as it sent no message at its end."""
    asked = {"ps-0": "a"}
    requests = RestartRequests(RunDirectory(tmp_path, "r"), asked, lambda write: None, Messenger(SERVERS))
    requests.ask(dict(asked), 0.0)
    wait_for(wire, ("ps-0", "a", 75))


def test_a_request_that_a_full_disk_did_not_take_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, room = RunDirectory(tmp_path, "r"), [False, False, True, True]
    directory.path.mkdir(parents=True)
    set_members = directory.set_members

    def write(**what: dict[str, str]) -> None:
        if not room.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        set_members(**what)

    monkeypatch.setattr(directory, "set_members", write)
    requests = RestartRequests(directory, {}, lambda write: write(), None)
    for now in (0.0, 1.0, 5.0, 9.0, 10.0, 15.0):
        requests.ask({"ps-0": "a"}, now)
    assert directory.read_state()["restart"] == {"ps-0": "a"}
    assert room == [True]  # at 0, 5 and 10 s; what is written is not written again

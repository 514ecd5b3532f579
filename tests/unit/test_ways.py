"""Which pair a broken way is put down to, what a member finds of its ways, and what the coordinator makes of that."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.waiting import until
from trainer.cluster.member import Member, MemberState
from trainer.cluster.members.heartbeat import is_refusal
from trainer.cluster.probe import METHOD, PADDING, digest
from trainer.cluster.reach import way_probe, way_reader
from trainer.cluster.reach.way_probe import Ways, try_way
from trainer.cluster.reach.way_reader import WayReader
from trainer.cluster.reach.ways import (
    CONFIRMED,
    Way,
    broken,
    cell,
    checked,
    describe,
    lost,
    named_in,
    parted,
    status_of,
    targets,
)
from trainer.core.task_id import TaskId
from trainer.run.records import read_record
from trainer.telemetry.status import describe_ways, has_broken

WORKS = Way("a:1", source="10.0.0.1", seconds=0.002, process="p")
SILENT = Way("10.0.3.21:2300", why="no answer in 4 s", source="10.0.3.31")
SERVERS = {"worker-0": "a:1", "worker-1": "b:1", "ps-0": "c:1", "ps-1": "d:1"}


def ways(*cuts: tuple[str, str]) -> dict[str, dict[str, Way]]:
    """Return the ways of 2 workers and 2 ps, all of which work but these."""
    members = {**SERVERS, "chief-0": "h:1"}
    return {
        task: {other: SILENT if (task, other) in cuts else WORKS for other in targets(task, members)}
        for task in SERVERS
    }


def test_a_worker_without_a_way_to_one_ps_is_named_with_it_and_its_address() -> None:
    found = ways(("worker-1", "ps-1"))
    assert parted(found, "worker-1", ["ps-0", "ps-1"]) == (
        "worker-1 can't reach ps-1 at 10.0.3.21:2300 (no answer in 4 s); its packets leave from 10.0.3.31"
    )
    assert parted(found, "worker-0", ["ps-0", "ps-1"]) == ""
    assert lost(found, ["worker-0", "worker-1"], ["ps-0", "ps-1"]) == {}


def test_a_way_that_is_broken_in_the_other_direction_alone_is_the_pairs_too() -> None:
    found = ways(("ps-1", "worker-1"))
    assert parted(found, "worker-1", ["ps-0", "ps-1"]).startswith("ps-1 can't reach worker-1")
    assert parted(found, "worker-0", ["ps-0", "ps-1"]) == ""


def test_a_ps_that_no_worker_reaches_is_lost_and_no_worker_is_left_out_for_it() -> None:
    found = ways(("worker-0", "ps-1"), ("ps-1", "worker-1"))
    gone = lost(found, ["worker-0", "worker-1"], ["ps-0", "ps-1"])
    assert list(gone) == ["ps-1"]
    assert gone["ps-1"].startswith("no worker has a way to it: worker-0 can't reach ps-1")
    assert parted(found, "worker-0", ["ps-0"]) == ""


def test_no_ps_is_lost_as_long_as_a_worker_has_reported_nothing() -> None:
    found = ways(("worker-0", "ps-1"))
    del found["worker-1"]
    assert lost(found, ["worker-0", "worker-1"], ["ps-0", "ps-1"]) == {}
    assert lost(found, [], ["ps-0", "ps-1"]) == {}


def test_of_two_ps_without_a_way_to_each_other_the_second_is_lost() -> None:
    assert list(lost(ways(("ps-0", "ps-1")), ["worker-0", "worker-1"], ["ps-0", "ps-1"])) == ["ps-1"]


def test_a_way_to_the_coordinator_counts_where_another_member_has_one() -> None:
    one = ways(("worker-1", "chief-0"))
    assert parted(one, "worker-1", ["ps-0", "ps-1"]).startswith("worker-1 can't reach chief-0")
    assert list(lost(ways(("ps-0", "chief-0")), ["worker-0", "worker-1"], ["ps-0", "ps-1"])) == ["ps-0"]
    # Frozen, the coordinator is not reached: that is no fault of the members.
    none = ways(*((task, "chief-0") for task in SERVERS))
    assert parted(none, "worker-1", ["ps-0", "ps-1"]) == ""
    assert lost(none, ["worker-0", "worker-1"], ["ps-0", "ps-1"]) == {}


def test_one_answer_that_came_too_late_breaks_no_way() -> None:
    late = dataclasses.replace(SILENT, timed_out=True)
    found = ways()
    found["worker-1"]["ps-1"] = found["ps-1"]["ps-0"] = late
    assert parted(found, "worker-1", ["ps-0", "ps-1"]) == ""
    assert lost(found, ["worker-0", "worker-1"], ["ps-0", "ps-1"]) == {}
    assert cell(late) == "late once"
    found["worker-1"]["ps-1"] = found["ps-1"]["ps-0"] = dataclasses.replace(late, times=CONFIRMED)
    assert parted(found, "worker-1", ["ps-0", "ps-1"]).startswith("worker-1 can't reach ps-1")
    assert list(lost(found, ["worker-0", "worker-1"], ["ps-0", "ps-1"])) == ["ps-1"]


def test_nobody_tries_a_way_that_no_tensor_takes() -> None:
    members = {**SERVERS, "chief-0": "h:1"}
    assert targets("worker-0", members) == {"ps-0": "c:1", "ps-1": "d:1", "chief-0": "h:1"}
    assert set(targets("ps-0", members)) == {"worker-0", "worker-1", "ps-1", "chief-0"}


def test_whom_tensorflow_names_is_read_from_its_message() -> None:
    message = """Graph execution error:
  (0) UNAVAILABLE:  recvmsg:Connection timed out
Additional GRPC error information from remote target /job:ps/replica:0/task:1/device:CPU:0 while calling /tensorflow.e:
Additional GRPC error information from remote target /job:ps/replica:0/task:1 while calling /tensorflow.WorkerService:
Additional GRPC error information from remote target /job:worker/replica:0/task:12 while calling /tensorflow.eager:"""
    assert named_in(message) == [TaskId("ps", 1), TaskId("worker", 12)]
    assert named_in("Socket closed") == []


def test_another_process_at_a_members_address_is_no_way_to_it() -> None:
    assert checked(WORKS, "p") == WORKS
    assert checked(WORKS, None) == WORKS
    assert checked(WORKS, "q").why.endswith("have two hosts its address?")
    assert "nothing listens there" in checked(Way("a:1", refused=True), "q").why
    assert checked(SILENT, "q") == SILENT


def test_the_status_tells_each_way_and_of_many_the_broken_ones() -> None:
    found = {"worker-10": {"ps-0": SILENT}, "worker-2": {"ps-0": WORKS, "chief-0": Way("h:1", refused=True)}}
    broken_one = "broken (no answer in 4 s); packets leave from 10.0.3.31"
    assert list(status_of(found)) == ["worker-2", "worker-10"]
    assert status_of(found) == {"worker-2": {"chief-0": "closed", "ps-0": "ok"}, "worker-10": {"ps-0": broken_one}}
    assert status_of(found, most=2) == {"worker-10": {"ps-0": broken_one}}
    assert cell(Way("a:1", seconds=0.25)) == "slow, 1 s"
    assert describe_ways(status_of(found)) == f"2 of 3 work. worker-10 to ps-0: {broken_one}"
    assert has_broken(status_of(found))
    assert not has_broken({"worker-2": {"ps-0": "ok", "chief-0": "closed"}})


def test_what_a_member_writes_is_read_again_also_with_a_key_of_another_release() -> None:
    assert Way.read({**SILENT.as_record(), "colour": "red"}) == SILENT
    assert broken({"a-0": {"b-0": Way.read(SILENT.as_record())}}, "b-0", "a-0") == describe("a-0", "b-0", SILENT)


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers as TensorFlow's does, and what it was asked."""
    asked: list[bytes] = []

    class Answers(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
                asked.append(request)
                return b"me"

            return grpc.unary_unary_rpc_method_handler(answer) if details.method == METHOD else None

    made = grpc.server(ThreadPoolExecutor(2), handlers=[Answers()])
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}", asked
    made.stop(None)


def test_a_way_is_tried_with_more_than_a_packet_holds(server: tuple[str, list[bytes]]) -> None:
    address, asked = server
    way = try_way(address)
    assert way.works
    assert (way.source, way.process) == ("127.0.0.1", digest(b"me"))
    assert asked == [PADDING]
    assert len(PADDING) > 9000


def test_a_closed_port_is_reached(server: tuple[str, list[bytes]]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        way = try_way(f"127.0.0.1:{free.getsockname()[1]}")
    assert (way.works, way.refused, way.process) == (True, True, "")


@pytest.mark.parametrize("linger", [1, 0])  # the end as the system makes it: a last packet, or a reset
def test_a_process_that_ends_while_it_is_asked_is_reached(linger: int) -> None:
    """Else the next coordinator begins without the members that had just asked the one that died."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def end() -> None:
            asked, _ = listening.accept()
            listening.close()
            asked.sendall(b"\0\0\0\4\0\0\0\0\0")  # HTTP/2 settings: gRPC is connected
            while len(asked.recv(65536)) < 1000:
                continue
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1 - linger, 0))
            asked.close()

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        way = try_way(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join(10)
    assert (way.why, way.refused, way.process) == ("", True, "")


def test_a_name_server_that_refuses_is_no_closed_port() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as names:
        names.bind(("127.0.0.1", 0))

        def refuse() -> None:
            while (question := names.recvfrom(4096))[0]:
                asked, client = question
                names.sendto(asked[:2] + b"\x81\x85" + asked[4:6] + bytes(6) + asked[12:], client)

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        address = f"dns://127.0.0.1:{names.getsockname()[1]}/ps-0.example:2300"
        way = try_way(address)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary(METHOD)(b"", timeout=10)
        with contextlib.suppress(OSError):  # wakes the thread all the same
            names.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not thread.is_alive()
    assert (way.works, way.why) == (False, "DNS server refused query")
    assert not is_refusal(failed.value)


def test_what_has_no_room_at_first_is_written_later_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(way_probe, "RECORDS", tmp_path / "full")
    monkeypatch.setattr(way_probe, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(way_probe, "incarnation", lambda address: "mine")
    others = {"ps-0": "c:1"}
    Ways("own:1", lambda: others, lambda address: WORKS, "out of memory").start()
    until(lambda: caplog.messages)
    time.sleep(0.1)
    (tmp_path / "full").mkdir()
    until(lambda: (read_record(way_probe.record_path("mine")) or {}).get("ways"))
    found = read_record(way_probe.record_path("mine")) or {}
    assert (found["ways"].keys(), found["lack"]) == ({"ps-0"}, "out of memory")
    (said,) = caplog.messages
    assert said.endswith("psfleet-ways-mine.new: No such file or directory")
    others.clear()  # its thread writes no more


def test_one_that_answers_small_questions_alone_differs_from_one_that_answers_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(way_probe, "question", lambda address, request, deadline: (None if request else b"me", ""))
    assert "MTU" in try_way("127.0.0.1:1").why
    monkeypatch.setattr(way_probe, "question", lambda address, request, deadline: (None, ""))
    assert try_way("127.0.0.1:1").why == "no answer in 4 s"


def test_a_broken_way_is_tried_again_soon_and_one_that_works_later() -> None:
    tried: list[str] = []
    state = {"c:1": WORKS, "d:1": SILENT}

    def attempt(address: str) -> Way:
        tried.append(address)
        return state[address]

    found = Ways("own:1", lambda: {"ps-0": "c:1", "ps-1": "d:1"}, attempt)
    found.probe(0.0)
    assert sorted(tried) == ["c:1", "d:1"]
    tried.clear()
    found.probe(1.0)
    assert tried == ["d:1"]
    assert found.probe(2.0)["ps-1"].times == 3
    state["d:1"] = WORKS
    assert found.probe(3.0)["ps-1"].times == 1
    tried.clear()
    found.probe(5.0)
    assert tried == []
    found.probe(13.0)
    assert sorted(tried) == ["c:1", "d:1"]


class Read:
    """A reader whose members tell what a test says."""

    def __init__(self, rows: Mapping[str, dict[str, Way]], seconds: float = 1.0) -> None:
        """`seconds`: since when the members answer."""
        self.rows = dict(rows)
        now = time.monotonic() - seconds
        self.members = {
            task: Member(task, address).answered(now, now, f"{task}'s") for task, address in SERVERS.items()
        }
        self.reader = WayReader(lambda: self.members, self.read, lambda *lacked: self.lacked.append(lacked))
        self.reader._started = True  # without its thread
        self.lacks: dict[str, str] = {}
        self.lacked: list[tuple[str, ...]] = []

    def read(self, task: str, address: str, process: str) -> tuple[dict[str, Way], str] | None:
        return (self.rows[task], self.lacks.get(task, "")) if task in self.rows else None

    def unfit(self, task: str, process: str = "", later: float = 0.0) -> str | None:
        now = time.monotonic()
        for name, member in self.members.items():
            self.reader._ask(name, member.address, str(member.incarnation))
        self.reader.judge(now)
        return self.reader.unfit(task, process or f"{task}'s", now + later)


def test_a_member_is_asked_once_at_a_time_and_often_as_long_as_a_way_is_broken() -> None:
    questions, member = way_reader.Questions(), Member("ps-1", "d:1").answered(100.0, 100.0, "ps-1's")
    questions.ask(member, None, 100.0)
    questions.ask(member, None, 200.0)  # not answered yet
    questions.end(1)
    assert [questions.next(), questions.next()] == [("ps-1", "d:1", "ps-1's"), None]
    questions.answered("ps-1")
    broken = {"ps-0": SILENT}
    assert [way_reader.pause(member, ways, 100.0) for ways in (None, broken)] == [0.3, 1.0]
    training = member.taken(101.0)
    assert [way_reader.pause(training, ways, 101.0) for ways in (broken, {"ps-0": WORKS})] == [1.0, 10.0]
    assert way_reader.pause(member, None, 200.0) == 10.0  # its release knows nothing of this
    questions.ask(member, broken, 100.9)
    questions.ask(member, broken, 101.0)
    questions.end(1)
    assert [questions.next(), questions.next()] == [("ps-1", "d:1", "ps-1's"), None]


def test_each_answer_of_a_large_cluster_does_not_have_all_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways are looked at then, workers times ps; a new process alone is worth it at once."""
    monkeypatch.setattr(way_reader, "pause", lambda member, ways, now: 0.0)
    judged: list[float] = []
    monkeypatch.setattr(way_reader, "judge", lambda members, rows, now: judged.append(now) or way_reader.Verdict())
    read = Read({task: {"ps-0": WORKS} for task in SERVERS})
    read.reader._started = False
    read.reader.start()
    time.sleep(1.0)
    assert 1 <= len(judged) <= 10
    read.members["worker-1"] = read.members["worker-1"].answered(time.monotonic(), time.monotonic(), "another")
    until(lambda: read.reader._rows["worker-1"][0] == "another")
    read.reader.stop()


def test_a_worker_is_held_back_until_it_has_reported_its_ways() -> None:
    read = Read({})
    assert read.unfit("worker-1") is None
    assert read.unfit("worker-1", later=way_reader.PATIENCE_SECONDS + 1.0) == ""  # its release knows nothing of this
    read.rows = ways(("worker-1", "ps-1"))
    assert "worker-1 can't reach ps-1" in (read.unfit("worker-1") or "")
    assert read.unfit("worker-1", process="the next one") is None
    assert read.unfit("worker-0") == ""
    read.rows = ways()
    assert read.unfit("worker-1") == ""


def test_memory_that_ran_out_is_heard_once_of_each_process() -> None:
    read = Read(ways())
    read.lacks = {"worker-1": "out of memory, limit 2.0 GiB: ...", "ps-0": "out of memory, limit 4.0 GiB: ..."}
    read.unfit("worker-1")
    read.unfit("worker-1")
    expected = [("worker-1", "worker-1's", read.lacks["worker-1"]), ("ps-0", "ps-0's", read.lacks["ps-0"])]
    assert read.lacked == expected
    read.members["worker-1"] = read.members["worker-1"].answered(time.monotonic(), time.monotonic(), "the next one")
    read.unfit("worker-1")
    assert read.lacked[2:] == [("worker-1", "the next one", read.lacks["worker-1"])]


def test_a_worker_waits_for_the_next_try_of_a_way_that_took_too_long() -> None:
    read = Read(ways())
    read.rows["worker-1"]["ps-1"] = dataclasses.replace(SILENT, timed_out=True)
    assert read.unfit("worker-1") is None
    assert read.unfit("worker-0") == ""
    # One that is away can't answer, and it is not waited for.
    read.members["ps-1"] = read.members["ps-1"].unanswered(time.monotonic(), 9.0, 5.0)
    assert read.unfit("worker-1") == ""


def test_a_ps_is_never_waited_for_and_left_out_when_nobody_reaches_it() -> None:
    assert Read({}).unfit("ps-1") == ""
    read = Read(ways(("worker-0", "ps-1"), ("worker-1", "ps-1")))
    assert "no worker has a way to it" in (read.unfit("ps-1") or "")
    assert read.unfit("worker-1") == ""


def test_a_ps_that_is_back_is_judged_by_its_first_answer() -> None:
    read = Read(ways(("worker-0", "ps-1"), ("worker-1", "ps-1")))
    read.members["ps-1"] = read.members["ps-1"].refused(time.monotonic(), time.monotonic())
    assert "no worker has a way to it" in (read.unfit("ps-1", "the next one") or "")


def test_no_worker_is_of_use_as_long_as_a_lost_ps_takes_part() -> None:
    read = Read(ways(("worker-0", "ps-1"), ("worker-1", "ps-1")))
    ps = read.members["ps-1"]
    read.members["ps-1"] = ps.taken(ps.since)
    assert "worker-1 can't reach ps-1" in (read.unfit("worker-1") or "")
    read.members["ps-1"] = ps.taken(ps.since).cut_off(ps.since, "no worker has a way to it")
    assert read.unfit("worker-1") == ""


def test_a_ps_that_the_coordinator_does_not_hear_keeps_no_worker_out() -> None:
    read = Read(ways(("worker-1", "ps-1")))
    read.members["ps-1"] = read.members["ps-1"].unanswered(time.monotonic(), 9.0, 5.0)
    assert read.members["ps-1"].state is MemberState.SILENT
    assert read.unfit("worker-1") == ""


def test_a_worker_whose_packets_reach_another_host_of_that_address_is_parted() -> None:
    rows = ways()
    rows["worker-0"]["ps-1"] = Way("d:1", process="ps-1's")
    rows["worker-1"]["ps-1"] = Way("d:1", process="another's")
    for row in rows.values():
        row.update({task: Way("x:1", process=f"{task}'s") for task in row if task not in ("ps-1", "chief-0")})
    rows["ps-0"]["ps-1"] = Way("d:1", process="ps-1's")
    assert Read(rows).unfit("worker-1") == ""  # it may have tried the way before this process was there
    read = Read(rows, seconds=60.0)
    assert "have two hosts its address?" in (read.unfit("worker-1") or "")
    assert read.unfit("worker-0") == ""

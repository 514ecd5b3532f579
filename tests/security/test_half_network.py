"""Half a network: a worker without a way to one ps is left out and named, and the others train on in their generation.

The tasks are hosts of a network of their own, as in test_training.py; nftables breaks the way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.drills.ways import DELAY_MS
from tests.security.delay import late, milliseconds
from tests.security.test_training import PS, Training

pytest.importorskip("tensorflow")
SECONDS = 120.0
RUN = "walled"
# Of which family, on whose host, in which of its chains, and what is dropped there.
BREAKS = {
    "one way": (4, "w1", "output", "ip daddr {p1}"),
    "one direction": (4, "p1", "output", "ip daddr {w1}"),
    "one port": (4, "w1", "output", "ip daddr {p1} tcp dport 2300"),
    "large packets over IPv6": (6, "w1", "output", "ip6 daddr {p1} meta length > 1000"),
}
QUICK = "large packets over IPv6"


class Half(Training):
    """A training whose ways are broken and fixed."""

    def __init__(self, directory: Path, family: int = 4, **settings: Any) -> None:
        often = {"steps": 10_000_000, "checkpoint_steps": 0, "checkpoint_seconds": 5.0, "evaluation": "none"}
        super().__init__(PS, often | {"log_seconds": 0.5} | settings, directory, family)
        self.run = directory / "runs" / RUN

    def breaks(self, host: str, hook: str, rule: str) -> None:
        rule = rule.format(**{name: self.address(name) for name in self.hosts})
        chain = f"chain broken {{\n type filter hook {hook} priority -300\n {rule} drop\n }}"
        self._nft(host, f"table inet half {{\n {chain}\n}}\n")

    def fixes(self, host: str) -> None:
        self._nft(host, "delete table inet half")

    @contextmanager
    def late(self, host: str, target: str) -> Iterator[None]:
        """Have what a host sends to another come later, until the block ends."""
        under, address = self.networks.under(host), self.address(target)
        port = next(int(task["port"]) for task in self.tasks.values() if task["host"] == target)
        with late(under, address):
            assert milliseconds(under, address, port) >= DELAY_MS
            yield

    def events(self, name: str = "") -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in found if name in ("", event["event"])]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        return found

    def until(self, true: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{self.logs()}"
            time.sleep(0.3)
        return found

    def given(self, worker: str) -> int:
        return int(self.status()["workers"].get(worker, {}).get("steps", 0))

    def until_gives(self, worker: str) -> None:
        before = self.given(worker)
        self.until(lambda: self.given(worker) > before, f"{worker} gives a step")


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Callable[..., Half]]:
    with ExitStack() as ends:

        def make(family: int = 4, **settings: Any) -> Half:
            made = Half(tmp_path, family, **settings)
            ends.callback(made.end)
            return made

        yield make


@pytest.mark.parametrize(
    "which", [pytest.param(each, marks=pytest.mark.quick) if each == QUICK else each for each in BREAKS]
)
def test_the_worker_of_a_broken_way_is_left_out_and_named_and_taken_back(half: Callable[..., Half], which: str) -> None:
    family, host, hook, rule = BREAKS[which]
    training = half(family)
    training.start()
    training.until_trains()
    training.until_gives("worker-1")
    training.breaks(host, hook, rule)
    named = training.until(
        lambda: [e for e in training.events("member-half-connected") if "can't reach" in e["message"]], "it is named"
    )
    assert named[0]["task"] == "worker-1"
    leave = training.address("w1")
    training.until(
        lambda: any(f"packets leave from {leave}" in e["message"] for e in training.events("member-half-connected")),
        "its address is named",
    )
    training.until_gives("worker-0")
    assert training.status()["without"] == {"worker-1": "half connected"}
    assert "broken" in str(training.status()["ways"])
    training.fixes(host)
    training.until(lambda: training.status()["without"] == {}, "it is taken back")
    training.until_gives("worker-1")
    assert training.events("recovering") == []
    assert len(training.events("formed")) == 1


def test_a_late_way_makes_its_worker_slow_and_nobody_else(half: Callable[..., Half]) -> None:
    training = half()
    training.start()
    training.until_trains()
    training.until_gives("worker-1")
    with training.late("w1", "p1"):
        training.until_gives("worker-1")  # what was under way
        before = {worker: training.given(worker) for worker in ("worker-0", "worker-1")}
        for _ in range(3):
            training.until_gives("worker-1")
        steps = {worker: training.given(worker) - count for worker, count in before.items()}
    assert steps["worker-0"] > 2 * steps["worker-1"], steps
    assert training.status()["without"] == {}
    names = {event["event"] for event in training.events()}
    assert not names & {"recovering", "member-left", "member-half-connected", "ps-lost"}, names
    assert len(training.events("formed")) == 1
    for _ in range(2):
        training.until_gives("worker-1")


def test_a_way_that_never_was_there_costs_nobody_a_step(half: Callable[..., Half]) -> None:
    _, host, hook, rule = BREAKS["one way"]
    training = half()
    training.breaks(host, hook, rule)
    training.start()
    training.until_trains()
    training.until(lambda: "worker-1" in training.status()["without"], "it is left out")
    formed = len(training.events("formed"))
    for _ in range(3):
        training.until_gives("worker-0")
    named = [event["message"] for event in training.events("member-half-connected")]
    assert any("worker-1 can't reach ps-1" in message for message in named), named
    training.fixes(host)
    training.until_gives("worker-1")
    assert len(training.events("formed")) <= formed + 1


def test_a_ps_that_no_worker_reaches_is_lost_and_taken_back(half: Callable[..., Half]) -> None:
    training = half(ps_grace_seconds=3.0, worker_wait_seconds=3.0)
    training.start()
    training.until_trains()
    training.breaks("p1", "input", "ip saddr {{ {w0}, {w1} }}")
    training.until(lambda: training.status()["without"].get("ps-1") == "half connected", "ps-1 is left out")
    training.until_gives("worker-0")
    assert len(training.events("recovering")) == 1, training.events()
    [lost] = training.events("ps-lost")
    assert "no worker has a way to it" in lost["message"]
    training.fixes("p1")
    training.until(lambda: len(training.events("formed")) == 3, "ps-1 is taken back")
    training.until_gives("worker-1")

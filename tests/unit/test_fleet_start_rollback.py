"""What a start that fails puts back, and what two starts do to each other, on pretended hosts."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.run import PATH_SECONDS
from fleet.hosts.ssh import Answer
from fleet.output.tables import ProgressLine
from fleet.rollout.release import Shipment, ShipmentResult
from fleet.verbs.start import LEFT, StartRequest, start_cluster
from tests.unit.fake_hosts import FakeHosts, printed, run_up, shipping, status, train


@pytest.mark.parametrize(
    "error", [OperatorMistake("no such program"), ClusterTrouble("no wheels"), KeyboardInterrupt()]
)
def test_what_fails_before_the_switch_changes_nothing(hosts: FakeHosts, console: Console, error: BaseException) -> None:
    run_up(hosts)
    before = (dict(hosts.units), hosts.selection, hosts.release)
    shipped: list[str] = []

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append(shipment.playbooks[-1])
        assert shipment.selection == {"run": "digits-2", "program": "p:Misspelt"}
        raise error

    console.ship = ship
    with pytest.raises(type(error)):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", "p:Misspelt", restart=True))
    assert (dict(hosts.units), hosts.selection, hosts.release) == before
    assert (hosts.done, shipped) == ([], ["release.yml"])
    assert "nothing was stopped, switched or selected: what ran goes on\n" in printed(console)


def test_two_starts_are_not_made_at_once(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    hosts.held = Answer("taken by a start of ann@laptop since 10:41:07 UTC")
    with pytest.raises(OperatorMistake, match="this cluster is taken by a start of ann@laptop since 10"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    assert (hosts.done, hosts.asked) == ([], [])
    console.ship = shipping(lambda: None)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", plan_only=True))
    assert hosts.holds == ["held"]  # a plan harms nobody
    assert "this cluster is taken by a start of ann@laptop since 10:41:07 UTC. Until that is over" in printed(console)
    hosts.held = Answer("held")
    calm = Console(io.StringIO(), console.clock, console.sleep, console.ship, console.check_program, console.build)
    start_cluster(Cluster(hosts.inventory, hosts), calm, StartRequest("digits-2", plan_only=True))
    assert "this cluster is taken" not in printed(calm)


def stop(hosts: FakeHosts) -> None:
    """Stop the cluster, as another operator does meanwhile."""
    hosts.stopped = "a stop-cluster of bob@desk at 10:41:07 UTC"
    for name in hosts.units:
        hosts.set(name, active="inactive", sub="dead", file_state="disabled")


@pytest.mark.parametrize("when", ["while it ships", "while it waits for a step"])
def test_a_start_starts_nothing_of_a_cluster_that_is_stopped_meanwhile(
    hosts: FakeHosts, console: Console, when: str
) -> None:
    run_up(hosts)

    def ship() -> None:
        hosts.release = "0ld"
        if when == "while it ships":
            stop(hosts)

    def tick(hosts: FakeHosts) -> None:
        if "start chief-0" in hosts.done and not hosts.stopped:
            stop(hosts)

    console.ship, hosts.tick = shipping(ship), tick
    before = hosts.release
    message = "bob@desk at 10:41:07 UTC came meanwhile" if when == "while it ships" else "was stopped at step"
    with pytest.raises(ClusterTrouble, match=message):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", restart=True))
    assert not any(unit.up or unit.enabled for unit in hosts.units.values())
    assert ("start chief-0" in hosts.done) is (when != "while it ships")
    assert hosts.release == before
    assert "a stop-cluster of bob@desk at 10:41:07 UTC came meanwhile" in printed(console)


def test_a_start_that_keeps_no_other_away_any_more_stops_before_the_switch(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    units, selection, shipped = dict(hosts.units), hosts.selection, []

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append(shipment.playbooks[-1])
        hosts.holds.append("lost")
        return ShipmentResult({}, {})

    console.ship = ship
    with pytest.raises(ClusterTrouble, match="the connection to head that kept other starts away is lost"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", restart=True))
    assert (hosts.done, dict(hosts.units), hosts.selection, shipped) == ([], units, selection, ["release.yml"])
    assert hosts.remembered is None  # another start may have noted there what it is to put back
    assert "nothing was stopped, switched or selected: what ran goes on\n" in printed(console)


def test_a_script_that_writes_and_then_looks_has_time_for_a_path_that_hangs_twice(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the host would count as lost, and nobody would learn that the path hangs."""
    given, run = [], hosts.run

    def patient(scripts: Mapping[str, str], timeout: float = 30, data: Any = None) -> dict[str, Answer]:
        given.extend(timeout for script in scripts.values() if "@first" in script)
        return run(scripts, timeout, data)

    monkeypatch.setattr(hosts, "run", patient)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", detach=True))
    assert len(given) >= 2  # what is chosen, and the end of the line in the history; between them waits for news
    assert min(given) > 2 * PATH_SECONDS


def test_who_only_looks_on_keeps_no_other_start_away(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    seen: list[str] = []

    def tick(hosts: FakeHosts) -> None:
        hosts.run_status = status("training", len(hosts.asked), 999.0 + hosts.now)
        seen[:] = hosts.holds
        if len(hosts.asked) > 12:
            raise KeyboardInterrupt

    hosts.tick = tick
    with pytest.raises(KeyboardInterrupt, match="what was started goes on"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert seen == ["held", "let go"]


@pytest.mark.parametrize(("started", "message"), [(False, ""), (True, LEFT)])
def test_who_leaves_is_told_what_goes_on(hosts: FakeHosts, console: Console, started: bool, message: str) -> None:
    def leave(_: object) -> None:
        raise KeyboardInterrupt

    if started:
        console.sleep = leave
    else:
        console.ship = shipping(lambda: leave(None))
    with pytest.raises(KeyboardInterrupt) as left:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    assert str(left.value) == message


def test_ctrl_c_does_not_break_off_what_is_put_back(hosts: FakeHosts, console: Console, heeds_ctrl_c: object) -> None:
    run_up(hosts)
    hosts.tick = lambda _: signal.raise_signal(signal.SIGINT) if "stop" in str(hosts.done) else None
    console.ship = shipping(lambda: (_ for _ in ()).throw(ClusterTrouble("no room on ps-0")))
    with pytest.raises((ClusterTrouble, KeyboardInterrupt)):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", "p:Wrong"))
    assert "put back: run digits, release abc123" in printed(console)
    assert signal.getsignal(signal.SIGINT) is heeds_ctrl_c


@pytest.mark.parametrize(("step", "run", "untried"), [(12, None, False), (0, None, True), (12, "digits-2", True)])
def test_the_model_is_built_where_no_run_has_trained_with_the_choice(
    hosts: FakeHosts, console: Console, step: int, run: str | None, untried: bool
) -> None:
    run_up(hosts)
    hosts.run_status = status("training", step, 999.0)
    shipped: list[bool] = []

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append(shipment.untried)
        raise ClusterTrouble("enough is known")

    console.ship = ship
    with pytest.raises(ClusterTrouble, match="enough is known"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run))
    assert shipped == [untried]


@pytest.mark.parametrize("when", ["switch", "interrupt", "first step"])
def test_what_fails_after_the_switch_is_put_back(hosts: FakeHosts, console: Console, when: str) -> None:
    run_up(hosts)
    console.build = lambda _: "def456"

    def switch() -> None:
        hosts.release, hosts.settings = "def456", "6a88 -"
        if when == "switch":
            raise ClusterTrouble("no room on ps-0")
        if when == "interrupt":
            raise KeyboardInterrupt

    def tick(hosts: FakeHosts) -> None:
        if "select" in hosts.done and "put back" not in hosts.done and hosts.units["chief-0"].up:
            hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)

    hosts.tick = tick
    console.ship = shipping(switch)
    with pytest.raises(KeyboardInterrupt if when == "interrupt" else ClusterTrouble):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", "p:Wrong"))
    assert (hosts.release, hosts.settings) == ("abc123", "5e77 -")
    assert json.loads(hosts.selection) == {"run": "digits", "program": "p:P"}
    assert all(unit.up for unit in hosts.units.values())
    after = hosts.done[hosts.done.index("put back") :]
    assert after[:3] == ["put back", "select", "tell abc123"]
    assert "put back: run digits, release abc123; started again: chief-0, ps-0" in printed(console)


def test_where_the_chiefs_host_dies_in_the_switch_the_others_are_put_back(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    console.build = lambda _: "def456"

    def switch() -> None:
        hosts.release, hosts.selection = "def456", '{"run": "digits-2", "program": "p:P"}'
        hosts.unreachable = {"head": "no answer from 192.0.2.10:22 in 10 s"}
        raise HostsUnreachable(hosts.unreachable)

    console.ship = shipping(switch)
    with pytest.raises(HostsUnreachable, match="chief"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    after = hosts.done[hosts.done.index("put back") :]
    assert after[:3] == ["put back", "select", "tell abc123"]
    assert json.loads(hosts.selection) == {"run": "digits", "program": "p:P"}
    output = printed(console)
    assert "not everything was put back" in output
    assert "head may have the new release, settings and units. When it is back, run `fab start-cluster` again" in output
    assert "from the checkout of release abc123, to have what was there before" in output


def test_a_first_run_that_fails_leaves_the_cluster_as_it_was(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = lambda hosts: (
        hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)
        if hosts.units["chief-0"].up
        else None
    )
    with pytest.raises(ClusterTrouble, match="chief-0 on head: exited with code 78"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    assert hosts.selection == ""
    assert not any(unit.up or unit.enabled for unit in hosts.units.values())
    assert "nothing ran, and nothing was started" in printed(console)


def test_a_run_that_is_slow_to_begin_is_not_put_back(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    with pytest.raises(ClusterTrouble, match="no step was trained in 20 s"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", timeout=20))
    assert "put back" not in hosts.done
    assert json.loads(hosts.selection) == {"run": "digits-2"}

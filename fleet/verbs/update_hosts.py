"""`fab update-hosts`: Debian's updates, and reboots where they are needed, a host at a time while the others train."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively
from fleet.actions.look_around import look_around
from fleet.actions.served import serves_path, wait_for_path, wait_for_save, wait_for_services
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake
from fleet.hosts import drains, history
from fleet.hosts.cluster import Cluster
from fleet.hosts.drains import is_drained
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.history import Trail
from fleet.hosts.host_packages import (
    BOOT,
    INSTALL,
    INSTALL_SECONDS,
    LOOK,
    LOOK_SECONDS,
    REBOOT,
    REFRESH,
    HostState,
    as_root,
    look_at,
    values_of,
)
from fleet.hosts.observation import Observation
from fleet.output.tables import render_duration
from fleet.planning.cost import Cost, cost_of
from fleet.site.host_names import find_hosts
from fleet.site.schema.problems import show
from fleet.verbs.drain import drain, set_aside, undrain
from trainer.core.settings.config import Config
from trainer.core.settings.strategies import STRATEGIES

VERB = "update-hosts"
REBOOTS = ("when-needed", "always", "never", "only")
FORCED = ("always", "only")
UNNAMED = "it serves the shared path, for which tasks wait meanwhile, and so it must be named"
SKEW_SECONDS = 60.0  # less is how long an answer may take
BOOT_SECONDS = 5.0  # between two looks at a host that boots


@dataclass(frozen=True)
class UpdateRequest:
    """What an operator asks for."""

    hosts: Sequence[str] = ()
    """All of the inventory's where none is named."""
    reboot: str = "when-needed"
    timeout: float = 900.0
    """Seconds until a rebooted host must answer."""
    reason: str | None = None
    plan_only: bool = False


@dataclass
class Row:
    """What became of a host, or would."""

    host: str
    outcome: str = "up to date"
    updates: Sequence[str] = ()
    rebooted: bool = False
    seconds: float | None = None
    why: str | None = None
    cost: Cost | None = None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "cost": self.cost.as_json() if self.cost else None}


@dataclass
class Rounds:
    """The way from host to host."""

    cluster: Cluster
    console: Console
    request: UpdateRequest
    trains: bool
    """Whether the cluster is started, so that a host must leave before it is touched."""
    since: float
    """With a reboot of all, hosts that have booted after it are done."""
    ahead: Mapping[str, float]
    """By host with another time than the coordinator's: by how many seconds."""
    rows: list[Row] = field(default_factory=list)

    @property
    def as_wanted(self) -> str:
        """What is said of hosts with nothing left to do."""
        return "have booted since" if self.request.reboot == "only" else "are up to date"

    @property
    def quiet(self) -> Console:
        """For verbs within this one, which have no answer of their own."""
        return replace(self.console, json_out=None)

    def has_work(self, host: str, state: HostState) -> bool:
        return bool(state.updates) or self.reboots(host, state)

    def reboots(self, host: str, state: HostState) -> bool:
        if self.request.reboot in FORCED:
            return state.began - self.ahead.get(host, 0.0) < self.since
        return self.request.reboot == "when-needed" and bool(state.reboot)

    def stays(self, host: str) -> str | None:
        """Say why a host is not taken out of a training at all."""
        inventory = self.cluster.inventory
        strategy = inventory.run_settings.get("strategy", Config.strategy)
        if self.trains and host == inventory.chief.host and STRATEGIES[strategy].in_step:
            return "it has the coordinator, and its members train in step"
        return UNNAMED if self.is_unnamed(host) else None

    def is_unnamed(self, host: str) -> bool:
        """Whether a host takes its turn only where it is named: the tasks wait for what it serves."""
        return self.trains and serves_path(self.cluster, host) and not self.request.hosts

    def why_left(self, seen: Observation, host: str) -> str | None:
        """Say why a host is left as it is, without a try to drain it."""
        by_another = host in seen.drains and not is_ours(seen, host)
        if self.trains and by_another and not is_drained(self.cluster, seen, host):
            return self.stays(host) or f"its drain is not complete: fab drain {host}"
        return self.stays(host)

    def go_on(self, host: str, state: HostState) -> Row:
        """Update a host, and have it back in the training; raises what stops the verb there."""
        seen = self.cluster.observe(dict.fromkeys([*self.cluster.inventory.hosts, host]), new_is_enough=True)
        drained, ours = host in seen.drains, is_ours(seen, host)
        if not self.has_work(host, state) and not ours:
            return Row(host)
        if why := self.why_left(seen, host):
            return Row(host, "left", state.updates, why=why)
        begun = self.console.clock()
        if self.trains and serves_path(self.cluster, host) and not wait_for_save(self.cluster, self.quiet, seen):
            return Row(host, "left", state.updates, why="the coordinator does not save: fab logs --task chief-0")
        if (
            self.has_work(host, state)
            and self.trains
            and (ours or not drained)
            and host in self.cluster.inventory.hosts
        ):
            try:
                self.take_out(host)
            except OperatorMistake as error:
                return Row(host, "left", state.updates, why=str(error).removeprefix(f"{host} stays: "))
            ours = True
        try:
            rebooted = self.touch(host, state)
        except FleetError as error:
            self.give_up(host, error)
            raise
        if serves_path(self.cluster, host):
            wait_for_path(self.cluster, self.quiet, host, self.request.timeout, self.again)
        if ours:
            self.bring_back(host)
        wait_for_services(self.cluster, self.console, seen, host, self.again)
        row = Row(host, "updated", state.updates, rebooted, self.console.clock() - begun)
        what = ", ".join(filter(None, (state.describe(), "rebooted" * rebooted)))
        self.console.print(f"{host}: {what or 'had its updates'}, and back after {row.seconds:.0f} s")
        return row

    def touch(self, host: str, state: HostState) -> bool:
        """Install what a host lacks, and reboot it where that is asked for; returns whether it was."""
        if state.updates:
            self.console.print(f"{host}: installing {state.describe()}")
            as_root(self.cluster, [host], INSTALL, INSTALL_SECONDS, f"Fix it there, then {self.again}")
            state = look_at(self.cluster, [host])[host]
        if not self.reboots(host, state):
            return False
        self.console.print(f"{host}: rebooting" + (f" ({state.reboot})" if state.reboot else ""))
        as_root(self.cluster, [host], REBOOT, LOOK_SECONDS, f"then {self.again}")
        end, why = self.console.clock() + self.request.timeout, "it does not go down"
        while self.console.clock() < end:
            self.console.sleep(BOOT_SECONDS)
            answer = self.cluster.hosts.run({host: BOOT}, BOOT_SECONDS)[host]
            if answer.unreachable:
                why = answer.unreachable
            elif (boot := values_of(answer.stdout).get("boot")) and boot != state.boot:
                self.keep_others_away(host)
                return True
        rest = f"It was rebooted {render_duration(self.request.timeout)} ago, and the hosts after it were not touched"
        raise HostsUnreachable({host: why}, f"{rest}. When it is back: {self.again}")

    def keep_others_away(self, host: str) -> None:
        """Take the lock again that a reboot of the coordinator's host has ended."""
        if host == self.cluster.inventory.chief.host:
            self.cluster.release_start_lock()
            self.cluster.acquire_start_lock(VERB, again=True)

    def take_out(self, host: str) -> None:
        """Have a host's tasks leave the training, or the training wait for the coordinator."""
        reason = self.request.reason or VERB
        if host == self.cluster.inventory.chief.host:
            set_aside(self.cluster, self.quiet, host, reason, VERB)
        else:
            drain(self.cluster, self.quiet, host, reason, verb=VERB, is_soon_back=True)

    def give_up(self, host: str, error: FleetError) -> None:
        """Have others read the data of a host's workers, which may stay out for long; the coordinator goes on."""
        inventory = self.cluster.inventory
        tasks = inventory.tasks_on(host)
        with contextlib.suppress(FleetError):  # what is wrong is said already
            if not tasks or host not in self.cluster.observe(new_is_enough=True).drains:
                return
            if host != inventory.chief.host:
                drains.announce_drain(self.cluster, tasks)
            elif not isinstance(error, HostsUnreachable | OperatorMistake):  # another is at work there
                self.bring_back(host)

    def reject_lost(self, lost: Mapping[str, str]) -> None:
        """Raise HostsUnreachable where hosts are away that an earlier call, which may have been broken off, drained."""
        error = HostsUnreachable(lost, f"An earlier update has drained it. When it is back: {self.again}")
        for host in () if self.request.plan_only else lost:
            self.give_up(host, error)
        if lost:
            raise error

    def bring_back(self, host: str) -> None:
        """Undrain a host, and wait until its tasks train."""
        patience = float(self.cluster.inventory.variables[host].get("trainer_return_seconds", 900))
        if not undrain(self.cluster, self.quiet, host, self.request.reason or VERB, patience=patience):
            raise ClusterTrouble(
                f"{host} is updated, and its tasks don't train after {render_duration(patience)}. Look: fab status. "
                f"Then {self.again}"
            )

    @property
    def again(self) -> str:
        """The command that goes on."""
        return self.command(self.request.hosts)

    @property
    def for_left(self) -> str:
        """The commands for those that were left: beside the training where they only lack their name."""
        left = [row.host for row in self.rows if row.outcome == "left"]
        if all(map(self.is_unnamed, left)):
            return self.command(left)
        return f"fab stop-cluster, {self.command(left)}, then fab start-cluster"

    def command(self, hosts: Sequence[str]) -> str:
        """Return this command for these hosts, for all where none is named."""
        ask = self.request
        reboot = f"--reboot {ask.reboot}" if ask.reboot != UpdateRequest.reboot else ""
        timeout = f"--timeout {ask.timeout:g}" if ask.timeout != UpdateRequest.timeout else ""
        words = filter(None, ("fab", VERB, ",".join(hosts), reboot, timeout))
        return with_reason(" ".join(words), ask.reason)


def is_ours(seen: Observation, host: str) -> bool:
    """Whether this verb has drained a host: in this call, or in one that was broken off."""
    return seen.drains.get(host, {}).get("verb") == VERB


def update_hosts(cluster: Cluster, console: Console, request: UpdateRequest) -> None:
    """Bring hosts up to date one after the other, each out of the training meanwhile.

    Typed again it goes on. Raises HostsUnreachable for a host that is not back, ClusterTrouble where hosts were left.
    """
    if request.reboot not in REBOOTS:
        expected = f"{', '.join(REBOOTS[:-1])} or {REBOOTS[-1]}"
        raise OperatorMistake(f"--reboot is {show(request.reboot)}: expected {expected}")
    inventory = cluster.inventory
    chosen = find_hosts(inventory, request.hosts, beside=True) if request.hosts else list(inventory.everyone)
    begin_exclusively(cluster, console, VERB, request.plan_only)
    seen, checkpoints = look_around(cluster, chosen)
    chief = inventory.chief.host
    reject_foreign(inventory, seen, {chief, *chosen})
    now = seen.clocks[chief]
    ahead = {host: clock - now for host, clock in seen.clocks.items() if abs(clock - now) > SKEW_SECONDS}
    rounds = Rounds(cluster, console, request, drains.is_started(inventory, seen), now, ahead)
    if request.reboot in FORCED:
        rounds.since = _begin(cluster, chosen, rounds.since)
    ours = [host for host in chosen if is_ours(seen, host)]
    # What was broken off comes first, and what all wait for at the end.
    chosen.sort(key=lambda host: (host not in ours, serves_path(cluster, host), host == chief))
    rounds.reject_lost({host: seen.unreachable[host] for host in ours if host in seen.unreachable})
    states = _look(cluster, [host for host in chosen if host not in seen.unreachable], request)
    away = {host: seen.unreachable[host] for host in chosen if host in seen.unreachable}
    rounds.rows = [Row(host, "away", why=why) for host, why in away.items()]
    work = [host for host, state in states.items() if rounds.has_work(host, state) or host in ours]
    if request.plan_only:
        _plan(rounds, seen, checkpoints, states, work)
        if away or all(row.outcome == "left" for row in rounds.rows):
            _end(rounds, away)  # else it does its work, and says at its end what it has left
        return
    if work:
        with Trail(cluster, console, VERB, request.reason) as trail:
            trail.begin(hosts=work, **({"since": rounds.since} if request.reboot in FORCED else {}))
            for host in work:
                rounds.rows.append(rounds.go_on(host, states[host]))
            if left := [row.host for row in rounds.rows if row.outcome == "left"]:
                trail.end(left=left)
    _say_end(rounds, states, away)


def _look(cluster: Cluster, hosts: Sequence[str], request: UpdateRequest) -> dict[str, HostState]:
    """Ask hosts for their boot, and for their updates where these are wanted."""
    if request.reboot == "only":
        return look_at(cluster, hosts, BOOT)
    return look_at(cluster, hosts, REFRESH + LOOK)


def _begin(cluster: Cluster, hosts: Sequence[str], now: float) -> float:
    """Return when this round of reboots began: with an earlier call of the hosts, where that came to no end."""
    known = history.read(cluster)[0]
    acts = [act for act in known if act.get("verb") == VERB and "since" in act and {*hosts} & {*act.get("hosts", ())}]
    return float(acts[-1]["since"]) if acts and acts[-1]["outcome"] != history.DONE else now


def _cost(rounds: Rounds, seen: Observation, host: str, checkpoints: Sequence[Mapping[str, Any]]) -> Cost:
    """Work out what it costs to update a host: the training waits for that of the coordinator, whatever else it has."""
    inventory = rounds.cluster.inventory
    cost = cost_of(inventory, seen, [host], checkpoints, goes_off=True)
    return replace(cost, room=[], refusals=[]) if host == inventory.chief.host else cost


def _plan(
    rounds: Rounds,
    seen: Observation,
    checkpoints: Sequence[Mapping[str, Any]],
    states: Mapping[str, HostState],
    hosts: Sequence[str],
) -> None:
    """Say what each of these hosts would get, and what that costs."""
    for host in hosts:
        cost, state = _cost(rounds, seen, host, checkpoints), states[host]
        drains = rounds.trains and host not in seen.drains
        why = rounds.why_left(seen, host) or ("\n".join(cost.refusals) if drains else "")
        outcome = "left" if why else "planned"
        rounds.rows.append(Row(host, outcome, state.updates, rounds.reboots(host, state), why=why or None, cost=cost))
    lines = [VERB]
    for row in rounds.rows:
        if row.cost is None:
            lines.append(f"{row.host} does not answer: {row.why}")
            continue
        state = states[row.host]
        may = rounds.request.reboot == "when-needed" and not row.rebooted and row.updates
        reboot = "a reboot" if row.rebooted else "a reboot where they ask for one" if may else ""
        what = ", then ".join(filter(None, (state.describe(), reboot)))
        lines += [f"{row.host}: {what or 'comes back'}", row.cost.render()]
        lines += [f"  refused {row.host}: {row.why}"] if row.why and not row.cost.refusals else []
    same = len(states) - len(hosts)
    lines.append(f"{same} of {len(states)} hosts {rounds.as_wanted}. Nothing was done. Do it: {rounds.again}")
    rounds.console.print("\n".join(lines))
    outcomes = {row.outcome for row in rounds.rows}
    _answer(rounds, "planned" if "planned" in outcomes else "refused" if outcomes else "nothing to do", rounds.again)


def _say_end(rounds: Rounds, states: Mapping[str, HostState], away: Mapping[str, str]) -> None:
    left = [row for row in rounds.rows if row.outcome == "left"]
    done = [row for row in rounds.rows if row.outcome == "updated"]
    look = "" if left or away else ". Look: fab hosts"  # else the error has the next command
    rounds.console.print(f"{len(states) - len(left)} of {len(states) + len(away)} hosts {rounds.as_wanted}{look}")
    incomplete = rounds.for_left if left else rounds.again if away else ""
    _answer(rounds, "incomplete" if incomplete else "done" if done else "nothing to do", incomplete or "fab hosts")
    _end(rounds, away)


def _end(rounds: Rounds, away: Mapping[str, str]) -> None:
    """Raise what is wrong where hosts were away, or left."""
    if away:
        raise HostsUnreachable(away, f"When they are back: {rounds.again}")
    if why := "\n".join(f"{row.host} was left: {row.why}" for row in rounds.rows if row.outcome == "left"):
        raise ClusterTrouble(f"{why}\nThe run is saved and goes on: {rounds.for_left}")


def _answer(rounds: Rounds, outcome: str, following: str) -> None:
    rows = [row.as_json() for row in rounds.rows]
    rounds.console.print_json(VERB, {"outcome": outcome, "hosts": rows, "next": following})

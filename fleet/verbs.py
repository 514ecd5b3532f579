"""The operator's verbs, from question to exit; `fabfile.py` gives them their command line."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from fleet import decision, drains, report
from fleet.answers import render as render_answer
from fleet.cluster import Cluster, Observation
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake
from fleet.history import Trail
from fleet.inventory import Inventory, Task, list_notes
from fleet.journal import EVERY_LINE, Chosen, Entry
from fleet.plan import Plan, make_plan, render_plan
from fleet.quorum import chosen_minimum, find_shortages
from fleet.release import STAGE, SWITCH, Display, Shipment, Shipped, build_release, check_deeply, find_program, ship
from fleet.run import Run
from fleet.schema.formats import control_path
from fleet.schema.problems import show
from fleet.short import ShortWay
from fleet.signals import undisturbed
from fleet.sweep import is_same
from fleet.tables import ProgressLine, put, render_duration
from fleet.terminal import is_terminal, printable
from fleet.units import Health
from trainer.telemetry.sweep import describe_sweep

# How often the chief's host is asked for the run, and all hosts for their units.
RUN_SECONDS = 0.5
UNITS_SECONDS = 3.0
# Once a step is trained, looking at all hosts takes no more than one part in so many of the time.
UNITS_SHARE = 20
# The chief's host may be silent for so long before the watching ends; the training goes on without us. A slow one that
# builds its model has little time for SSH.
SILENCE_SECONDS = 180.0
# The evaluator gets so long after the last step.
EVALUATION_SECONDS = 180.0
# How many lines of each task's journal are shown.
LINES, CHOSEN_LINES = 20, 1000
DOWN = (Health.STOPPED, Health.FAILED, Health.ABSENT)
LEFT = "left; what was started goes on. Look: fab status. Stop it: fab stop-cluster"


def _ask(question: str) -> bool:
    """Put a question to the operator; no where nobody sits at a terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(printable(question)).strip().lower() in ("y", "yes")


@dataclass
class Desk:
    """Where a verb writes and how it tells time; a test brings its own."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    ship: Callable[[Shipment, Display], Shipped] = ship
    find: Callable[[Inventory, str, Sequence[str]], None] = find_program
    build: Callable[[Inventory], str] = build_release
    look: Callable[[Inventory, Sequence[str], Display], Mapping[str, str]] = check_deeply
    ask: Callable[[str], bool] = _ask
    answers: TextIO | None = None
    """Where `--json` goes, while `out` is for who looks on; None where nobody asked for it."""
    meanwhile: TextIO | None = None
    """Where it is shown how far a verb is, so that `out` has what comes of it; None for `out`."""

    def say(self, text: str) -> None:
        put(self.out, text)

    def answer(self, verb: str, record: Mapping[str, Any], on_a_line: bool = False) -> None:
        """Print what `--json` asked for."""
        put(self.answers or self.out, render_answer(verb, record, on_a_line=on_a_line))


def start_cluster(
    cluster: Cluster,
    desk: Desk,
    run_name: str | None = None,
    program: str | None = None,
    detach: bool = False,
    timeout: float = 300.0,
    restart: bool = False,
    plan_only: bool = False,
    allow_missing: bool = False,
    source: str | None = None,
    program_args: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
) -> None:
    """Plan, ship beside what runs and prove it there; then stop, select, start, and watch.

    It watches until a step is trained (`detach`) or the run is finished. What fails before the proof changes nothing;
    what fails after it, before a step is trained, puts back what was there before. `sweep` is the selection of a sweep.
    Of that nothing is put back once its tasks are started: a point may fail.

    With `source`, RUN@STEP, the run begins from that checkpoint of another.

    Raises a FleetError when the cluster doesn't get there.
    """
    inventory = cluster.inventory
    decision.check_source(source, run_name)
    decision.refuse_templates(sweep or program_args or {})
    decision.choose(run_name, program, {}, None)  # a wrong name is said before any host is asked
    asked = sweep or {"program": program, "program_args": program_args or {}}
    if named := asked.get("program"):
        points = (sweep or {}).get("sweep", {}).get("points", [])
        arguments = [name for given in (asked.get("program_args", {}), *points) for name in given]
        desk.find(inventory, named, list(dict.fromkeys(arguments)))
    verb = "sweep" if sweep else "restart-cluster" if restart else "start-cluster"
    release = desk.build(inventory)
    if not plan_only:
        cluster.keep_starts_away()
    short = ShortWay(cluster)
    before = cluster.observe(settings=True, looks=short.questions(), by_trainer=True)
    if before.unreachable or before.drains:
        desk.say(report.render_tasks(report.task_rows(inventory, before)))
        _agree_on_missing(inventory, desk, before.unreachable, allow_missing, before.drains)
    cluster.refuse_when_not_installed(before)
    if source is not None:
        origin = decision.find_source(source, cluster.list_runs())
        if program in (None, origin["program"]):
            program, kept = origin["program"], origin.get("program_args", {})
            program_args = {**kept, **(program_args or {})}
    if sweep:
        choice = _choose_sweep(cluster, before, sweep)
    else:
        choice = decision.choose(run_name, program, before.selection, before.run, inventory.run_name, program_args)
    if "sweep" in choice.selection:
        if not choice.new and (told := cluster.read_sweep()) and told["over"]:
            desk.say(describe_sweep(told))
            _answer_start(desk, verb, "finished before", sweep=told)
            failed = any(point["state"] == "failed" for point in told["points"])
            desk.say(
                "Try what failed again: fab sweep FILE"
                if failed
                else "For more, add points to the end of its file, then: fab sweep FILE"
            )
            return
    elif before.run and decision.is_finished(before.run, inventory) and not choice.new:
        if source not in (None, before.run.begun_from):
            raise OperatorMistake(
                f"run {before.run.run} is there already, is finished and did not begin from {source}: choose another "
                "--run NAME"
            )
        desk.say(report.render_summary(inventory, before.run))
        desk.say("It was finished before; start a new one with: fab start-cluster --run NAME")
        _answer_start(desk, verb, "finished before", run=before.run.as_json())
        return
    plan = make_plan(inventory, before, release, choice, restart)
    plan = replace(plan, by_ansible=short.judge(before.looks, plan.hosts))
    if not plan.by_ansible:
        desk = replace(desk, ship=short.ship)
    for note in list_notes(inventory):
        desk.say(note)
    desk.say(render_plan(plan))
    if plan_only:
        changes = _show_changes(desk, plan)
        _answer_start(desk, verb, "planned", plan=plan.as_json(), changes=changes)
        return
    try:
        plan, _ = _ship_to_those_there(desk, plan, STAGE, allow_missing)
        cluster.refuse_when_others_may_start()  # before the notes of another's start would be overwritten
        cluster.remember(plan.hosts)
    except BaseException:
        desk.say("nothing was stopped, switched or selected: what ran goes on")
        raise
    with Trail(cluster, desk, verb, settings=True) as trail:
        trail.begin(**_describe_choice(plan, before))
        begun_run = None
        try:
            # Ansible restarts what it finds stale by itself, and who asks for a restart wants new processes.
            _stop(cluster, desk, before, plan.stop, cluster.stop if plan.by_ansible or restart else cluster.park)
            plan, shipped = _ship_to_those_there(desk, plan, SWITCH, allow_missing)
            if (
                source is not None
                and run_name is not None
                and cluster.begin(run_name, source, program, program_args or {})
            ):
                begun_run = run_name
            if choice.write:
                cluster.select(choice.selection)
            ready = _observe_all(cluster, desk, plan.hosts)
            changed = _compare(cluster, desk, before, ready, shipped)
            cluster.refuse_when_not_configured(ready)
            # Asked only now: new code, or another choice, may be the mend.
            if ready.run_error:
                raise ready.run_error
            idle = [task for task in plan.tasks if ready.units[task.name].idle]
            begun, begun_run = desk.clock(), None  # a run that was started is kept, as each that fails
            if plan.drained:  # the coordinator may be on another host by now
                drains.tell_coordinator(cluster, drains.tasks_of(inventory, list(plan.drained)))
            cluster.start(plan.tasks)
        except BaseException:
            _put_back(cluster, desk, plan, before, begun_run)
            raise
        names = ", ".join(task.name for task in idle)
        desk.say(f"started {names}" if idle else "every task runs already")
        with _what_was_started_goes_on():
            if "sweep" in choice.selection:
                cluster.let_starts_in()
                trail.end()
                followed = _follow_sweep(cluster, desk, choice.selection["sweep"]["name"], detach)
                _answer_start(desk, verb, "finished" if followed else "training", plan=plan.as_json(), sweep=followed)
                return
            watch = _Watch(cluster, desk, ready.clocks[inventory.chief.host], begun, plan.hosts)
            try:
                try:
                    run = watch.until_trained(timeout)
                except (ClusterTrouble, OperatorMistake):
                    watch.progress.end()
                    if (changed or choice.write) and not watch.timed_out:
                        _put_back(cluster, desk, plan, before)
                    raise
                cluster.let_starts_in()
                trail.end(step=run.step)
                if detach:
                    desk.say(f"run {run.run} trains: {report.render_progress(run)}")
                    desk.say(report.render_tasks(report.task_rows(inventory, cluster.observe())))
                    _answer_start(desk, verb, "training", plan=plan.as_json(), run=run.as_json())
                    return
                run = watch.until_finished()
                seconds = desk.clock() - begun
                evaluated = inventory.evaluator not in plan.tasks or watch.until_evaluated(run)
            finally:
                watch.progress.end()
        last = watch.run or run
        desk.say(report.render_summary(inventory, last, seconds, watch.steps_per_second))
        _answer_start(
            desk,
            verb,
            "finished",
            plan=plan.as_json(),
            run=last.as_json(),
            seconds=round(seconds, 1),
            evaluated=evaluated,
        )
        if not evaluated:
            assert inventory.evaluator is not None
            raise ClusterTrouble(
                f"the last step isn't evaluated {EVALUATION_SECONDS:.0f} s after the end",
                cluster.trouble({inventory.evaluator: "no evaluation of the last checkpoint"}),
            )


def _describe_choice(plan: Plan, before: Observation) -> dict[str, Any]:
    """Say for the history what a start changes."""
    chosen = {key: plan.choice.selection[key] for key in ("run", "program") if key in plan.choice.selection}
    if sweep := plan.choice.selection.get("sweep"):
        chosen["sweep"] = sweep["name"]
    if not chosen and before.run:
        chosen["run"] = before.run.run
    was = before.releases.get(plan.inventory.chief.host)
    return {**chosen, "release": plan.release, "before": was, "without": list(plan.missing)}


def _answer_start(desk: Desk, verb: str, outcome: str, **known: Any) -> None:
    if desk.answers is not None:
        nothing = dict.fromkeys(("plan", "changes", "run", "sweep", "seconds", "evaluated"))
        desk.answer(verb, {"outcome": outcome, **nothing, **known})


@contextmanager
def _what_was_started_goes_on() -> Iterator[None]:
    """Say so to one who leaves with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(LEFT) from None


def show_sweep(cluster: Cluster, desk: Desk, name: str | None = None, as_json: bool = False) -> None:
    """Show how far a sweep is: the one of this name, the selected one, or the last."""
    told = cluster.read_sweep(name)
    if told is None:
        raise OperatorMistake(f"there is no sweep{f' {name}' if name else ''} yet: fab sweep FILE")
    if as_json:
        desk.answer("sweep", {"outcome": None, "sweep": told})
    else:
        desk.say(describe_sweep(told))


def _choose_sweep(cluster: Cluster, before: Observation, asked: Mapping[str, Any]) -> decision.Choice:
    chief = before.units.get(cluster.inventory.chief.name)
    known = cluster.read_sweep(asked["sweep"]["name"]) if before.run else None
    done = known and all(point["state"] == "finished" for point in known["points"])
    same = known and [point["program_args"] for point in known["points"]] == [
        {**asked.get("program_args", {}), **point} for point in asked["sweep"]["points"]
    ]
    if done and same and is_same(asked, before.selection):
        return decision.Choice(before.selection, write=False, new=False)
    runs = chief is not None and chief.up
    return decision.choose_sweep(asked, before.selection, runs, known, cluster.inventory.run_settings)


def _follow_sweep(cluster: Cluster, desk: Desk, name: str, detach: bool) -> dict[str, Any] | None:
    """Say what becomes of each point, then show the table, and return it; None of a sweep that is left to itself.

    Raises where the coordinator is down before the end.
    """
    if detach:
        desk.say(f"sweep {name} goes on by itself. Look: fab sweep --status. Stop it: fab stop-cluster")
        return None
    chief, evaluator = cluster.inventory.chief, cluster.inventory.evaluator
    progress = ProgressLine(desk.meanwhile or desk.out, clock=desk.clock)
    told: set[str] | None = None
    begun = heard = desk.clock()
    deadline = None
    try:
        while True:
            desk.sleep(UNITS_SECONDS)
            try:
                seen = cluster.observe([chief.host], new_is_enough=True)
                sweep = None if seen.unreachable else cluster.read_sweep(name)
            except HostsUnreachable as error:
                seen, sweep = Observation(unreachable=dict(error.reasons)), None
            if sweep is None:
                if desk.clock() - heard > SILENCE_SECONDS:
                    raise HostsUnreachable(seen.unreachable, "the sweep may go on unseen: fab sweep --status")
                continue
            heard = desk.clock()
            ended = {point["run"]: point for point in sweep["points"] if point["state"] in ("finished", "failed")}
            for run in [] if told is None else [run for run in ended if run not in told]:
                progress.keep(f"{run}: {ended[run]['state']}")
            told = set(ended)
            if sweep["over"]:
                deadline = deadline or desk.clock() + EVALUATION_SECONDS
                if evaluator is None or sweep["evaluated"] or desk.clock() > deadline:
                    break
            # systemd needs a moment from the request to the first sign of life.
            elif (health := seen.units[chief.name].health) is Health.FAILED or (
                health is Health.STOPPED and desk.clock() - begun > 2 * UNITS_SECONDS
            ):
                raise ClusterTrouble("", cluster.trouble({chief: f"is down, and sweep {name} is not over"}))
            said = report.render_progress(seen.run) if seen.run else "waiting"
            progress.show(f"{len(ended)} of {len(sweep['points'])} points have ended; {sweep['present']}: {said}")
    finally:
        progress.end()
    desk.say(describe_sweep(sweep))
    if evaluator is not None and not sweep["evaluated"]:
        desk.say("Not every point is evaluated yet; the evaluator goes on. Look: fab sweep --status")
    return sweep


def stop_cluster(cluster: Cluster, desk: Desk) -> None:
    """Stop and disable every task; what trains saves a checkpoint before the servers go.

    Raises HostsUnreachable after the others are stopped.
    """
    before = cluster.observe(new_is_enough=True)
    installed = [
        task
        for task in cluster.inventory.tasks
        if task.name in before.units and before.units[task.name].health is not Health.ABSENT
    ]
    with Trail(cluster, desk, "stop-cluster") as trail:
        trail.begin(run=before.run.run if before.run else None)
        errors: list[FleetError] = []
        try:
            _stop(cluster, desk, before, [task for task in installed if task.trains])
        except FleetError as error:
            errors.append(error)
        others = [task for task in installed if not task.trains and before.units[task.name].health not in DOWN]
        if others:
            desk.say(f"stopping {', '.join(task.name for task in others)}")
        after = cluster.take_down(others, installed)
        if after.failed:
            errors.append(
                ClusterTrouble("\n".join(f"{host}: systemctl failed: {why}" for host, why in after.failed.items()))
            )
        rows = report.task_rows(cluster.inventory, after)
        desk.say(report.render_tasks(rows))
        if after.run:
            desk.say(report.render_run(after.run))
        if desk.answers is not None:
            desk.answer("stop-cluster", status_record(cluster.inventory, after))
        if after.unreachable:
            raise HostsUnreachable(after.unreachable, "What runs there goes on; run `fab stop-cluster` again")
        if errors:
            raise errors[0]
        _refuse_running(cluster, after)
        trail.end(step=after.run.step if after.run else None)


def show_status(cluster: Cluster, desk: Desk, as_json: bool = False, deep: bool = False) -> None:
    """Show each task and the run; raise when a task that should run doesn't.

    `deep` has each host compare its code and its environment, byte by byte, with what was installed there.
    """
    observation = cluster.observe(running=True)
    inventory = cluster.inventory
    rows = report.task_rows(inventory, observation)
    damage = _look_deeply(inventory, desk, observation) if deep else {}
    if as_json:
        desk.answer("status", status_record(inventory, observation) | ({"damage": dict(damage)} if deep else {}))
    elif is_terminal(desk.out):
        from fleet.view import console_of, draw  # its library takes longer than all that a pipe needs

        console_of(desk.out).print(draw(inventory, observation))
    else:
        desk.say(report.render_tasks(rows))
        desk.say(report.render_release(observation))
        desk.say(report.render_run(observation.run))
        if sweep := observation.selection.get("sweep"):
            desk.say(f"a point of sweep {sweep['name']}, which has {len(sweep['points'])}: fab sweep --status")
        if account := report.render_account(observation.run):
            desk.say(account)
    wrong = [row for row in rows if row["trouble"] and row["state"] != "unreachable"]
    # One that is drained may be off.
    lost = {host: why for host, why in observation.unreachable.items() if host not in observation.drains}
    said = ", ".join(f"{row['task']} on {row['host']}" for row in wrong)
    damaged = [f"{host}: {line}" for host, told in damage.items() for line in told.splitlines()]
    if lost:
        more = [f"and not as they should be: {said}"] if said else []
        raise HostsUnreachable(lost, "\n".join(more + damaged))
    cluster.refuse_when_not_installed(observation)
    cluster.refuse_when_not_configured(observation)
    if observation.run_error:
        raise observation.run_error
    if wrong:
        first = wrong[0]["task"]
        damaged.insert(0, f"not as they should be: {said} (look: fab logs --task {first})")
    if damaged:
        raise ClusterTrouble("\n".join(damaged))
    if deep and not as_json:
        desk.say(f"code and environment on {len(observation.releases)} hosts are as they were installed")


def status_record(
    inventory: Inventory, observation: Observation, quiet: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return what `--json` says of the cluster."""
    return {
        "inventory": inventory.source,
        "releases": observation.releases,
        "tasks": report.task_rows(inventory, observation, quiet),
        "run": observation.run.as_json() if observation.run else None,
        "unreachable": dict(observation.unreachable)
        | {host: f"no answer for {render_duration(seconds)}" for host, seconds in (quiet or {}).items()},
    }


def _look_deeply(inventory: Inventory, desk: Desk, observation: Observation) -> Mapping[str, str]:
    """Have the hosts that answered look at every byte; returns what is wrong by host."""
    if not observation.releases:
        return {}
    progress = ProgressLine(sys.stderr, clock=desk.clock)  # standard output may be JSON
    try:
        return desk.look(inventory, list(observation.unreachable), progress)
    finally:
        progress.end()


def show_logs(
    cluster: Cluster, desk: Desk, task_name: str | None, lines: int | None, follow: bool, chosen: Chosen = EVERY_LINE
) -> None:
    """Show the journal of one task, or of all with the task's name before each line.

    Without `lines` it is the last 20 of each task; where a run, a time or a pattern was chosen, the last 1000.
    """
    inventory = cluster.inventory
    if lines is not None and lines < 0:
        raise OperatorMistake(f"--lines {lines}: expected a number of lines such as 50")
    most = lines if lines is not None else LINES if chosen == EVERY_LINE else CHOSEN_LINES
    tasks = list(inventory.tasks) if task_name is None else [inventory.task(task_name)]
    width = max(len(task.name) for task in tasks)
    number: Counter[str] = Counter()

    def show(entry: Entry) -> None:
        number[entry.task] += 1
        if desk.answers is not None:
            desk.answer("logs", entry.as_json(), on_a_line=True)
            return
        for line in entry.message.splitlines() or [""]:
            desk.say(line if task_name else f"{entry.task.ljust(width)} | {line}")

    if follow:
        cluster.follow_journal(tasks, most, show, chosen)
        return
    cluster.read_journal(tasks, most, show, chosen)
    full = [task for task, count in number.items() if count >= most]
    if lines is None and full and chosen != EVERY_LINE:
        put(sys.stderr, f"these are the last {most} lines of {', '.join(full)}; for more: --lines {10 * most}")


def open_tensorboard(cluster: Cluster, desk: Desk, port: int) -> None:
    """Lead a port of this machine to TensorBoard until the operator leaves: strangers don't reach it."""
    url = cluster.inventory.tensorboard_url
    if url is None:
        raise OperatorMistake(
            "group tensorboard is empty; expected a host that serves TensorBoard. Put one there, and run "
            "`ansible-playbook site.yml`"
        )
    address, _, remote_port = url.removeprefix("http://").rpartition(":")
    chief = cluster.inventory.chief.host
    with cluster.hosts.tunnel(chief, port, address.strip("[]"), int(remote_port)) as is_there:
        if desk.answers is not None:
            desk.answer("tensorboard", {"url": f"http://localhost:{port}"}, on_a_line=True)
        desk.say(f"TensorBoard is at http://localhost:{port} until Ctrl-C")
        while is_there():
            desk.sleep(1.0)
    raise HostsUnreachable({chief: "the connection was lost, and the tunnel with it"})


def show_runs(cluster: Cluster, desk: Desk, as_json: bool = False) -> None:
    """Show every run below the shared path."""
    say_rows(desk, "runs", cluster.list_runs(), as_json, report.render_runs, "no run yet: fab start-cluster")


def show_checkpoints(cluster: Cluster, desk: Desk, run: str | None = None, as_json: bool = False) -> None:
    """Show a run's checkpoints and why each is kept."""
    decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
    found = cluster.list_checkpoints(run)
    say_rows(desk, "checkpoints", found, as_json, report.render_checkpoints, "no checkpoint yet")


def make_report(
    cluster: Cluster,
    desk: Desk,
    runs: Sequence[str],
    out: Path | None = None,
    then: Callable[[str], object] | None = None,
    as_json: bool = False,
) -> None:
    """Write the page of the chosen run, or of these side by side, to a file here; `then` is given its URI."""
    for run in runs:
        decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
    if out is not None:
        _refuse_place(out)
    made = cluster.make_report(runs)
    place = out or Path(f"report-{'-'.join(made['runs'][:3])}.html")
    try:
        place.write_text(made["html"], encoding="utf-8")
    except OSError as error:
        raise OperatorMistake(f"{place} can't be written ({error.strerror}): name another file with --out") from error
    size = place.stat().st_size
    if as_json:
        desk.answer("report", {"runs": made["runs"], "report": str(place.resolve()), "size": size})
    else:
        desk.say(f"{place}: {' and '.join(made['runs'])}, {size / 1e6:.1f} MB, needs no server")
    if then is not None:
        then(place.resolve().as_uri())


def _refuse_place(out: Path) -> None:
    """Raise OperatorMistake where no file can be written, before any host is asked."""
    try:
        control_path(str(out))
        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(f"it is a directory, or {out.parent} is none")
    except ValueError as error:
        raise OperatorMistake(
            f"--out is {show(str(out))}: {error}; expected a file to write, such as --out report.html"
        ) from error


def say_rows(
    desk: Desk,
    verb: str,
    rows: list[dict[str, Any]],
    as_json: bool,
    render: Callable[[list[dict[str, Any]]], str],
    none: str,
) -> None:
    """Print rows as JSON or as a table, and say it where there are none."""
    if as_json:
        desk.answer(verb, {verb: rows})
    else:
        desk.say(render(rows) if rows else none)


def export_run(cluster: Cluster, desk: Desk, run: str | None = None, as_json: bool = False) -> None:
    """Export the newest checkpoint of a run that has ended."""
    decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
    found = cluster.export_run(run)
    if as_json:
        desk.answer("export", found)
        return
    place = f"{cluster.inventory.chief.host}:{found['export']}"
    desk.say(f"exported step {found['step']} of {found['run']} to {place}")


class _Watch:
    """Look at a started cluster until it is where the operator wants it."""

    def __init__(self, cluster: Cluster, desk: Desk, started: float, begun: float, hosts: Sequence[str]) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._desk = desk
        self._inventory = cluster.inventory
        self._started = started  # by the clock of the chief's host, which stamps the run's state too
        self._begun = begun
        self._restarts: dict[str, tuple[int | None, int]] = {}  # by task: the last step, the restarts before it
        self._first_step: int | None = None
        self._first_step_at = begun
        self._last_step: int | None = None
        self._last_step_at = begun
        self._heard = begun
        self._units_at: float | None = None
        self._units_took = 0.0
        self._took = 0.0  # the last look at the run
        self._trained = False
        self.timed_out = False
        self._observation = Observation()
        self.run: Run | None = None
        self.progress = ProgressLine(desk.meanwhile or desk.out, clock=desk.clock)

    def until_trained(self, timeout: float) -> Run:
        """Wait for the first new step; raise with what is wrong when the timeout passes without one."""
        while True:
            run = self._look()
            if run and (run.state == "finished" or self._has_trained(run)):
                self._trained = True
                return run
            if self._desk.clock() - self._begun > timeout:
                self.timed_out = True
                raise self._describe_timeout(timeout)
            self.progress.show(
                report.render_progress(run)
                if run and run.state == "training"
                else report.render_waiting(self._inventory, self._observation)
            )
            self._rest()

    def until_finished(self) -> Run:
        while True:
            run = self._look()
            if run:
                if run.state == "finished":
                    return run
                self.progress.show(report.render_progress(run, self._desk.clock() - self._last_step_at))
            self._rest()

    def until_evaluated(self, run: Run) -> bool:
        """Wait for the evaluation of the last step; False when none comes in time."""
        end = self._desk.clock() + EVALUATION_SECONDS
        while self._desk.clock() < end:
            latest = self._look() or run
            if decision.is_evaluated(latest):
                return True
            self.progress.show(f"step {run.step}: finished, waiting for its evaluation")
            self._rest()
        return False

    def _rest(self) -> None:
        """Wait until the next look: a host that is slow to answer is asked less often."""
        self._desk.sleep(max(RUN_SECONDS, self._took))

    @property
    def steps_per_second(self) -> float | None:
        """The pace over the whole of what was watched."""
        if self._first_step is None or self._last_step is None or self._last_step_at <= self._first_step_at:
            return None
        return (self._last_step - self._first_step) / (self._last_step_at - self._first_step_at)

    def _look(self) -> Run | None:
        """Ask for the run, now and then for all units; return the run once this start's coordinator has spoken."""
        now = self._desk.clock()
        pause = max(UNITS_SECONDS, UNITS_SHARE * self._units_took) if self._trained else UNITS_SECONDS
        whole = self._units_at is None or now - self._units_at >= pause
        chief = self._inventory.chief
        seen = self._cluster.observe(self._hosts if whole else [chief.host], new_is_enough=True)
        self._took = self._desk.clock() - now
        if whole:
            self._units_at = self._desk.clock()
            self._units_took = self._took
            self._observation = seen
        if chief.host in seen.unreachable:
            if now - self._heard > SILENCE_SECONDS:
                raise HostsUnreachable(seen.unreachable, "the training may go on without it being watched: fab status")
            return None
        self._heard = now
        if seen.run_error:
            raise seen.run_error
        run = seen.run
        fresh = run if run and run.updated is not None and run.updated >= self._started else None
        if fresh and fresh.step is not None and fresh.step != self._last_step:
            self._last_step = fresh.step
            self._last_step_at = now
        # systemd needs a moment from the request to the first sign of life.
        stopped = seen.units[chief.name].health is Health.STOPPED and now - self._begun > 2 * UNITS_SECONDS
        self._refuse_trouble(seen, fresh, stopped)
        if run and run.state == "finished" and stopped:
            self._refuse_too_short(run)
            fresh = run  # a run that was complete before: its coordinator has nothing to write
        if fresh:
            self.run = fresh
        return fresh

    def _refuse_trouble(self, seen: Observation, run: Run | None, stopped: bool) -> None:
        before: dict[str, int] = {}
        for name, unit in seen.units.items():
            step, restarts = self._restarts.get(name, (None, unit.restarts))
            # Restarts between steps are recovery. A counter that went back was reset: systemd counts from the last
            # start by hand.
            before[name] = unit.restarts if step != self._last_step else min(restarts, unit.restarts)
            self._restarts[name] = self._last_step, before[name]
        tasks = [task for task in self._inventory.tasks if task.name in seen.units]
        found = decision.find_troubles(tasks, seen.units, before, run)
        chief = self._inventory.chief
        if run and run.state == "failed":
            found.setdefault(chief, run.message or "the run failed")
        if found:
            raise ClusterTrouble("", self._cluster.trouble(found))
        if stopped and not (seen.run and seen.run.state == "finished"):
            where = f" at step {seen.run.step}" if seen.run and seen.run.step is not None else ""
            raise ClusterTrouble(f"{chief.name} on {chief.host} was stopped{where} while fab was watching")

    def _refuse_too_short(self, run: Run) -> None:
        """Raise when the coordinator leaves a run that ended before the inventory's last step."""
        if run.step is not None and run.step < self._inventory.steps:
            what = (
                f"ended without training: it finds run {run.run} finished at step {run.step}, but the inventory wants "
                f"{self._inventory.steps} steps. Compare trainer_run with /etc/trainer/run.json there"
            )
            raise ClusterTrouble("", self._cluster.trouble({self._inventory.chief: what}))

    def _has_trained(self, run: Run) -> bool:
        if run.state != "training" or run.step is None:
            return False
        if self._first_step is None:
            self._first_step = run.step
            self._first_step_at = self._desk.clock()
        # The coordinator tells its first step at once, and the step's number each log_seconds.
        told = any(each.get("event") == "training" and each.get("time", 0) >= self._started for each in run.events)
        return told or run.step > self._first_step

    def _describe_timeout(self, timeout: float) -> FleetError:
        seen = self._cluster.observe(self._hosts)
        late: dict[Task, str] = {}
        for task in self._inventory.tasks:
            unit = None if task.host in seen.drains else seen.units.get(task.name)
            if unit and unit.health is not Health.RUNNING:
                late[task] = f"is {unit.active} ({unit.sub})"
        if not late and self._inventory.chief.name in seen.units:
            late[self._inventory.chief] = f"runs; {report.render_run(seen.run)}"
        message = f"no step was trained in {timeout:.0f} s; the tasks go on trying (fab stop-cluster stops them)"
        trouble = ClusterTrouble(message, self._cluster.trouble(late))
        return HostsUnreachable(seen.unreachable, str(trouble)) if seen.unreachable else trouble


def _agree_on_missing(
    inventory: Inventory, desk: Desk, missing: Mapping[str, str], allowed: bool, drained: Collection[str] = ()
) -> None:
    """Raise unless a start may go on without hosts that don't answer, and without those that were drained.

    It may where each job has its minimum, and the operator says so: with cluster_minimum, with `allowed`, or when asked
    on a terminal. Of a drained host the operator has said so already.
    """
    shortages = find_shortages(inventory, {*missing, *drained})
    if shortages and not missing:
        raise OperatorMistake(
            f"nothing was started: {'; '.join(shortages)}, and {', '.join(drained)} is drained. Bring a host back: "
            f"fab undrain {next(iter(drained))}"
        )
    missing = {host: why for host, why in missing.items() if host not in drained or shortages}
    if not missing:
        return
    if shortages:
        raise HostsUnreachable(
            missing,
            f"Nothing was started: {'; '.join(shortages)}. Bring the host back, take it out of the inventory and run "
            "`ansible-playbook site.yml`, or lower cluster_minimum",
        )
    away = ", ".join(task.name for task in inventory.tasks if task.host in missing)
    if allowed or chosen_minimum(inventory):
        return
    if not desk.ask(f"{', '.join(missing)} can't be reached. Start without {away}? [y/N] "):
        raise HostsUnreachable(
            missing,
            f"Nothing was started. Bring the host back, or start without {away}: --allow-missing, or cluster_minimum "
            "in the inventory",
        )


def _observe_all(cluster: Cluster, desk: Desk, hosts: Sequence[str]) -> Observation:
    """Observe the hosts that take part; show what is known and raise when one is unreachable."""
    observation = cluster.observe(hosts, settings=True, by_trainer=True)
    if observation.unreachable:
        desk.say(report.render_tasks(report.task_rows(cluster.inventory, observation)))
        raise HostsUnreachable(
            observation.unreachable, "It answered before. Start again when it is back, or without it"
        )
    return observation


def _ship(desk: Desk, plan: Plan, playbooks: Sequence[str], check: bool = False) -> Shipped:
    """Run playbooks on the hosts that take part, and show meanwhile what they do."""
    shipment = Shipment(
        plan.inventory,
        playbooks,
        plan.release,
        plan.choice.selection,
        untried=plan.untried,
        without=list(plan.missing),
        check=check,
    )
    progress = ProgressLine(desk.meanwhile or desk.out, clock=desk.clock)
    try:
        return desk.ship(shipment, progress)
    finally:
        progress.end()


def _ship_to_those_there(desk: Desk, plan: Plan, playbooks: Sequence[str], allowed: bool) -> tuple[Plan, Shipped]:
    """Ship; go on without a host that dies meanwhile, where a start may. Return the plan without it."""
    while True:
        try:
            return plan, _ship(desk, plan, playbooks)
        except HostsUnreachable as error:
            lost = {host: reason for host, reason in error.reasons.items() if host in plan.hosts}
            if not lost:
                raise
            _agree_on_missing(plan.inventory, desk, {**plan.missing, **lost}, allowed, plan.drained)
            plan = plan.without(lost)
            desk.say(f"going on without {', '.join(lost)}")


def _show_changes(desk: Desk, plan: Plan) -> Mapping[str, Sequence[str]]:
    """Say what the switch would change on the hosts, and return it.

    Nothing is done, and nothing is shipped that could be proven.
    """
    changes = _ship(desk, plan, SWITCH, check=True).changes
    for task, hosts in changes.items():
        desk.say(f"  change  {task}: {', '.join(hosts)}")
    desk.say("nothing was done, and nothing is proven yet: that needs the release on the hosts")
    return changes


def _compare(cluster: Cluster, desk: Desk, before: Observation, after: Observation, shipped: Shipped) -> bool:
    """Say what the switch to a release and its settings changed; return whether that is anything."""
    recaps = shipped.recaps
    changed = [host for host, recap in recaps.items() if recap.changed and host in cluster.inventory.hosts]
    moved = {host for host, release in after.releases.items() if release != before.releases[host]}
    configured = {host for host, settings in after.settings.items() if settings != before.settings[host]}
    touched = {*changed, *moved, *configured}
    if not after.release:
        raise ClusterTrouble(f"after shipping, the hosts' code differs: {report.render_release(after)}")
    what = " and ".join(name for name, hosts in (("code", moved), ("settings", configured)) if hosts)
    said = f"shipped to {len(touched)} of {len(after.releases)} hosts" + (f" ({what})" if what else "")
    desk.say(f"release {after.release}: {said if touched else 'unchanged'}")
    return bool(moved or configured)


def _put_back(cluster: Cluster, desk: Desk, plan: Plan, before: Observation, begun_run: str | None = None) -> None:
    """Bring back the run, the release, the files and what ran; say what can't be, and leave the error to the caller.

    `begun_run` was made of a checkpoint and not started: without it, its name can be given again.
    Ctrl-C is not heeded meanwhile: half of it put back would be neither the old nor the new.
    """
    with undisturbed():
        _put_all_back(cluster, desk, plan, before, begun_run)


def _put_all_back(cluster: Cluster, desk: Desk, plan: Plan, before: Observation, begun_run: str | None) -> None:
    ran = [task.name for task in cluster.inventory.tasks if task.name in before.units and before.units[task.name].up]
    desk.say("the start is broken off: what was there before is put back")
    seen = cluster.observe(plan.hosts, new_is_enough=True)
    steps: list[tuple[str, Callable[[], None]]] = [
        ("stop the new tasks", lambda: _stop(cluster, desk, seen)),
        ("put back release, settings and units", lambda: cluster.put_back(plan.hosts)),
        (
            "name the release to the tasks",
            lambda: cluster.tell_release(before.releases[plan.inventory.chief.host] or ""),
        ),
        ("start what ran before", lambda: cluster.start_again(plan.hosts)),
    ]
    if plan.choice.write:
        steps.insert(2, ("select what was selected before", lambda: cluster.select(before.selection)))
    removing = f"remove run {begun_run}, which had begun"
    if begun_run is not None:
        steps.append((removing, lambda: cluster.forget(begun_run)))
    failed = False
    away: dict[str, str] = dict(seen.unreachable)
    for what, step in steps:
        if failed and what == removing:
            desk.say(f"run {begun_run} is kept, since it may be selected still")
            continue
        try:
            step()
        except FleetError as error:
            failed = True
            if isinstance(error, HostsUnreachable):
                away.update(error.reasons)
            desk.say(f"could not {what}: {error}")
    if failed:
        desk.say("not everything was put back: see above, and fab status")
        if gone := [host for host in plan.hosts if host in away]:
            release = before.releases.get(gone[0]) or "none"
            desk.say(
                f"{', '.join(gone)} may have the new release, settings and units. When it is back, run `fab "
                f"start-cluster` again; from the checkout of release {release}, to have what was there before"
            )
    else:
        chosen = f"run {before.run.run}" if before.run else "no run"
        releases = ", ".join(sorted({release or "none" for release in before.releases.values()}))
        again = f"started again: {', '.join(ran)}" if ran else "nothing ran, and nothing was started"
        desk.say(f"put back: {chosen}, release {releases}; {again}")


def _stop(
    cluster: Cluster,
    desk: Desk,
    seen: Observation,
    tasks: Sequence[Task] | None = None,
    stop: Callable[[Sequence[Task]], None] | None = None,
) -> None:
    """Stop tasks (every one that isn't down when none are given): those that train, the evaluator, then the servers.

    `stop` is how: the cluster's own `stop`, or `park`.

    What trains stops at once: each of several members that train in step saves and stops when one of them is asked to,
    and systemd starts again those that it wasn't told to stop.
    """
    candidates = [
        task
        for task in (cluster.inventory.tasks if tasks is None else tasks)
        if task.name in seen.units and seen.units[task.name].health not in DOWN
    ]
    errors: list[FleetError] = []
    training = [task for task in candidates if task.trains]
    evaluating = [task for task in candidates if task.job == "evaluator"]
    serving = [task for task in candidates if task.server]
    for stopping in filter(None, (training, evaluating, serving)):
        saving = " (a checkpoint is saved first)" if stopping is training else ""
        desk.say(f"stopping {', '.join(task.name for task in stopping)}{saving}")
        try:
            (stop or cluster.stop)(stopping)
        except FleetError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _refuse_running(cluster: Cluster, after: Observation) -> None:
    found: dict[Task, str] = {}
    for task in cluster.inventory.tasks:
        unit = after.units[task.name]
        if unit.health not in (Health.STOPPED, Health.ABSENT):
            found[task] = unit.describe_failure() if unit.health is Health.FAILED else f"is still {unit.active}"
    if found:
        raise ClusterTrouble("", cluster.trouble(found))

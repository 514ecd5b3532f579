"""`fab start-cluster`, `fab restart-cluster` and the start of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.actions.console import Console
from fleet.actions.exclusive import begin_exclusively
from fleet.actions.shipping import (
    BOTH_SECONDS,
    NOTHING_DONE,
    agree_on_missing,
    compare,
    save_state,
    select_and_observe,
    ship_to_present,
    show_plan,
)
from fleet.actions.start_rollback import StartRollback
from fleet.actions.stopping import stop_tasks
from fleet.actions.warm import cool, cooled
from fleet.actions.watch import EVALUATION_SECONDS, StartWatch
from fleet.errors import ClusterTrouble, OperatorMistake
from fleet.hosts import drains
from fleet.hosts.cluster import Cluster
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.history import DONE, Trail
from fleet.hosts.observation import Observation
from fleet.hosts.run import Run
from fleet.planning import decision
from fleet.planning.decision import RunChoice
from fleet.planning.plan import Plan, make_plan, render_plan
from fleet.rollout.release import STAGE, SWITCH
from fleet.rollout.short_way import ShortWay
from fleet.site.inventory import Inventory, list_notes
from fleet.site.topology import Task
from fleet.status import status_text
from fleet.verbs.sweep import choose_sweep, follow_sweep
from trainer.telemetry.queue import describe_queue
from trainer.telemetry.sweep import describe_sweep

LEFT = "left; what was started goes on. Look: fab status. Stop it: fab stop-cluster"


@dataclass(frozen=True)
class StartRequest:
    """What the operator asks of a start."""

    run_name: str | None = None
    program: str | None = None
    detach: bool = False
    """Leave once a step is trained, instead of following until the run is finished."""
    timeout: float = 300.0
    """Seconds to wait for the first trained step."""
    restart: bool = False
    plan_only: bool = False
    allow_missing: bool = False
    source: str | None = None
    """RUN@STEP, the checkpoint of another run that this one begins from."""
    program_args: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, Any] | None = None
    """The selection of a sweep. Once its tasks are started, nothing is put back: a point may fail."""

    queue: bool = False
    """Go on with the queue, whatever is selected."""
    reason: str | None = None

    @property
    def verb(self) -> str:
        return "sweep" if self.sweep else "restart-cluster" if self.restart else "start-cluster"


@dataclass(frozen=True)
class _Proven:
    """What is to be done, and was proven beside what runs."""

    before: Observation
    plan: Plan
    """Without the hosts that were lost meanwhile."""
    console: Console
    """It ships the plan's way."""
    request: StartRequest
    """With what it takes from another run."""


@dataclass(frozen=True)
class _Started:
    """What a start has done when the tasks are asked to run."""

    plan: Plan
    ready: Observation
    """How the hosts were just before."""
    begun: float
    idle: Sequence[Task]
    """Those that did not run before."""
    changed: bool
    """Whether code or settings of a host did."""


def start_cluster(cluster: Cluster, console: Console, request: StartRequest) -> None:
    """Plan, ship beside what runs and prove it there; then stop, select, start, and watch.

    It watches until a step is trained (`detach`) or the run is finished. What fails before the proof changes nothing;
    what fails after it, before a step is trained, puts back what was there before.

    Raises a FleetError when the cluster doesn't get there.
    """
    inventory = cluster.inventory
    _check(inventory, console, request)
    release = console.build(inventory)
    begin_exclusively(cluster, console, "start", request.plan_only)
    short = ShortWay(cluster)
    with cooled(cluster, [] if request.plan_only else [inventory.chief], short.start) as warm:
        proven = _plan_and_prove(cluster, console, request, release, short, warm)
        if proven is None:
            return
        before, plan, console, request = proven.before, proven.plan, proven.console, proven.request
        rollback = StartRollback(cluster, console, plan, before)
        with Trail(cluster, console, request.verb, request.reason, settings=True) as trail:
            save_state(cluster, console, trail, plan, before)
            started = _switch_and_start(cluster, console, request, before, rollback)
            warm.clear()  # not before the rollback has begun to watch: Ctrl-C may come while the history is written
            _follow(cluster, console, request, started, rollback, trail)


def _plan_and_prove(
    cluster: Cluster, console: Console, request: StartRequest, release: str, short: ShortWay, warm: list[Task]
) -> _Proven | None:
    """Look at the hosts, plan, and prove that; None where nothing is to be done.

    `warm` lists the tasks that may import TensorFlow meanwhile.
    """
    inventory = cluster.inventory
    looks = short.questions(warm=not request.plan_only)
    before = cluster.observe(settings=True, looks=looks)
    warm[:] = [task for task in warm if before.looks.get(task.host, {"warm": True})["warm"]]  # or its answer is lost
    reject_foreign(inventory, before, inventory.hosts)
    if before.unreachable or before.drains:
        console.print(status_text.render_tasks(status_text.task_rows(inventory, before)))
        agree_on_missing(inventory, console, before.unreachable, request.allow_missing, before.drains)
    cluster.reject_when_not_installed(before)
    request = _with_program_of_source(cluster, request)
    choice = _choose(cluster, before, request)
    if _was_finished(cluster, console, request, before, choice):
        return None
    plan = make_plan(inventory, before, release, choice, request.restart)
    plan = replace(plan, by_ansible=short.judge(before.looks, plan.hosts))
    if not plan.by_ansible:
        console = replace(console, ship=short.ship)
    for note in list_notes(inventory):
        console.print(note)
    console.print(render_plan(plan))
    if request.plan_only:
        _answer(console, request, "planned", **show_plan(cluster, console, before, plan))
        return None
    # What Ansible starts is new, and what is left out stays down.
    cool(cluster, [task for task in warm if plan.by_ansible or task not in plan.tasks], short.start)
    warm[:] = plan.tasks
    return _Proven(before, _prove(cluster, console, request, plan), console, request)


def _check(inventory: Inventory, console: Console, request: StartRequest) -> None:
    """Raise OperatorMistake for what is wrong with a request, before any host is asked."""
    sweep = request.sweep or {}
    decision.check_source(request.source, request.run_name)
    if request.queue and (request.run_name or request.program or request.program_args):
        raise OperatorMistake("--queue goes on with what waits, and --run, --program and --set name a run: choose one")
    decision.check_names(request.run_name, request.program)
    check_program(inventory, console, sweep or {"program": request.program, "program_args": request.program_args})


def check_program(inventory: Inventory, console: Console, asked: Mapping[str, Any]) -> None:
    """Raise OperatorMistake for a run's or a sweep's choice that this checkout can't train, before a host is asked."""
    decision.reject_templates(asked)
    decision.check_names(asked.get("run"), asked.get("program"))
    if named := asked.get("program"):
        sweep = asked.get("sweep", {})
        given = (asked.get("program_args", {}), *sweep.get("points", []), sweep.get("search", {}).get("parameters", {}))
        arguments = [name for each in given for name in each]
        console.check_program(inventory, named, list(dict.fromkeys(arguments)))


def _with_program_of_source(cluster: Cluster, request: StartRequest) -> StartRequest:
    """Return the request with the program and the parameters of the run whose checkpoint it begins from."""
    if request.source is None:
        return request
    runs = cluster.list_runs()
    origin = decision.find_source(request.source, runs)
    if request.run_name is not None:
        decision.reject_other_source(request.run_name, request.source, runs, cluster.inventory.run_settings)
    if request.program not in (None, origin["program"]):
        return request
    arguments = {**origin.get("program_args", {}), **request.program_args}
    return replace(request, program=origin["program"], program_args=arguments)


def _choose(cluster: Cluster, before: Observation, request: StartRequest) -> RunChoice:
    if request.sweep:
        return choose_sweep(cluster, before, request.sweep)
    if request.queue:
        return _choose_queue(cluster, before)
    return decision.choose(
        request.run_name,
        request.program,
        before.selection,
        before.run,
        cluster.inventory.run_name,
        request.program_args,
    )


def _choose_queue(cluster: Cluster, before: Observation) -> RunChoice:
    if not cluster.ask_queue("list", [])["entries"]:
        raise OperatorMistake("the queue is empty: add a run with fab queue-add RUN")
    selected = "queue" in before.selection
    return RunChoice(before.selection if selected else {"queue": {}}, write=not selected, new=not selected)


def _was_finished(
    cluster: Cluster, console: Console, request: StartRequest, before: Observation, choice: RunChoice
) -> bool:
    """Say so where nothing is left to do for the choice, and return whether that is so."""
    if "queue" in choice.selection:
        return _queue_is_over(cluster, console, request)
    if choice.new:
        return False
    if "sweep" in choice.selection:
        return _sweep_was_finished(cluster, console, request)
    run = before.run
    if run is None or not decision.is_finished(run, cluster.inventory):
        return False
    console.print(status_text.render_summary(cluster.inventory, run))
    console.print("It was finished before; start a new one with: fab start-cluster --run NAME")
    _answer(console, request, "finished before", run=run.as_json())
    return True


def _queue_is_over(cluster: Cluster, console: Console, request: StartRequest) -> bool:
    queue = cluster.ask_queue("list", [])
    if not queue["over"]:
        return False
    console.print(describe_queue(queue))
    console.print("nothing is left to train, and the cluster stays idle. Add a run: fab queue-add RUN")
    _answer(console, request, "finished before")
    return True


def _sweep_was_finished(cluster: Cluster, console: Console, request: StartRequest) -> bool:
    sweep = cluster.read_sweep()
    if not sweep or not sweep["over"]:
        return False
    console.print(describe_sweep(sweep))
    _answer(console, request, "finished before", sweep=sweep)
    failed = any(point["state"] == "failed" for point in sweep["points"])
    console.print(
        "Try what failed again: fab sweep FILE"
        if failed
        else "For more, add points to the end of its file, or raise trials of a search, then: fab sweep FILE"
    )
    return True


def _prove(cluster: Cluster, console: Console, request: StartRequest, plan: Plan) -> Plan:
    """Ship beside what runs and prove it there; return the plan without the hosts that were lost meanwhile."""
    try:
        return ship_to_present(console, plan, STAGE, request.allow_missing)[0]
    except BaseException:
        console.print(NOTHING_DONE)
        raise


def _switch_and_start(
    cluster: Cluster, console: Console, request: StartRequest, before: Observation, rollback: StartRollback
) -> _Started:
    """Stop what must be, switch to the release and the choice, and start every task; or put back what was there."""
    with rollback:
        plan = rollback.plan
        # Ansible restarts what it finds stale by itself, and a restart is for new processes.
        stop = cluster.stop if plan.by_ansible or request.restart else cluster.park
        stop_tasks(cluster, console, before, plan.stop, stop)
        plan, shipped = ship_to_present(console, plan, SWITCH, request.allow_missing)
        rollback.plan = plan
        if request.source is not None and request.run_name is not None:
            begins = cluster.begin(request.run_name, request.source, request.program, request.program_args)
            rollback.begun_run = request.run_name if begins else None
        ready = select_and_observe(cluster, console, plan)
        changed = compare(cluster, console, before, ready, shipped)
        cluster.reject_when_not_configured(ready)
        # Asked only now: new code, or another choice, may be the fix.
        if ready.run_error:
            raise ready.run_error
        idle = [task for task in plan.tasks if ready.units[task.name].idle]
        begun = console.clock()
        rollback.begun_run = None  # a run that was started is kept, as each that fails
        if plan.drained:  # the coordinator may be on another host by now
            drains.announce_drain(cluster, drains.tasks_of(cluster.inventory, list(plan.drained)))
        cluster.start(plan.tasks)
    return _Started(plan, ready, begun, idle, changed)


def _follow(
    cluster: Cluster, console: Console, request: StartRequest, started: _Started, rollback: StartRollback, trail: Trail
) -> None:
    """Watch what was started for as long as the request wants, and say what came of it."""
    plan = started.plan
    names = ", ".join(task.name for task in started.idle)
    console.print(f"started {names}" if names else "every task runs already")
    with _what_was_started_goes_on():
        if {"sweep", "queue"} & set(plan.choice.selection):
            _follow_several(cluster, console, request, plan, trail)
            return
        chief = cluster.inventory.chief
        watch = StartWatch(cluster, console, started.ready.clocks[chief.host], started.begun, plan.hosts)
        try:
            run = _until_trained(watch, request, started, rollback)
            cluster.release_start_lock()
            if request.detach:
                _say_that_it_trains(cluster, console, request, plan, run, trail)
                return
            trail.end(step=run.step)
            run = watch.until_finished()
            if run.state != "finished":
                console.print(f"run {run.run} is trained no more, and another one is. Look: fab status, fab queue")
                _answer(console, request, "training", plan=plan.as_json(), run=run.as_json())
                return
            seconds = console.clock() - started.begun
            evaluated = cluster.inventory.evaluator not in plan.tasks or watch.until_evaluated(run)
        finally:
            watch.progress.end()
    last = watch.run or run
    console.print(status_text.render_summary(cluster.inventory, last, seconds, watch.steps_per_second))
    known = {"run": last.as_json(), "seconds": round(seconds, 1), "evaluated": evaluated}
    _answer(console, request, "finished", plan=plan.as_json(), **known)
    if not evaluated:
        _raise_not_evaluated(cluster)


def _follow_several(cluster: Cluster, console: Console, request: StartRequest, plan: Plan, trail: Trail) -> None:
    """Say what comes of a sweep or a queue, whose runs follow each other."""
    cluster.release_start_lock()
    if "sweep" not in plan.choice.selection:
        console.print("the queue is worked off without this machine. Look: fab queue. Stop it: fab stop-cluster")
        _answer(console, request, "training", plan=plan.as_json())
        return
    trail.end()
    followed = follow_sweep(cluster, console, plan.choice.selection["sweep"]["name"], request.detach)
    _answer(console, request, "finished" if followed else "training", plan=plan.as_json(), sweep=followed)


def _until_trained(watch: StartWatch, request: StartRequest, started: _Started, rollback: StartRollback) -> Run:
    """Wait for the first trained step; put back what was there where none can come."""
    try:
        return watch.until_trained(request.timeout)
    except (ClusterTrouble, OperatorMistake):
        watch.progress.end()
        if (started.changed or started.plan.choice.write) and not watch.timed_out:
            rollback.restore_state()
        raise


def _say_that_it_trains(
    cluster: Cluster, console: Console, request: StartRequest, plan: Plan, run: Run, trail: Trail
) -> None:
    seen = Observation()

    def look(script: str) -> bool:
        chief = cluster.inventory.chief.host
        seen.merge(cluster.observe(first={chief: script}, first_seconds=BOTH_SECONDS))
        return chief not in seen.unreachable and chief not in seen.failed

    trail.end(DONE, look, step=run.step)
    console.print(f"run {run.run} trains: {status_text.render_progress(run)}")
    console.print(status_text.render_tasks(status_text.task_rows(cluster.inventory, seen)))
    _answer(console, request, "training", plan=plan.as_json(), run=run.as_json())


def _raise_not_evaluated(cluster: Cluster) -> None:
    evaluator = cluster.inventory.evaluator
    assert evaluator is not None
    raise ClusterTrouble(
        f"the last step isn't evaluated {EVALUATION_SECONDS:.0f} s after the end",
        cluster.trouble({evaluator: "no evaluation of the last checkpoint"}),
    )


def _answer(console: Console, request: StartRequest, outcome: str, **known: Any) -> None:
    nothing = dict.fromkeys(("plan", "changes", "cost", "run", "sweep", "seconds", "evaluated"))
    console.print_json(request.verb, {"outcome": outcome, **nothing, **known})


@contextmanager
def _what_was_started_goes_on() -> Iterator[None]:
    """Say so to an operator who leaves with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(LEFT) from None

"""Which drills there are, what each is for, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.drills import faults
from fleet.drills.faults import (
    NOTHING,
    Cut,
    Damage,
    Down,
    Fault,
    Freeze,
    Full,
    Kill,
    KillWhileSaving,
    PowerOff,
    ReadOnly,
    Reboot,
    Slow,
    every,
    one,
)
from fleet.drills.scenes import (
    Scene,
    all_checkpoints_bad,
    fails,
    finishes,
    five_times,
    never_starts,
    recovers,
    saves_again,
    second_coordinator,
    undisturbed,
    wrong_port,
)
from fleet.drills.stage import LONG_STEP, Stage
from fleet.drills.watch import Watch
from fleet.drills.ways import Doubled, Late, Lossy, NoConnection, NoWayIn
from fleet.site.inventory import Task

RECOVERS = recovers()


@dataclass(frozen=True)
class Drill:
    """A fault, what must come of it, and by when (seconds)."""

    name: str
    text: str
    fault: Fault
    detected: float | None  # somebody notices within this time; None where nobody has to
    paused: float  # no longer without a new step; or, where the run ends, until it does
    scene: Scene = RECOVERS
    restarts: bool = True  # whether what is hit must be started anew
    may_too: Sequence[str] = ()  # jobs whose tasks may be started anew beside it
    program: str = "trainer.drill:Drill"
    settings: Mapping[str, Any] = field(default_factory=dict)
    long_step: bool = False
    destructive: bool = False  # it fills, cuts, reboots or powers off
    needs: Sequence[str] = ()  # jobs that the inventory must have a task of, or "power"; "ps 2" for two

    def must_restart(self, stage: Stage, task: Task, hit: Sequence[Task]) -> bool:
        return self.restarts and task in hit

    def may_restart(self, stage: Stage, task: Task, hit: Sequence[Task]) -> bool:
        return task in hit or task.job in self.may_too

    def with_slack(self, slack: float) -> Drill:
        detected = None if self.detected is None else self.detected * slack
        return replace(self, detected=detected, paused=self.paused * slack)


def before_the_newest(watch: Watch) -> int:
    """Where a run may go back to when its newest checkpoint is damaged."""
    return max([step for step in watch.first.checkpoints if step != watch.newest_checkpoint], default=0)


def where_it_was(watch: Watch) -> int:
    """The step before the fault: a coordinator goes on with the variables that the one before left on the ps."""
    return watch.first.step or 0


LOSES_NO_STEP = recovers(restored=where_it_was)
# A coordinator that can't get on may be started anew, and nobody with it.
ANEW = ("chief",)
COORDINATOR = Kill(one("chief"))
SERVICE = {"input": "service", "input_sharding": "dynamic"}
SOON = {"ps_wait_seconds": 10.0, "worker_wait_seconds": 10.0}
# A connection is given up after the heartbeat's time-out and a second, and the ways are tried each 10 s.
NAMED = 25.0
OF_A_WAY: Mapping[str, Any] = {
    "settings": SOON,
    "destructive": True,
    "needs": ("worker 2", "ps"),
}

_DRILLS = (
    Drill("worker", "a worker is killed: nothing stops, and it is used again", Kill(one("worker")), 5, 5),
    Drill(
        "workers-60s",
        "all workers are down for a minute: training goes on when they are back",
        Down(every("worker")),
        10,
        45,
        recovers(goes_on=False),
    ),
    Drill("ps", "a ps is killed in mid-step: only it is started anew", Kill(one("ps")), 5, 30),
    Drill(
        "ps-fit",
        "the same under api: fit, and every restored tensor is the checkpoint's",
        Kill(one("ps")),
        5,
        30,
        recovers(tensors=True),
        settings={"api": "fit"},
    ),
    Drill(
        "ps-idle",
        f"a ps is killed while nobody asks it anything, a step of {LONG_STEP:.0f} s being under way",
        Kill(one("ps")),
        LONG_STEP + 15,
        LONG_STEP + 60,
        may_too=("chief",),
        long_step=True,
    ),
    Drill(
        "ps-saving",
        "a ps is killed while it writes its part of a checkpoint",
        KillWhileSaving(one("ps")),
        5,
        60,
        may_too=("chief",),
        program="trainer.drill:Large",
    ),
    Drill(
        "ps-and-worker",
        "a ps and a worker are killed together",
        Kill(one("ps", "worker")),
        5,
        60,
        may_too=ANEW,
    ),
    Drill("all-ps", "all ps are killed", Kill(every("ps")), 5, 60, may_too=("chief",)),
    Drill("coordinator", "the coordinator is killed: no step is lost", COORDINATOR, 10, 30, LOSES_NO_STEP),
    Drill(
        "coordinator-5",
        "the coordinator is killed five times: the memory of the ps does not grow",
        COORDINATOR,
        10,
        45,
        five_times(LOSES_NO_STEP),
        program="trainer.drill:Large",
    ),
    Drill(
        "coordinator-saving",
        "the coordinator is killed in mid-save",
        KillWhileSaving(one("chief")),
        10,
        45,
        LOSES_NO_STEP,
        program="trainer.drill:Large",
    ),
    Drill(
        "coordinator-term",
        "the coordinator is sent a stray SIGTERM: it saves, ends, and is started anew",
        Kill(one("chief"), signal="TERM"),
        15,
        60,
        LOSES_NO_STEP,
    ),
    Drill("worker-term", "a worker is sent a stray SIGTERM: likewise", Kill(one("worker"), signal="TERM"), 5, 10),
    Drill("ps-term", "a ps is sent a stray SIGTERM", Kill(one("ps"), signal="TERM"), 5, 45),
    Drill("worker-frozen", "a worker is stopped (SIGSTOP)", Freeze(one("worker")), 10, 10, may_too=ANEW),
    Drill("ps-frozen", "a ps is stopped (SIGSTOP)", Freeze(one("ps")), 10, 45, may_too=ANEW),
    Drill(
        "coordinator-frozen",
        "the coordinator is stopped (SIGSTOP)",
        Freeze(one("chief")),
        10,
        40,
        LOSES_NO_STEP,
    ),
    Drill(
        "worker-unit",
        "a worker is killed together with its supervisor: systemd starts both again",
        Kill(one("worker"), part="unit"),
        5,
        10,
    ),
    Drill("ps-unit", "likewise a ps", Kill(one("ps"), part="unit"), 5, 45),
    Drill("coordinator-unit", "likewise the coordinator", Kill(one("chief"), part="unit"), 15, 60, LOSES_NO_STEP),
    Drill(
        "worker-unit-frozen",
        "a worker is stopped together with its supervisor: systemd's watchdog ends it",
        Freeze(one("worker"), part="unit"),
        35,  # the watchdog's time is 30
        45,
        may_too=ANEW,
    ),
    Drill("ps-unit-frozen", "likewise a ps", Freeze(one("ps"), part="unit"), 35, 75, may_too=ANEW),
    Drill(
        "coordinator-unit-frozen",
        "likewise the coordinator",
        Freeze(one("chief"), part="unit"),
        35,
        75,
        may_too=ANEW,
    ),
    Drill(
        "worker-slow",
        "a worker gets a fiftieth of a processor for a minute: the others go on",
        Slow(one("worker")),
        None,
        45,
        restarts=False,
        may_too=ANEW,
    ),
    Drill(
        "ps-slow",
        "a ps gets a fiftieth of a processor for a minute: it is slow, or done without",
        Slow(one("ps")),
        None,
        90,
        restarts=False,
        may_too=ANEW,
    ),
    Drill(
        "coordinator-slow",
        "the coordinator gets a fiftieth of a processor for a minute",
        Slow(one("chief")),
        None,
        90,
        restarts=False,
        may_too=ANEW,
    ),
    Drill(
        "worker-cut",
        "a worker's host drops every packet for a minute: training goes on without it and takes it back",
        Cut(one("worker")),
        10,
        15,
        restarts=False,
        may_too=ANEW,
        settings=SOON,
        destructive=True,
        needs=("worker 2",),
    ),
    Drill(
        "ps-cut",
        "the same with a ps: its variables are laid out anew on the other, every tensor the checkpoint's",
        Cut(one("ps")),
        10,
        45,
        recovers(tensors=True),
        restarts=False,
        may_too=ANEW,
        settings={**SOON, "api": "fit"},
        destructive=True,
        needs=("ps 2",),
    ),
    Drill(
        "way-lost",
        "what a worker's host sends to a ps's is lost for a minute: the worker is left out, named, and taken back",
        Lossy(one("worker")),
        NAMED,
        10,
        **OF_A_WAY,
    ),
    Drill(
        "way-port",
        "what it sends to the ps's port alone: likewise",
        Lossy(one("worker"), what="port"),
        NAMED,
        10,
        **OF_A_WAY,
    ),
    Drill(
        "way-large",
        "packets of more than 1,000 bytes, in both directions: likewise",
        Lossy(one("worker"), what="large"),
        NAMED,
        10,
        **OF_A_WAY,
    ),
    Drill(
        "way-syn",
        "packets that open a connection, and the worker is killed: its next process is left out",
        NoConnection(one("worker")),
        NAMED,
        10,
        **OF_A_WAY,
    ),
    Drill(
        "way-loss",
        "a third of the packets, in both directions: the worker is slow, or left out",
        Lossy(one("worker"), what="loss"),
        None,
        10,
        restarts=False,
        **OF_A_WAY,
    ),
    Drill(
        "way-late",
        "what a worker's host sends to a ps's comes 200 ms later (netem): the worker is slow",
        Late(one("worker")),
        None,
        10,
        restarts=False,
        **OF_A_WAY,
    ),
    Drill(
        "address-doubled",
        "a ps's host takes another one for the worker's, as where two have its address: likewise",
        Doubled(one("worker")),
        NAMED,
        10,
        restarts=False,  # the other host refuses its packets at once, and no call hangs
        **OF_A_WAY,
    ),
    Drill(
        "ps-unreached",
        "a ps's host drops what the workers send to it, and answers the coordinator: the ps is lost",
        NoWayIn(one("ps")),
        NAMED,
        60,
        restarts=False,
        may_too=("chief", "worker", "ps"),
        settings=SOON,
        destructive=True,
        needs=("ps 2",),
    ),
    Drill(
        "worker-off",
        "a worker's host loses its power, and gets it back",
        PowerOff(one("worker")),
        10,
        30,  # whoever watches waits some seconds for SSH to a host that boots
        may_too=ANEW,
        settings=SOON,
        destructive=True,
        needs=("worker 2", "power"),
    ),
    Drill(
        "ps-off",
        "a ps's host loses its power, and gets it back",
        PowerOff(one("ps"), lasts=100.0),
        10,
        45,
        may_too=ANEW,
        settings=SOON,
        destructive=True,
        needs=("ps 2", "power"),
    ),
    Drill("reboot", "every host reboots at once", Reboot(), None, 240, destructive=True),
    Drill(
        "data-truncated",
        "the newest checkpoint's data is cut in half: it is set aside, and the one before it used",
        Damage(faults.TRUNCATE_DATA),
        15,
        60,
        recovers(restored=before_the_newest),
        may_too=ANEW,
    ),
    Drill(
        "index-truncated",
        "the newest checkpoint's index is cut in half: likewise",
        Damage(faults.TRUNCATE_INDEX),
        15,
        60,
        recovers(restored=before_the_newest),
        may_too=ANEW,
    ),
    Drill(
        "state-file-deleted",
        "TensorFlow's file `checkpoint` is deleted: nobody misses it",
        Damage(faults.REMOVE_STATE_FILE),
        15,
        60,
        may_too=ANEW,
    ),
    Drill(
        "all-checkpoints-bad",
        "no checkpoint can be read: one clear, permanent error",
        Damage(faults.TRUNCATE_ALL),
        120,
        120,
        all_checkpoints_bad,
    ),
    Drill(
        "path-full",
        "the shared path is full for half a minute: training goes on, complains, and saves again",
        Full(),
        None,  # the log complains: events.jsonl is where nothing can be written
        15,
        saves_again(recovers()),
        may_too=("evaluator",),
        destructive=True,
    ),
    Drill(
        "path-read-only",
        "the run's directory is read-only for half a minute: likewise",
        ReadOnly(),
        None,  # the log complains: events.jsonl is where nothing can be written
        15,
        saves_again(recovers()),
        may_too=("evaluator",),
        destructive=True,
    ),
    Drill(
        "worker-never-starts",
        "a worker is not there: it is named with host and port, and waited for",
        NOTHING,
        30,
        90,
        never_starts("worker"),
        settings={"elastic": False},
    ),
    Drill("ps-never-starts", "likewise a ps", NOTHING, 30, 90, never_starts("ps"), settings={"elastic": False}),
    Drill(
        "wrong-port",
        "the coordinator has a wrong port of a worker: it names the address that doesn't answer",
        NOTHING,
        30,
        90,
        wrong_port("worker"),
        settings={"elastic": False},
    ),
    Drill(
        "data",
        "a data worker is killed: the others read on, and it reads again",
        Kill(one("data")),
        None,
        5,
        settings=SERVICE,
        needs=("data 2",),
    ),
    Drill(
        "data-all",
        "all data workers are killed",
        Kill(every("data")),
        None,
        20,
        settings=SERVICE,
        needs=("data",),
    ),
    Drill(
        "data-frozen",
        "a data worker is stopped (SIGSTOP)",
        Freeze(one("data")),
        None,
        5,
        settings=SERVICE,
        needs=("data 2",),
    ),
    Drill(
        "data-unit",
        "a data worker is killed together with its supervisor",
        Kill(one("data"), part="unit"),
        None,
        5,
        settings=SERVICE,
        needs=("data 2",),
    ),
    Drill(
        "data-off",
        "a data worker's host loses its power, and gets it back",
        PowerOff(one("data")),
        None,
        30,  # as `worker-off`
        settings=SERVICE,
        destructive=True,
        needs=("data 2", "power"),
    ),
    Drill(
        "dispatcher",
        "the dispatcher is killed: nobody stops, and the next one goes on with its journal",
        Kill(one("dispatcher")),
        None,
        5,
        settings=SERVICE,
        needs=("data",),
    ),
    Drill(
        "dispatcher-frozen",
        "the dispatcher is stopped (SIGSTOP)",
        Freeze(one("dispatcher")),
        None,
        10,
        settings=SERVICE,
        needs=("data",),
    ),
    Drill(
        "evaluator",
        "the evaluator is killed: training does not notice, and it evaluates again",
        Kill(one("evaluator")),
        None,
        10,
        undisturbed(recovers()),
        needs=("evaluator",),
    ),
    Drill(
        "evaluator-absent",
        "the evaluator is down for half a minute: likewise",
        Down(one("evaluator"), lasts=30.0),
        None,
        10,
        undisturbed(recovers()),
        needs=("evaluator",),
    ),
    Drill(
        "nan",
        "check_numerics finds a loss that is no number: the user's error",
        NOTHING,
        90,
        90,
        fails("the drill's loss"),
        program="trainer.drill:NotANumber",
    ),
    Drill(
        "exception",
        "the program raises an exception: likewise",
        NOTHING,
        90,
        90,
        fails("the drill's own error"),
        program="trainer.drill:Broken",
    ),
    Drill(
        "second-coordinator",
        "a second coordinator is started on another host: it is refused",
        NOTHING,
        60,
        10,
        second_coordinator,
    ),
    Drill(
        "finished",
        "the digits are learnt to the end, with a worker and a ps killed on the way: accuracy, and every task ends",
        Kill(one("worker", "ps")),
        None,
        240,
        finishes("accuracy", 0.95),
        program="trainer.examples.digits:Digits",
        settings={"steps": 4000, "steps_per_execution": "auto", "checkpoint_seconds": 3.0},
    ),
)

# What makes a host silent says so only to a heartbeat when no packet is due: with a long step under way.
_SILENT = ("worker-frozen", "ps-frozen", "coordinator-frozen", "worker-cut", "ps-cut", "worker-off", "ps-off")


def _with_a_long_step(drill: Drill) -> Drill:
    return replace(
        drill,
        name=f"{drill.name}-long-step",
        text=f"{drill.name} with steps of {LONG_STEP:.0f} s under way",
        paused=drill.paused + LONG_STEP,
        long_step=True,
    )


CATALOGUE: tuple[Drill, ...] = (*_DRILLS, *(_with_a_long_step(drill) for drill in _DRILLS if drill.name in _SILENT))

# Those whose faults come by chance in `fab drill --random`, at any task of the job that they hit.
BY_CHANCE = (
    "worker",
    "worker-term",
    "worker-frozen",
    "worker-unit",
    "worker-unit-frozen",
    "worker-slow",
    "worker-cut",
    "worker-off",
    "way-lost",
    "way-port",
    "way-large",
    "way-syn",
    "way-loss",
    "ps",
    "ps-term",
    "ps-frozen",
    "ps-unit",
    "ps-unit-frozen",
    "ps-slow",
    "ps-cut",
    "ps-off",
    "coordinator",
    "coordinator-term",
    "coordinator-frozen",
    "coordinator-unit",
    "coordinator-unit-frozen",
    "coordinator-slow",
    "evaluator",
    "data-truncated",
    "index-truncated",
    "path-full",
)

# The most telling ones: `make dozen`.
DOZEN = (
    "worker",
    "ps",
    "ps-fit",
    "coordinator",
    "coordinator-term",
    "worker-frozen",
    "ps-frozen",
    "worker-cut",
    "data-truncated",
    "exception",
    "second-coordinator",
    "finished",
)

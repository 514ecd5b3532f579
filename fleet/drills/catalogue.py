"""Which drills there are, what each is for, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fleet.drills import host_faults
from fleet.drills.drill import Drill
from fleet.drills.faults import NOTHING, Down, Freeze, Kill, KillWhileSaving, Throttle, every, one
from fleet.drills.host_faults import Cut, Damage, Full, PowerOff, ReadOnly, Reboot
from fleet.drills.recovery import recovers
from fleet.drills.scenarios import (
    all_checkpoints_bad,
    fails,
    finishes,
    five_times,
    never_starts,
    saves_again,
    second_coordinator,
    undisturbed,
    wrong_port,
)
from fleet.drills.testbed import LONG_STEP
from fleet.drills.watch import FaultWatch
from fleet.drills.ways import Delay, Doubled, Lossy, NoConnection, NoWayIn


def before_the_newest(watch: FaultWatch) -> int:
    """Where a run may go back to when its newest checkpoint is damaged."""
    return max([step for step in watch.first.checkpoints if step != watch.newest_checkpoint], default=0)


def where_it_was(watch: FaultWatch) -> int:
    """The step before the fault: a coordinator goes on with the variables that the one before left on the ps."""
    return watch.first.step or 0


EQUAL_TENSORS = partial(recovers, tensors=True)
TO_THE_ONE_BEFORE = partial(recovers, restored=before_the_newest)
LOSES_NO_STEP = partial(recovers, restored=where_it_was)
# A coordinator that can't get on may be restarted, and no other task with it.
CHIEF_TOO = ("chief",)
GOES_ON: Mapping[str, Any] = {"restarts": False, "may_too": CHIEF_TOO}
COORDINATOR = Kill(one("chief"))
SERVICE = {"input": "service", "input_sharding": "dynamic"}
SOON = {"ps_grace_seconds": 10.0, "worker_wait_seconds": 10.0}
# systemd's watchdog takes 30 s.
WATCHDOG = 35
# SSH to a host that boots takes some seconds more than the host itself.
BOOT = 30
# A connection is given up after the heartbeat's time-out and a second, and the ways are tried each 10 s.
NAMED = 25.0
OF_A_WAY: Mapping[str, Any] = {
    "settings": SOON,
    "destructive": True,
    "needs": ("worker 2", "ps"),
}

_drill = partial(Drill, scenario=recovers)
# fmt: off
_DRILLS = (
    _drill("worker", "a worker is killed: nothing stops, and it is used again",
           Kill(one("worker")), detected=5, paused=5),
    _drill("workers-60s", "all workers are down for a minute: training goes on when they are back",
           Down(every("worker")), detected=10, paused=45, scenario=partial(recovers, goes_on=False)),
    _drill("ps", "a ps is killed in mid-step: only it is restarted",
           Kill(one("ps")), detected=5, paused=30),
    _drill("ps-fit", "the same under api: fit, and every restored tensor is the checkpoint's",
           Kill(one("ps")), detected=5, paused=30, scenario=EQUAL_TENSORS, settings={"api": "fit"}),
    _drill("ps-idle", f"a ps is killed while nobody asks it anything, a step of {LONG_STEP:.0f} s being under way",
           Kill(one("ps")), detected=LONG_STEP + 15, paused=LONG_STEP + 60, may_too=CHIEF_TOO, long_step=True),
    _drill("ps-saving", "a ps is killed while it writes its part of a checkpoint",
           KillWhileSaving(one("ps")), detected=5, paused=60, may_too=CHIEF_TOO, program="trainer.drill:Large"),
    _drill("ps-and-worker", "a ps and a worker are killed together",
           Kill(one("ps", "worker")), detected=5, paused=60, may_too=CHIEF_TOO),
    _drill("all-ps", "all ps are killed",
           Kill(every("ps")), detected=5, paused=60, may_too=CHIEF_TOO),
    _drill("coordinator", "the coordinator is killed: no step is lost",
           COORDINATOR, detected=10, paused=30, scenario=LOSES_NO_STEP),
    _drill("coordinator-5", "the coordinator is killed five times: the memory of the ps does not grow",
           COORDINATOR, detected=10, paused=45, scenario=partial(five_times, once=LOSES_NO_STEP),
           program="trainer.drill:Large"),
    _drill("coordinator-saving", "the coordinator is killed in mid-save",
           KillWhileSaving(one("chief")), detected=10, paused=45, scenario=LOSES_NO_STEP,
           program="trainer.drill:Large"),
    _drill("coordinator-term", "the coordinator is sent a stray SIGTERM: it saves, ends, and is restarted",
           Kill(one("chief"), signal="TERM"), detected=15, paused=60, scenario=LOSES_NO_STEP),
    _drill("worker-term", "a worker is sent a stray SIGTERM: likewise",
           Kill(one("worker"), signal="TERM"), detected=5, paused=10),
    _drill("ps-term", "a ps is sent a stray SIGTERM",
           Kill(one("ps"), signal="TERM"), detected=5, paused=45),
    _drill("worker-frozen", "a worker is stopped (SIGSTOP)",
           Freeze(one("worker")), detected=10, paused=10, may_too=CHIEF_TOO),
    _drill("ps-frozen", "a ps is stopped (SIGSTOP)",
           Freeze(one("ps")), detected=10, paused=45, may_too=CHIEF_TOO),
    _drill("coordinator-frozen", "the coordinator is stopped (SIGSTOP)",
           Freeze(one("chief")), detected=10, paused=40, scenario=LOSES_NO_STEP),
    _drill("worker-unit", "a worker is killed together with its supervisor: systemd starts both again",
           Kill(one("worker"), part="unit"), detected=5, paused=10),
    _drill("ps-unit", "likewise a ps",
           Kill(one("ps"), part="unit"), detected=5, paused=45),
    _drill("coordinator-unit", "likewise the coordinator",
           Kill(one("chief"), part="unit"), detected=15, paused=60, scenario=LOSES_NO_STEP),
    _drill("worker-unit-frozen", "a worker is stopped together with its supervisor: systemd's watchdog ends it",
           Freeze(one("worker"), part="unit"), detected=WATCHDOG, paused=45, may_too=CHIEF_TOO),
    _drill("ps-unit-frozen", "likewise a ps",
           Freeze(one("ps"), part="unit"), detected=WATCHDOG, paused=75, may_too=CHIEF_TOO),
    _drill("coordinator-unit-frozen", "likewise the coordinator",
           Freeze(one("chief"), part="unit"), detected=WATCHDOG, paused=75, may_too=CHIEF_TOO),
    _drill("worker-slow", "a worker gets a fiftieth of a processor for a minute: the others go on",
           Throttle(one("worker")), detected=None, paused=45, **GOES_ON),
    _drill("ps-slow", "a ps gets a fiftieth of a processor for a minute: it is slow, or done without",
           Throttle(one("ps")), detected=None, paused=90, **GOES_ON),
    _drill("coordinator-slow", "the coordinator gets a fiftieth of a processor for a minute",
           Throttle(one("chief")), detected=None, paused=90, **GOES_ON),
    _drill("worker-cut",
           "a worker's host drops every packet for a minute: training goes on without it and takes it back",
           Cut(one("worker")), detected=10, paused=15, settings=SOON, destructive=True, needs=("worker 2",),
           **GOES_ON),
    _drill("ps-cut", "the same with a ps: its variables are laid out again on the other, every tensor the checkpoint's",
           Cut(one("ps")), detected=10, paused=45, scenario=EQUAL_TENSORS, settings={**SOON, "api": "fit"},
           destructive=True, needs=("ps 2",), **GOES_ON),
    _drill("way-lost",
           "what a worker's host sends to a ps's is lost for a minute: the worker is left out, named, and taken back",
           Lossy(one("worker")), detected=NAMED, paused=10, **OF_A_WAY),
    _drill("way-port", "what it sends to the ps's port alone: likewise",
           Lossy(one("worker"), what="port"), detected=NAMED, paused=10, **OF_A_WAY),
    _drill("way-large", "packets of more than 1,000 bytes, in both directions: likewise",
           Lossy(one("worker"), what="large"), detected=NAMED, paused=10, **OF_A_WAY),
    _drill("way-syn", "packets that open a connection, and the worker is killed: its next process is left out",
           NoConnection(one("worker")), detected=NAMED, paused=10, **OF_A_WAY),
    _drill("way-loss", "a third of the packets, in both directions: the worker is slow, or left out",
           Lossy(one("worker"), what="loss"), detected=None, paused=10, restarts=False, **OF_A_WAY),
    _drill("way-late", "what a worker's host sends to a ps's comes 200 ms later: the worker is slow",
           Delay(one("worker")), detected=None, paused=10, restarts=False, **OF_A_WAY),
    # The other host refuses its packets at once, and no call hangs.
    _drill("address-doubled", "a ps's host takes another one for the worker's, as where two have its address: likewise",
           Doubled(one("worker")), detected=NAMED, paused=10, restarts=False, **OF_A_WAY),
    _drill("ps-unreached", "a ps's host drops what the workers send to it, and answers the coordinator: the ps is lost",
           NoWayIn(one("ps")), detected=NAMED, paused=60, restarts=False, may_too=("chief", "worker", "ps"),
           settings=SOON, destructive=True, needs=("ps 2",)),
    _drill("worker-off", "a worker's host loses its power, and gets it back",
           PowerOff(one("worker")), detected=10, paused=BOOT, may_too=CHIEF_TOO, settings=SOON, destructive=True,
           needs=("worker 2", "power")),
    _drill("ps-off", "a ps's host loses its power, and gets it back",
           PowerOff(one("ps"), lasts=100.0), detected=10, paused=45, may_too=CHIEF_TOO, settings=SOON, destructive=True,
           needs=("ps 2", "power")),
    _drill("reboot", "every host reboots at once",
           Reboot(), detected=None, paused=240, destructive=True),
    _drill("data-truncated", "the newest checkpoint's data is cut in half: it is set aside, and the one before it used",
           Damage(host_faults.TRUNCATE_DATA), detected=15, paused=60, scenario=TO_THE_ONE_BEFORE,
           may_too=CHIEF_TOO),
    _drill("index-truncated", "the newest checkpoint's index is cut in half: likewise",
           Damage(host_faults.TRUNCATE_INDEX), detected=15, paused=60, scenario=TO_THE_ONE_BEFORE,
           may_too=CHIEF_TOO),
    _drill("state-file-deleted", "TensorFlow's file `checkpoint` is deleted: nobody misses it",
           Damage(host_faults.REMOVE_STATE_FILE), detected=15, paused=60, may_too=CHIEF_TOO),
    _drill("all-checkpoints-bad", "no checkpoint can be read: one clear, permanent error",
           Damage(host_faults.TRUNCATE_ALL), detected=120, paused=120, scenario=all_checkpoints_bad),
    # The log complains, and nothing else: events.jsonl is where nothing can be written.
    _drill("path-full", "the shared path is full for half a minute: training goes on, complains, and saves again",
           Full(), detected=None, paused=15, scenario=saves_again, may_too=("evaluator",), destructive=True),
    _drill("path-read-only", "the run's directory is read-only for half a minute: likewise",
           ReadOnly(), detected=None, paused=15, scenario=saves_again, may_too=("evaluator",), destructive=True),
    _drill("worker-never-starts", "a worker is missing: it is named with host and port, and waited for",
           NOTHING, detected=30, paused=90, scenario=partial(never_starts, job="worker"), settings={"elastic": False}),
    _drill("ps-never-starts", "likewise a ps",
           NOTHING, detected=30, paused=90, scenario=partial(never_starts, job="ps"), settings={"elastic": False}),
    _drill("wrong-port", "the coordinator has a wrong port of a worker: it names the address that doesn't answer",
           NOTHING, detected=30, paused=90, scenario=wrong_port, settings={"elastic": False}),
    _drill("data", "a data worker is killed: the others read on, and it reads again",
           Kill(one("data")), detected=None, paused=5, settings=SERVICE, needs=("data 2",)),
    _drill("data-all", "all data workers are killed",
           Kill(every("data")), detected=None, paused=20, settings=SERVICE, needs=("data",)),
    _drill("data-frozen", "a data worker is stopped (SIGSTOP)",
           Freeze(one("data")), detected=None, paused=5, settings=SERVICE, needs=("data 2",)),
    _drill("data-unit", "a data worker is killed together with its supervisor",
           Kill(one("data"), part="unit"), detected=None, paused=5, settings=SERVICE, needs=("data 2",)),
    _drill("data-off", "a data worker's host loses its power, and gets it back",
           PowerOff(one("data")), detected=None, paused=BOOT, destructive=True, settings=SERVICE,
           needs=("data 2", "power")),
    _drill("dispatcher", "the dispatcher is killed: nobody stops, and the next one goes on with its journal",
           Kill(one("dispatcher")), detected=None, paused=5, settings=SERVICE, needs=("data",)),
    _drill("dispatcher-frozen", "the dispatcher is stopped (SIGSTOP)",
           Freeze(one("dispatcher")), detected=None, paused=10, settings=SERVICE, needs=("data",)),
    _drill("evaluator", "the evaluator is killed: training does not notice, and it evaluates again",
           Kill(one("evaluator")), detected=None, paused=10, scenario=undisturbed, needs=("evaluator",)),
    _drill("evaluator-absent", "the evaluator is down for half a minute: likewise",
           Down(one("evaluator"), lasts=30.0), detected=None, paused=10, scenario=undisturbed, needs=("evaluator",)),
    _drill("nan", "check_numerics finds a loss that is no number: the user's error",
           NOTHING, detected=90, paused=90, scenario=partial(fails, message="the drill's loss"),
           program="trainer.drill:NotANumber"),
    _drill("exception", "the program raises an exception: likewise",
           NOTHING, detected=90, paused=90, scenario=partial(fails, message="the drill's own error"),
           program="trainer.drill:Broken"),
    _drill("second-coordinator", "a second coordinator is started on another host: it is refused",
           NOTHING, detected=60, paused=10, scenario=second_coordinator),
    _drill("finished",
           "the digits are learnt to the end, with a worker and a ps killed on the way: accuracy, and every task ends",
           Kill(one("worker", "ps")), detected=None, paused=240, scenario=finishes,
           program="trainer.examples.digits:Digits",
           settings={"steps": 4000, "steps_per_execution": "auto", "checkpoint_seconds": 3.0}),
)
# fmt: on

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
    "worker", "worker-term", "worker-frozen", "worker-unit", "worker-unit-frozen", "worker-slow", "worker-cut",
    "worker-off", "way-lost", "way-port", "way-large", "way-syn", "way-loss", "way-late", "address-doubled", "ps",
    "ps-term", "ps-frozen", "ps-unit", "ps-unit-frozen", "ps-slow", "ps-cut", "ps-off", "ps-unreached", "coordinator",
    "coordinator-term", "coordinator-frozen", "coordinator-unit", "coordinator-unit-frozen", "coordinator-slow",
    "evaluator", "data-truncated", "index-truncated", "path-full",
)  # fmt: skip

# The most telling ones: `make dozen`.
DOZEN = (
    "worker", "ps", "ps-fit", "coordinator", "coordinator-term", "worker-frozen", "ps-frozen", "worker-cut",
    "data-truncated", "exception", "second-coordinator", "finished",
)  # fmt: skip

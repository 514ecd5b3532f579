"""A cluster as a program for `spark-submit`: one barrier stage, each of whose tasks starts a task of the cluster."""

from __future__ import annotations

import json
from string import Template

from fleet.render import RenderedCluster, reject_gpus
from trainer.core.failures import FINISHED, STOPPED, USER_ERROR
from trainer.core.runtime import TASK_ENVIRONMENT

SCRIPT = Template('''\
"""psfleet on Spark: $counts. $shared must be the same on all nodes.

spark-submit --num-executors $number --executor-cores 1 --executor-memory 4g THIS
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

PYTHON = $python
TASKS = $tasks
SETTINGS = json.loads($settings)
ENVIRONMENT = $environment
# With these a task has ended for good: the run is finished, its program is wrong, or it was asked to stop.
FINISHED, USER_ERROR, STOPPED = $finished, $user_error, $stopped
ATTEMPTS = int(os.environ.get("PSFLEET_ATTEMPTS", "4"))


class SparkTask:
    """A task of the cluster as a process, which is started again where another try may help."""

    def __init__(self, task, cluster, directory):
        job, _, index = task.rpartition("-")
        for name, content in (("run.json", SETTINGS), ("cluster.json", cluster)):
            with open(os.path.join(directory, name), "w") as file:
                json.dump(content, file)
        where = os.path.join(directory, "cluster.json")
        # Spark ends a task by SIGKILL: the kernel has the trainer save and end then.
        self.command = ["setpriv", "--pdeathsig", "TERM", PYTHON, "-m", "trainer", "--cluster", where]
        self.command += ["--job-name", job, "--task-index", index]
        self.environment = {
            **os.environ,
            "TRAINER_SETTINGS": os.path.join(directory, "run.json"),
            **ENVIRONMENT,
            "DATA_DIR": os.environ.get("DATA_DIR", os.path.join(SETTINGS["shared_dir"], "data")),
        }
        # Spark's own modules are not the trainer's; a program's path is spark.executorEnv.PSFLEET_PYTHONPATH.
        self.environment["PYTHONPATH"] = os.environ.get("PSFLEET_PYTHONPATH", "")
        self.is_over = False
        self.process = None

    def keep(self):
        """Run the task until it has ended for good; returns its exit code."""
        while True:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
            )
            code = self.process.wait()
            if self.is_over or code in (FINISHED, USER_ERROR, STOPPED):
                return code
            time.sleep(1)

    def end(self):
        self.is_over = True
        if self.process is not None:
            self.process.terminate()


def train(_):
    context = BarrierTaskContext.get()
    task = TASKS[context.partitionId()]
    host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
    with socket.socket() as free:
        free.bind(("", 0))
        members = context.allGather(f"{host}:{free.getsockname()[1]}")
    cluster = {}
    for name, address in zip(TASKS, members):
        job = name.rpartition("-")[0]
        if job != "evaluator":  # which is no member
            cluster.setdefault(job, []).append(address)
    with tempfile.TemporaryDirectory(prefix="psfleet-") as directory:
        member = SparkTask(task, cluster, directory)
        if task == TASKS[0]:
            code = member.keep()
            context.barrier()
        else:
            # All wait for the coordinator's end.
            kept = threading.Thread(target=member.keep)
            kept.start()
            context.barrier()
            member.end()
            kept.join()
            code = 0
    yield code


if __name__ == "__main__":
    session = SparkSession.builder.appName("$name").getOrCreate()
    try:
        for left in reversed(range(ATTEMPTS)):
            try:
                codes = session.sparkContext.parallelize(TASKS, len(TASKS)).barrier().mapPartitions(train).collect()
                break
            except Exception as error:  # Spark does not begin a stage again whose executor was lost
                if not left or session.sparkContext._jsc.sc().isStopped():
                    raise
                print(f"begun again, from the newest checkpoint: {error}", file=sys.stderr)
                time.sleep(5)  # Spark replaces an executor meanwhile
    finally:
        session.stop()
    print(f"the coordinator has ended with {codes[0]}", file=sys.stderr)
    sys.exit(codes[0])
''')


def render(wanted: RenderedCluster, python: str) -> str:
    """Return the program, for `spark-submit`.

    Raises OperatorMistake for a cluster with GPUs: Spark gives all tasks of a stage the same.
    """
    reject_gpus(wanted, "one stage of Spark", "spark.task.resource.gpu.amount")
    return SCRIPT.substitute(
        name=wanted.name,
        counts=wanted.counts,
        number=len(wanted.names),
        shared=wanted.settings["shared_dir"],
        python=repr(python),
        tasks=repr(wanted.names),
        settings=repr(json.dumps(wanted.settings)),
        environment=repr(TASK_ENVIRONMENT),
        finished=FINISHED,
        user_error=USER_ERROR,
        stopped=STOPPED,
    )

"""Where the time goes from a strategy to the first steps, as at each new generation of a run, for two models.

Processor seconds, so that other work counts little: of the coordinator until its calls are traced, and then of all for
the first step of each of two workers. The servers, two ps among them, are in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from bench.commands import run_command
from bench.options import parser_of
from bench.tables import print_row
from bench.tasks import clean_environment

PROGRAMS = ("bench.programs:Tiny", "trainer.examples.digits:Digits")
PARTS = ("make_model", "trace_step", "trace_call")
WORKERS = 2


@contextlib.contextmanager
def counted(name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.process_time()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - began


def serve(jobs: dict[str, list[str]]) -> tuple[list[Any], Any]:
    """Serve all workers and ps in this process; returns the servers, to be kept, and the coordinator's resolver."""
    import tensorflow as tf

    servers = tf.train.ClusterSpec({job: jobs[job] for job in ("worker", "ps")})
    kept = [
        tf.distribute.Server(servers, job_name=job, task_index=index)
        for job in servers.jobs
        for index in range(servers.num_tasks(job))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return kept, resolver


def measure(program: str, settings: dict[str, Any]) -> dict[str, float]:
    """Make a coordinator's calls in this process and give each worker two of them; returns the seconds by part.

    Beside these there are the `operations` of a traced step.
    """
    import tensorflow as tf

    from trainer.core.program import load_program
    from trainer.core.settings.config import Config
    from trainer.tasks.local import local_cluster
    from trainer.training.partitioners import make_partitioner
    from trainer.training.steps import remote

    kept, resolver = serve(local_cluster(WORKERS, 2))
    config = Config(program=program, **settings)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=make_partitioner(config, 2))
    seconds: dict[str, float] = {}
    with contextlib.ExitStack() as patched, counted("coordinator", seconds):
        for part in PARTS:
            original = getattr(remote, part)

            def timed(*args: object, original: Any = original, part: str = part, **more: object) -> Any:
                with counted(part, seconds):
                    made = original(*args, **more)
                if part == "trace_step":
                    seconds["operations"] = len(made.graph.get_operations())
                return made

            patched.enter_context(patch.object(remote, part, timed))
        runner = remote.RemoteStepRunner(config, load_program(program, {}), strategy, WORKERS)
    trained: set[int] = set()
    while len(trained) < WORKERS:
        began = time.process_time()
        call = runner.call(1)
        runner.join()
        if call.worker not in trained:
            seconds[f"worker {len(trained)}"] = time.process_time() - began
            trained.add(call.worker)
    assert kept
    return seconds


def main(arguments: list[str]) -> None:
    parser = parser_of("tracing", __doc__)
    parser.add_argument("--program", help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--settings", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.program:
        print(json.dumps(measure(options.program, options.settings)), flush=True)
        os._exit(0)
    columns = [*PARTS, "coordinator", *(f"worker {number}" for number in range(WORKERS))]
    print_row("processor time, s", *columns, head=True)
    for program in PROGRAMS:
        output = run_command([sys.executable, "-m", "bench.tracing", "--program", program], clean_environment())
        seconds = json.loads(output.splitlines()[-1])
        print_row(program, *(f"{seconds[column]:.2f}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])

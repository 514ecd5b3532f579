"""Workers and a ps as processes forked from one that has imported TensorFlow, so that many fit into one machine.

Takes the cluster spec as JSON, and prints a line when all serve. Ends when its input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import tensorflow as tf

PR_SET_PDEATHSIG = 1


def serve(jobs: dict[str, list[str]], job: str, index: int, ready: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    server = tf.distribute.Server(tf.train.ClusterSpec(jobs), job_name=job, task_index=index, config=threads)
    os.write(ready, b".")
    server.join()


def main() -> None:
    jobs = json.loads(sys.argv[1])
    heard, ready = os.pipe()
    tasks = [(job, index) for job in ("ps", "worker") for index in range(len(jobs[job]))]
    for job, index in tasks:
        if os.fork() == 0:
            serve(jobs, job, index, ready)
    for _ in tasks:
        os.read(heard, 1)
    print("all serve", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

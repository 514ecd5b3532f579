"""A dynamic table that fills with new keys, on two ps: how long an insertion takes, and what the rows and a save cost.

Two callers ask for rows of new keys, as workers do. The longest insertions are those in which an index grows. What half
of all take is the floor. Beside other work, the processor time of the busier ps says more than the clock.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from bench.options import plain_seconds
from bench.process_memory import read_memory
from bench.tables import print_row
from bench.tasks import LocalCluster, TaskProcess, processor_seconds
from trainer.training.tables.dynamic.hashing import constant
from trainer.training.tables.dynamic.pieces import Pieces
from trainer.training.tables.dynamic.shard import ROWS, Shard
from trainer.training.tables.dynamic.table import Table, giving_rows
from trainer.training.tables.dynamic.tables import run_once, share_of

WIDTH, SERVERS, CALLERS = 16, 2, 2
SLOTS: dict[str, dict[str, float]] = {"SGD": {}, "Adagrad": {"accumulator": 0.1}}
LONGEST = 6
SAMPLE_SECONDS = 0.05
# Its seconds, the processor time of the busier ps meanwhile, and the keys that there were before.
Insertion = tuple[float, float, int]


def fill(directory: Path, rows: int, batch: int, optimizer: str, capacity: int) -> None:
    """Fill a table with so many rows, and print what was seen."""
    cluster = LocalCluster(workers=1, servers=SERVERS, directory=directory)
    with cluster.serving():
        servers = [task for task in cluster.tasks if task.name.startswith("ps")]
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster.spec("ps")), job_name="chief", protocol="grpc"
        )
        devices = [f"/job:ps/replica:0/task:{number}/device:CPU:0" for number in range(SERVERS)]
        table = make_table(share_of(capacity, SERVERS), devices, SLOTS[optimizer])
        before, began = memory_of(servers), time.perf_counter()
        found = inserted(table, rows, batch, servers)
        seconds, taken = time.perf_counter() - began, memory_of(servers) - before
        there = sum(int(shard.numbers.read()[ROWS]) for shard in table.shards)
        print(f"{there:,} rows of {WIDTH} in {seconds:.1f} s, with {optimizer}, {batch:,} new keys a step")
        print(f"memory of the ps: {taken / 2**30:.2f} GiB more than before, {taken / there:.0f} bytes a row\n")
        print_row("insertions", "s", "of the processor, s", "keys before", head=True)
        clock, processor, _ = map(statistics.median, zip(*found, strict=True))
        print_row("half take less than", f"{clock:.3f}", f"{processor:.2f}", "")
        for clock, processor, keys in sorted(sorted(found)[-LONGEST:], key=lambda one: one[-1]):
            print_row("one of the longest", f"{clock:.3f}", f"{processor:.2f}", f"{keys:,}")
        print_save(directory, table, servers)


def make_table(rows: int, devices: Sequence[str], slots: Mapping[str, float]) -> Table:
    """Return a table whose shards have room for these rows each, with slots that begin with these values."""
    shards = []
    for number, device in enumerate(devices):
        with tf.device(device):
            shard = Shard(f"table/{number}", f"table/{number}", WIDTH, rows, constant(WIDTH, 0.5))
            shard.add_slots(slots)
            run_once(shard.reserve)
            shards.append(shard)
    return Table("table", WIDTH, shards, devices)


def inserted(table: Table, rows: int, batch: int, servers: list[TaskProcess]) -> list[Insertion]:
    """Have the callers ask for so many rows of new keys; returns their insertions."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def step(keys: Any) -> Any:
        with giving_rows():
            return tf.reduce_sum(table.look_up(keys))

    traced = step.get_concrete_function()
    for _ in range(2):
        traced(tf.zeros([1], tf.int64)).numpy()  # the first call takes longer
    pids = [server.pid for server in servers]
    calls, lock = iter(range(0, rows, batch)), threading.Lock()

    def call(caller: int) -> list[Insertion]:
        random, found = np.random.default_rng(caller), list[Insertion]()
        while True:
            with lock:
                keys = next(calls, None)
            if keys is None:
                return found
            asked = tf.constant(random.integers(-(2**62), 2**62, size=min(batch, rows - keys)))
            before, began = [processor_seconds(pid) for pid in pids], time.perf_counter()
            traced(asked).numpy()
            clock = time.perf_counter() - began
            spent = max(processor_seconds(pid) - one for pid, one in zip(pids, before, strict=True))
            found.append((clock, spent, keys))

    with ThreadPoolExecutor(CALLERS) as pool:
        return list(itertools.chain.from_iterable(pool.map(call, range(CALLERS))))


def print_save(directory: Path, table: Table, servers: list[TaskProcess]) -> None:
    """Print what a save takes, and how much more memory the ps have meanwhile."""
    save, prefix, before = Pieces(table, [""] * SERVERS).save, directory / "ckpt-1", memory_of(servers)
    began = time.perf_counter()
    most = most_meanwhile(lambda: save(str(prefix)), lambda: memory_of(servers))
    os.sync()
    seconds = time.perf_counter() - began
    size = sum(path.stat().st_size for path in directory.glob("ckpt-1.*"))
    print(
        f"\nsave: {size / 1e9:.2f} GB in {seconds:.1f} s, the disk alone {plain_seconds(directory, size):.1f} s; "
        f"the ps had at most {(most - before) / 2**20:.0f} MiB more meanwhile"
    )


def most_meanwhile(act: Callable[[], object], read: Callable[[], int]) -> int:
    """Return the most that was read while something was done."""
    with ThreadPoolExecutor(1) as pool:
        done, most = pool.submit(act), read()
        while not done.done():
            time.sleep(SAMPLE_SECONDS)
            most = max(most, read())
        done.result()
    return most


def memory_of(servers: list[TaskProcess]) -> int:
    """Return the resident memory of all ps together, in bytes."""
    return int(sum(read_memory(*server.pids).rss for server in servers) * 2**20)

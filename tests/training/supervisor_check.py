"""What the supervisor forks from: whether it is safe, what its children draw, what it costs. argv: WHAT."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

from trainer.process.warm_start import fork, warm_up, why_unsafe


def pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Private_Clean:"))) / 1024


def draw(channel: int) -> int:
    import numpy as np
    import tensorflow as tf

    os.write(channel, json.dumps([random.random(), np.random.rand(), float(tf.random.uniform([]))]).encode() + b"\n")
    return 0


def forks() -> dict[str, Any]:
    reading, writing = os.pipe()
    used = []
    for number in range(100):
        job = (lambda: draw(writing)) if number < 5 else (lambda: 0)
        os.waitpid(fork(job), 0)
        if number in (9, 99):
            used.append(pss(os.getpid()))
    os.close(writing)
    with os.fdopen(reading) as lines:
        return {"unsafe": why_unsafe(), "numbers": [json.loads(line) for line in lines], "grown": used[1] - used[0]}


def main(what: str) -> None:
    warm_up()
    import tensorflow as tf

    if what == "constant":
        tf.constant(1.0)
    elif what == "dataset":
        tf.data.Dataset.range(3)
    elif what == "channel":
        import grpc

        channel = grpc.insecure_channel("127.0.0.1:1")
        channel.subscribe(lambda state: None, try_to_connect=True)
    elif what == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(json.dumps(forks() if what == "forks" else {"unsafe": why_unsafe()}), flush=True)
    os._exit(0)


main(sys.argv[1])

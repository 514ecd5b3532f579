"""What it costs to be scraped: the speed of a tiny model while all tasks are asked each second, and while they are not.

Both sides are one training, in windows that alternate; the ratio is that of a window and the mean of those before and
after it. The client takes processor time of the same machine, which counts against the metrics. Prometheus asks each
15 s, and so costs a fifteenth. Beside it stands the processor time of the parts: of an answer, and of counting a call.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
import time
import urllib.request

from prometheus_client import REGISTRY, generate_latest

from bench.networks import free_ports
from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import TaskProcess
from trainer.telemetry.counters import Counters, MemberHealth, NewestCheckpoint
from trainer.telemetry.metrics import MetricsCollector

TASKS = 4  # a coordinator, two workers, a ps
SCRAPE_SECONDS = 15  # what the role `prometheus` has
WARM_SECONDS = 10.0
STEPS = re.compile(r"^psfleet_steps_total\{.*\} (\S+)$", re.MULTILINE)


def show(speeds: list[float], rounds: int, seconds: float) -> None:
    """Print what scraping costs the training: windows by turns without it and with it, and what an answer takes."""
    quiet, scraped = speeds[::2], speeds[1::2]
    ratios = sorted(
        speed / statistics.mean(around) for speed, around in zip(scraped, itertools.pairwise(quiet), strict=True)
    )
    print(f"A tiny model, 2 workers, 1 ps; {rounds} windows of {seconds:g} s\n")
    low, ratio, high = statistics.quantiles(ratios, n=4)
    at_rate = f"ratio at one in {SCRAPE_SECONDS} s"
    print_row("", "not asked", "all tasks each second", "ratio: median", "quartiles", at_rate, "asked", head=True)
    print_row(
        "steps/s",
        f"{statistics.median(quiet):.1f}",
        f"{statistics.median(scraped):.1f}",
        f"{ratio:.4f}",
        f"{low:.4f} - {high:.4f}",
        f"{1 - (1 - ratio) / SCRAPE_SECONDS:.4f}",
        "0.99",
    )
    answer, counted = answer_seconds(), counting_seconds()
    rate = statistics.median(quiet)
    print()
    print_row("processor time", "of one", "a second", "of one processor, %", head=True)
    print_row(
        f"an answer, each {SCRAPE_SECONDS} s",
        f"{answer * 1e3:.2f} ms",
        f"{1 / SCRAPE_SECONDS:.3f}",
        f"{100 * answer / SCRAPE_SECONDS:.3f}",
    )
    print_row(
        "counting a call, were each of one step",
        f"{counted * 1e6:.2f} µs",
        f"{rate:.0f}",
        f"{100 * counted * rate:.3f}",
    )


def main(arguments: list[str]) -> None:
    parser = parser_of("metrics", __doc__)
    parser.add_argument("--rounds", type=int, default=12, help="windows that are scraped (default: 12)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window (default: 10)")
    options = parser.parse_args(arguments)
    port = free_ports(TASKS, 27000)
    with scratch_directory() as directory:
        command = [
            *("-m", "trainer", "local", "--program", "bench.programs:Tiny", "--workers", "2", "--ps", "1"),
            *("--steps", "1000000000", "--shared-dir", str(directory), "--metrics-port", str(port)),
        ]
        task = TaskProcess("local", command, directory / "log", {})
        try:
            task.until(lambda: steps(port), "it trained")
            time.sleep(WARM_SECONDS)
            speeds = [window(port, options.seconds, bool(number % 2)) for number in range(2 * options.rounds + 1)]
        finally:
            task.process.terminate()
            task.process.wait()
    show(speeds, options.rounds, options.seconds)


def window(port: int, seconds: float, scraped: bool) -> float:
    """Return the steps per second of a window, in which all tasks are asked each second, or none is."""
    began, before = time.monotonic(), steps(port)
    while (left := began + seconds - time.monotonic()) > 0:
        if scraped:
            for number in range(TASKS):
                ask(port + number)
        time.sleep(min(left, 1.0))
    after = steps(port)
    return (after - before) / (time.monotonic() - began)


def steps(port: int) -> float:
    """Return how many steps the coordinator has seen; 0 while it doesn't answer, or has none."""
    found = STEPS.search(ask(port))
    return float(found[1]) if found else 0.0


def ask(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answered:
            return str(answered.read().decode())
    except OSError:
        return ""


def answer_seconds(times: int = 300) -> float:
    """Return the processor time of an answer with ten members, twenty metrics and what the process itself tells."""
    collector = MetricsCollector(("starting", "serving", "training", "silent", "away"), release="0" * 12)
    counters = filled_counters()
    counters.members = lambda: {f"worker-{number}": MemberHealth("training", 0.1) for number in range(10)}
    counters.checkpoint = NewestCheckpoint(100, 1.0, 1)
    counters.evaluation = 100, {f"metric_{number}": 0.5 for number in range(20)}
    collector.report_on("bench", counters)
    REGISTRY.register(collector)
    began = time.process_time()
    for _ in range(times):
        generate_latest(REGISTRY)
    return (time.process_time() - began) / times


def counting_seconds(times: int = 200_000) -> float:
    """Return the processor time of counting a call that has returned."""
    counters = filled_counters()
    began = time.process_time()
    for number in range(times):
        counters.returned(number % 10, 1, 0.01)
    return (time.process_time() - began) / times


def filled_counters() -> Counters:
    return Counters(step_examples=32, workers=[f"worker-{number}" for number in range(10)])


if __name__ == "__main__":
    main(sys.argv[1:])

"""The program of docs/input.md that writes a topic's messages to files, beside Apache Kafka: `make test-kafka`."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting import counts
from processes import MINUTE, ROOT, Runs, until

from fleet.hosts.agent import is_open
from trainer.cluster.spec import free_addresses

pytestmark = pytest.mark.timeout(600)
PYTHON = ROOT / ".cache" / "kafka" / "bin" / "python"
JARS = ROOT / ".cache" / "kafka" / "package" / "kafka"
EXAMPLES = 960  # of the program `given`
EARLY = 480  # messages that lie in the topic before anybody reads it
SEND = """
import sys
from kafka import KafkaProducer
producer = KafkaProducer(bootstrap_servers=sys.argv[1])
for number in range(*map(int, sys.argv[2:])):
    producer.send("clicks", b"%d" % number)
producer.flush()
"""


class Kafka:
    """A broker with ZooKeeper, and a topic of three partitions."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._running = directory, list[subprocess.Popen[bytes]]()
        zookeeper, port = (int(address.rpartition(":")[2]) for address in free_addresses(2))
        self.address = f"127.0.0.1:{port}"
        self._start(
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            zookeeper,
            {"dataDir": directory / "zookeeper", "clientPort": zookeeper, "clientPortAddress": "127.0.0.1"},
        )
        places = {"log.dirs": directory / "logs", "zookeeper.connect": f"127.0.0.1:{zookeeper}", "num.partitions": 3}
        alone = {"broker.id": 0, "offsets.topic.num.partitions": 3, "offsets.topic.replication.factor": 1}
        self._start("kafka.Kafka", port, {"listeners": f"PLAINTEXT://{self.address}", **places, **alone})

    def _start(self, name: str, port: int, settings: dict[str, object]) -> None:
        file, log = self.directory / f"{name}.properties", self.directory / f"{name}.log"
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="ascii")
        command = ["java", "-Xmx512m", f"-Dlog4j.configuration=file:{JARS}/config/tools-log4j.properties"]
        with log.open("w") as output:
            started = subprocess.Popen([*command, "-cp", f"{JARS}/libs/*", name, file], stdout=output, stderr=output)
        self._running.append(started)
        until(lambda: is_open("127.0.0.1", port) or started.poll() is not None, name, MINUTE, say=log.read_text)
        assert started.poll() is None, log.read_text()

    def send(self, first: int, end: int) -> None:
        subprocess.run([PYTHON, "-c", SEND, self.address, str(first), str(end)], check=True, timeout=MINUTE)

    def end(self) -> None:
        for one in reversed(self._running):
            one.terminate()
            one.wait(MINUTE)


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Kafka]:
    broker = Kafka(tmp_path)
    yield broker
    broker.end()


def page_program(address: str, place: Path) -> str:
    """Return the page's program, with small files."""
    page = (ROOT / "docs" / "input.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(import os\nimport time\nfrom kafka .*?)```", page, re.DOTALL)
    assert found
    program = found[1]
    for old, new in (
        ("broker:9092", address),
        ("/mnt/shared/clicks", str(place)),
        ("SECONDS, MESSAGES = 60, 100_000", "SECONDS, MESSAGES = 1, 100"),
    ):
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


def numbers(place: Path) -> Counter[int]:
    """Return how often a message is in files that a training reads."""
    return Counter(int(line) for file in place.glob("part-*[0-9]") for line in file.read_text().splitlines())


@contextlib.contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([PYTHON, "-c", program]) as process:
        yield process
        process.kill()


def test_messages_are_trained_though_their_program_dies_and_none_is_lost(kafka: Kafka, tmp_path: Path) -> None:
    place, program, runs = tmp_path / "clicks", page_program(kafka.address, tmp_path / "clicks"), Runs(tmp_path)
    place.mkdir()
    kafka.send(0, EARLY)
    with running(program.replace("consumer.commit()", "os._exit(3)")) as dying:
        assert dying.wait(2 * MINUTE) == 3
    [first] = place.glob("part-*")
    again = numbers(place)
    for worker in (0, 1):
        (tmp_path / f"worker-{worker}").write_text("1000", encoding="ascii")
    options = ["--input-sharding", "dynamic", "--input-new-files-seconds", "1", "--no-evaluator", "--export", "false"]
    options += ["--evaluation", "none", "--steps-per-execution", "2"]
    variables = {"FILES": f"{place}/part-*", "PACE": str(tmp_path)}
    with runs.ended(), running(program):
        training = runs.local("given:Given", "clicks", 10 * EXAMPLES, *options, **variables)
        training.search("waiting for new files of .*: 1 are trained")
        written = first.stat()
        kafka.send(EARLY, EXAMPLES)
        until(lambda: len(numbers(place)) == EXAMPLES, "all messages in files", 3 * MINUTE)
        time.sleep(2)  # a file more would be one of messages that come twice
        (place / "_END").touch()
        assert training.wait(3 * MINUTE) == 0, training.output[-6000:]
    assert first.stat() == written
    assert numbers(place) == Counter(range(EXAMPLES)) + again
    assert counts(runs, "clicks").sum(axis=0).tolist() == [float(numbers(place)[each]) for each in range(EXAMPLES)]

"""Whose error it is, in which words, and what the process exits with."""

from __future__ import annotations

import json
import signal

import pytest
from processes import MINUTE, PROGRAMS, Process, Runs, until

from trainer.tasks.local import local_cluster

pytestmark = pytest.mark.timeout(300)


def line_of(marker: str) -> int:
    lines = (PROGRAMS / "broken.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# line: {marker}"))


class Servers:
    """A worker and two ps, used by one coordinator after another."""

    def __init__(self, runs: Runs) -> None:
        self.cluster = local_cluster(1, 2)
        self._runs = runs
        for job in ("ps", "worker"):
            for index in range(len(self.cluster[job])):
                config = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
                runs.task(TF_CONFIG=config)

    def coordinate(self, program: str, run: str, cluster: dict[str, list[str]] | None = None) -> Process:
        settings = {"program": program, "run": run, "steps": 10, "shared_dir": str(self._runs.shared), "export": False}
        path = self._runs.shared / f"{run}.json"
        path.write_text(json.dumps(settings))
        config = json.dumps({"cluster": cluster or self.cluster, "task": {"type": "chief", "index": 0}})
        return self._runs.task(TF_CONFIG=config, TRAINER_SETTINGS=str(path))


@pytest.fixture(scope="module")
def servers(runs: Runs) -> Servers:
    return Servers(runs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Raises", f"broken.py:{line_of('raises')}: ValueError: the data is not where it should be"),
        ("NotCompiled", "NotCompiled.build_model returned a model that is not compiled: call model.compile"),
        ("OutOfRange", "InvalidArgumentError: indices[0] = 99 is not in [0, 8) (in the operation GatherV2)"),
        ("PythonNumber", f"broken.py:{line_of('number')}: TypeError: "),
    ],
)
def test_users_error_ends_with_78_and_names_the_line(servers: Servers, runs: Runs, name: str, expected: str) -> None:
    run = f"broken-{name}"
    process = servers.coordinate(f"broken:{name}", run)
    assert process.wait(2 * MINUTE) == 78, process.output
    status = runs.status(run)
    assert status["state"] == "failed"
    assert expected in status["message"]
    assert expected in process.output


def test_missing_program_names_where_it_was_looked_for(servers: Servers, runs: Runs) -> None:
    process = servers.coordinate("nowhere.at_all:Digits", "nowhere")
    assert process.wait(MINUTE) == 78
    message = runs.status("nowhere")["message"]
    assert "there is no module 'nowhere'" in message
    assert str(PROGRAMS) in message


def test_missing_member_is_named_while_the_coordinator_waits(servers: Servers, runs: Runs) -> None:
    [vacant] = local_cluster(1, 1)["worker"]
    cluster = {**servers.cluster, "worker": [*servers.cluster["worker"], vacant]}
    process = servers.coordinate("trainer.examples.digits:Digits", "waits", cluster)
    message = f"no answer from worker-1 ({vacant})"
    process.search(f"waiting for members: no answer from worker-1 \\({vacant}\\)$")
    until(lambda: runs.status("waits")["message"] == message, message)
    assert runs.status("waits")["state"] == "waiting"
    process.send(signal.SIGTERM)
    assert process.wait(MINUTE) == 143
    assert runs.status("waits")["state"] == "stopped"

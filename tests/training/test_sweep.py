"""A sweep goes on by itself: past a point that fails and a coordinator that dies, on the same servers, to its end."""

from __future__ import annotations

import json

import pytest
from processes import MINUTE, Process, Runs, kill, last_json, until

from trainer.cluster.spec import free_addresses

pytestmark = pytest.mark.timeout(400)
SELECTION = {
    "program": "rated:Rated",
    "program_args": {"units": 2},
    "sweep": {"name": "rates", "attempt": 1, "points": [{"rate": 0.1}, {"rate": -1}, {"rate": 0.2}]},
}


def test_a_sweep_trains_its_points_one_after_the_other(runs: Runs) -> None:
    addresses = free_addresses(3)
    jobs = {job: [address] for job, address in zip(("chief", "worker", "ps"), addresses, strict=True)}
    settings = runs.shared / "sweep-settings.json"
    settings.write_text(json.dumps({"program": "not_there:P", "steps": 30, "shared_dir": str(runs.shared / "swept")}))
    (runs.shared / "swept").mkdir()
    (runs.shared / "swept" / "selection.json").write_text(json.dumps(SELECTION))

    def environment(job: str) -> dict[str, str]:
        cluster = {"cluster": jobs, "task": {"type": job, "index": 0}}
        return {"TF_CONFIG": json.dumps(cluster), "TRAINER_SETTINGS": str(settings)}

    # Nothing starts these servers again.
    servers = [runs.task(**environment(job)) for job in ("ps", "worker")]
    evaluator = runs.script("-m", "trainer", **environment("evaluator"))
    chief = runs.script("-m", "trainer", **environment("chief"))
    chief.search(r"run rates-1 finished: rated:Rated trained to step 30", 3 * MINUTE)
    chief.search(r"sweep rates goes on with rates-3")
    until(lambda: chief.children, "the process of the third point")
    kill(chief.children[-1])
    assert chief.wait() == 0, chief.output
    assert "run rates-2 failed: " in chief.output
    for process in (*servers, evaluator):
        assert process.wait(MINUTE) == 0, process.output

    asked = Process(["-m", "trainer", "sweep", "--json", "--settings", str(settings)])
    assert asked.wait() == 0, asked.output
    answer = last_json(asked.output)
    assert (answer["over"], answer["evaluated"]) == (True, True)
    points = answer["points"]
    assert [(point["run"], point["state"]) for point in points] == [
        ("rates-1", "finished"),
        ("rates-2", "failed"),
        ("rates-3", "finished"),
    ]
    assert [point["program_args"] for point in points] == [{"units": 2, "rate": rate} for rate in (0.1, -1, 0.2)]
    assert "a rate of -1.0 leads away from the minimum" in points[1]["message"]
    for point in (points[0], points[2]):
        assert (point["step"], point["evaluated_step"], list(point["evaluation"])) == (30, 30, ["loss"])
        assert 0 < point["goodput"] <= 1

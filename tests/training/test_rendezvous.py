"""A member that trains in step, while the others are missing."""

from __future__ import annotations

import json
import signal

from processes import Runs


def test_member_that_waits_for_the_chief_names_it_and_can_be_stopped(runs: Runs) -> None:
    # Port 1 answers no call.
    jobs = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    settings = {"program": "ids:Ids", "run": "chiefless", "strategy": "multi_worker_mirrored"}
    path = runs.shared / "chiefless.json"
    path.write_text(json.dumps({**settings, "shared_dir": str(runs.shared)}))
    config = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}})
    process = runs.start(["-m", "trainer", "--settings", str(path)], TF_CONFIG=config)
    process.search(r"waiting for members: no answer from chief-0 \(127\.0\.0\.1:1\)$")
    process.send(signal.SIGTERM)
    assert process.wait(deadline=20) == 143, process.output
    assert not runs.directory("chiefless").exists()

"""The proof of a release builds the program's model as the coordinator would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import MINUTE, PROGRAMS, ROOT, Runs, run_check

from trainer.core.failures import FINISHED, USER_ERROR

pytestmark = pytest.mark.timeout(300)


def test_a_model_is_built_in_its_strategys_scope_or_refused_with_the_programs_own_lines() -> None:
    found = run_check("build_check.py", CUDA_VISIBLE_DEVICES="-1")
    good = {name.split()[0]: answer for name, answer in found.items() if name.endswith("Good")}
    assert [(code, out) for code, out, *_ in good.values()] == [(FINISHED, "its model is built\n")] * 4
    assert {name: strategy for name, (*_, strategy, _) in good.items()} == {
        "parameter_server": "ParameterServerStrategyV2",
        "multi_worker_mirrored": "MirroredStrategy",
        "mirrored": "MirroredStrategy",
        "one_device": "OneDeviceStrategy",
    }
    assert good["parameter_server"][-1] is True

    code, _, err, *_ = found["parameter_server Fails"]
    assert code == USER_ERROR
    lines = err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert re.search(r"build_model failed: \S+build_check\.py:\d+: KeyError: 'no such column'", lines[0])
    assert [line.split(", in ")[1] for line in lines if "File" in line] == ["build_model"]
    assert "release_build_proof: false" in lines[-1]
    assert found["parameter_server Leaves"][0] == USER_ERROR
    assert "no data directory" in found["parameter_server Leaves"][2]
    assert found["parameter_server NotCompiled"][0] == USER_ERROR
    assert "not compiled" in found["parameter_server NotCompiled"][2]
    assert found["parameter_server Three"][0] == FINISHED
    assert found["parameter_server Three"][-1] is True
    assert found["parameter_server Refused"][0] == USER_ERROR
    assert "looks at a whole table, and sequential_1/table/embeddings is split" in found["parameter_server Refused"][2]
    assert found["parameter_server NoData"][0] == USER_ERROR
    assert "train_dataset failed: " in found["parameter_server NoData"][2]
    assert found["parameter_server Asks"][:2] == [FINISHED, "its model is built\n"]
    assert found["parameter_server AsksAndIsCopied"][0] == USER_ERROR
    assert "the program's layers items ask for dynamic tables" in found["parameter_server AsksAndIsCopied"][2]
    code, out, *_ = found["parameter_server Enormous"]
    assert code is None
    assert out.startswith("not proven: build_model: it needs more memory than there is")


def test_the_command_refuses_a_program_that_cannot_be_built(runs: Runs, tmp_path: Path) -> None:
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"program": "unbuildable:Unbuildable", "shared_dir": str(tmp_path)}))
    arguments = ["-m", "trainer", "check", "program", "--build", "--settings", str(settings)]
    check = runs.script(*arguments, PYTHONPATH=f"{ROOT}:{PROGRAMS}", CUDA_VISIBLE_DEVICES="-1")
    assert check.wait(2 * MINUTE) == USER_ERROR
    assert "proven: release programs, program unbuildable:Unbuildable" in check.output
    assert re.search(r"^error: .*unbuildable\.py:\d+: ValueError: no such column$", check.output, re.MULTILINE)

"""The words for what a run does are the same everywhere."""

from __future__ import annotations

import json

import pytest

from trainer.core.settings.config import Config
from trainer.core.states import Phase, RunState
from trainer.telemetry.goodput import COUNTED


def test_a_state_is_its_word_in_records_and_messages() -> None:
    assert json.dumps({"state": RunState.TRAINING}) == '{"state": "training"}'
    assert f"{RunState.TRAINING} {RunState.TRAINING!s}" == "training training"
    assert RunState("training") is RunState.TRAINING == "training"


def test_a_word_that_is_none_is_refused_and_that_of_a_record_unknown() -> None:
    with pytest.raises(ValueError, match="traning"):
        RunState("traning")
    assert RunState.read("of a later version") is RunState.UNKNOWN
    assert RunState.read("finished") is RunState.FINISHED


def test_a_run_has_ended_when_no_process_goes_on_with_it() -> None:
    assert [str(state) for state in RunState if state.ended] == ["stopped", "finished", "failed"]


def test_each_phase_has_its_place_in_the_ledger_and_its_time_out() -> None:
    assert set(COUNTED) == set(Phase)
    settings = Config(program="mine:One").as_dict()
    assert {phase for phase in Phase if f"{phase}_timeout_seconds" in settings} == set(Phase) - {Phase.WAITING}

"""What the environment says of Keras before TensorFlow is imported."""

from __future__ import annotations

import os

import pytest

from trainer.core.runtime import OF_KERAS, prepare_tensorflow


@pytest.fixture(autouse=True)
def _kept_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(
    ("name", "given"), [("KERAS_BACKEND", "torch"), ("KERAS_BACKEND", "true"), ("TF_USE_LEGACY_KERAS", "0")]
)
def test_another_keras_than_training_has_is_warned_of_and_left_out(
    name: str, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ[name] = given
    prepare_tensorflow()
    assert {each: os.environ[each] for each in OF_KERAS} == OF_KERAS
    [record] = caplog.records
    assert record.getMessage().startswith(f"{name}={given} is set, which training can't use: it counts as ")


@pytest.mark.parametrize("given", ["1", "True"])
def test_the_keras_of_training_is_no_news(given: str, caplog: pytest.LogCaptureFixture) -> None:
    os.environ["TF_USE_LEGACY_KERAS"] = given
    prepare_tensorflow()
    assert not caplog.records

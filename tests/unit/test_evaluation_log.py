"""Which step was evaluated last, and which evaluations wait for their checkpoints."""

from __future__ import annotations

from trainer.training.loop.evaluation_log import EvaluationLog

METRICS = {"loss": 0.5}


def test_an_earlier_processs_evaluation_is_done_and_its_metrics_are_unknown() -> None:
    log = EvaluationLog(20)
    assert log.is_done(20)
    assert not log.is_done(40)
    assert log.metrics(20) == {}


def test_own_metrics_are_known_for_their_step_alone() -> None:
    log = EvaluationLog()
    log.evaluated(20, METRICS, is_kept=False)
    assert log.is_done(20)
    assert log.metrics(20) == METRICS
    assert log.metrics(21) == {}


def test_a_run_that_goes_back_forgets_a_later_evaluation() -> None:
    log = EvaluationLog(40)
    log.restored(20)
    assert not log.is_done(40)


def test_a_run_that_goes_on_at_the_evaluated_step_has_it_done() -> None:
    log = EvaluationLog(40)
    log.restored(40)
    assert log.is_done(40)


def test_metrics_wait_for_their_checkpoint_and_earlier_ones_wait_no_more() -> None:
    log = EvaluationLog()
    for step in (20, 40, 60):
        log.evaluated(step, {"loss": step / 10}, is_kept=True)
    assert log.checkpointed(40) == {"loss": 4.0}
    assert log.checkpointed(40) is None
    assert log.checkpointed(20) is None
    assert log.checkpointed(60) == {"loss": 6.0}


def test_metrics_of_an_evaluation_that_no_checkpoint_keeps_do_not_wait() -> None:
    log = EvaluationLog()
    log.evaluated(20, METRICS, is_kept=False)
    assert log.checkpointed(20) is None


def test_changed_weights_have_no_evaluation() -> None:
    log = EvaluationLog()
    log.evaluated(20, METRICS, is_kept=True)
    log.forget(20)
    assert not log.is_done(20)
    assert log.metrics(20) == {}
    assert log.checkpointed(20) is None

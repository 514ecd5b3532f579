"""Models of Keras 3 on parameter servers, and what docs/keras3.md says of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from processes import ROOT, run_check
from test_optimizers import examine, outcomes

pytestmark = pytest.mark.timeout(800)
PAGE = ROOT / "docs" / "keras3.md"
OPTIMIZERS = outcomes(PAGE)
QUICK = {"Adam, EMA": ("3 ps",), "Muon": ("2 ps",)}
CALLBACKS = re.compile(r"^\| (?P<names>`[A-Z]\w+`(?:, `[A-Z]\w+`)*) \| (?P<outcome>works|refused): ", re.M)


def check(*parts: str, **variables: str) -> dict[str, Any]:
    found: dict[str, Any] = run_check("keras3_check.py", *parts, deadline=750, forked=True, **variables)
    return found


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return check("counts", "rows", "lazy_rows", STEPS_OF_A_ROUND="2")


@pytest.fixture(scope="module")
def counts(steps: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = steps["counts"]
    return found


@pytest.mark.parametrize("counter", ["iterations", "layer", "seeds"])
def test_no_worker_overwrites_what_another_has_counted(counts: dict[str, Any], counter: str) -> None:
    assert counts[counter] == counts["steps"]


def test_averages_of_batches_are_moved_once_a_step(counts: dict[str, Any]) -> None:
    assert counts["batches"] == pytest.approx(counts["steps"], rel=0.001)


def test_a_queue_holds_what_one_of_the_workers_has_put_there(counts: dict[str, Any]) -> None:
    assert counts["queue"] == [1]
    assert counts["place"] in range(3)


def test_a_metric_counts_each_example_once(counts: dict[str, Any]) -> None:
    assert counts["examples"] == counts["steps"] * 8


def test_sgd_asks_for_the_rows_of_its_batch_and_changes_those(steps: dict[str, Any]) -> None:
    operations = {"ResourceGather": 2, "ResourceScatterSub": 2, "ResourceScatterUpdate": 0}
    assert steps["rows"] == {"shards": 2, "read": 0, **operations}


def test_a_lazy_adam_reads_and_writes_the_rows_of_its_batch(steps: dict[str, Any]) -> None:
    """Of each shard: the lookup's, and those of the table and of two slots."""
    operations = {"ResourceGather": 2 + 6, "ResourceScatterSub": 0, "ResourceScatterUpdate": 6}
    assert steps["lazy_rows"] == {"shards": 2, "read": 0, **operations}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return check("models")["models"]


def test_a_train_step_of_ones_own_trains_a_model_that_its_input_builds(models: dict[str, Any]) -> None:
    own = models["own_step"]
    assert own["metrics"] == ["highest", "loss"]
    assert own["loss"] < 0.2
    assert own["same"] < 1e-5


def test_two_optimizers_train_and_are_restored(models: dict[str, Any]) -> None:
    found = models["two_optimizers"]
    assert (found["metrics"], found["counted"]) == (["judges", "makes"], [8, 8])


def test_each_optimizers_averages_are_taken_for_the_weights_that_it_trains(models: dict[str, Any]) -> None:
    assert models["two_optimizers"]["averaged"] == 8 * [True]
    assert models["two_optimizers"]["averages"] == 8, "an optimizer averages what another one trains"


def test_a_clone_that_stays_trainable_follows_each_workers_steps(models: dict[str, Any]) -> None:
    found = models["follows"]
    assert found["step"] == 100
    assert found["seen"] == pytest.approx([100, 100], rel=0.01)


def test_what_optimizers_keep_is_not_of_the_models_size(models: dict[str, Any]) -> None:
    counted, expected = models["two_optimizers"]["bytes"]
    assert counted == expected


def test_several_inputs_outputs_and_losses_have_names(models: dict[str, Any]) -> None:
    metrics, evaluation = models["several"]["metrics"], models["several"]["evaluation"]
    assert set(metrics) == set(evaluation) == {"loss", "size_loss", "kind_loss", "size_examples", "kind_accuracy"}
    for found, examples in ((metrics, 20 * 8), (evaluation, 4 * 8)):
        assert found["loss"] == pytest.approx(found["size_loss"] + 0.5 * found["kind_loss"], rel=1e-3)
        assert found["size_examples"] == examples


@pytest.mark.matrix
def test_a_serving_signature_is_exported() -> None:
    assert check("signature")["signature"] == ["score"]


def test_bfloat16_computes_and_float32_is_kept(models: dict[str, Any]) -> None:
    assert models["precision"] == {"step": 20, "computed": "bfloat16", "kept": ["float32"]}


@pytest.fixture(scope="module")
def same() -> dict[str, Any]:
    return check("splits", "averages")


@pytest.mark.parametrize("how", ["plain", "global_clipnorm"])
def test_a_split_table_is_trained_as_a_whole_one(same: dict[str, Any], how: str) -> None:
    assert same["splits"][how] < 1e-5


@pytest.mark.parametrize(("part", "way"), [("splits", "sidecar"), ("splits", "inline"), ("averages", "distributed")])
def test_an_evaluation_says_what_keras_says(same: dict[str, Any], part: str, way: str) -> None:
    assert same[part][way] < 1e-5


def test_averages_are_taken_for_weights_at_the_end(same: dict[str, Any]) -> None:
    assert same["averages"]["distance"] < 1e-5
    assert same["averages"]["final"]


@pytest.mark.matrix
def test_patience_outlives_a_process() -> None:
    assert check("remembered")["remembered"] == [[40, 0, 1.0], [80, 2, 1.0]]


@pytest.fixture(scope="module")
def callbacks() -> dict[str, Any]:
    return check("callbacks")["callbacks"]


@pytest.mark.matrix
def test_early_stopping_ends_the_training_with_the_best_weights(callbacks: dict[str, Any]) -> None:
    stopped = callbacks["EarlyStopping"]
    assert (stopped["step"], stopped["heard"]) == (80, ["begin", 0, 1, 2, 3, "end"])
    assert stopped["best"] == 0
    assert stopped["logs"] == ["loss", "mae", "score", "val_loss", "val_mae"]


@pytest.mark.matrix
def test_callbacks_set_the_rate(callbacks: dict[str, Any]) -> None:
    assert callbacks["ReduceLROnPlateau"] == [0.01, 0.01, 0.005, 0.0025, 0.00125]
    assert callbacks["LearningRateScheduler"] == [0.01, 0.005]


@pytest.mark.matrix
def test_callbacks_save_a_split_table_as_a_whole_one(callbacks: dict[str, Any]) -> None:
    assert callbacks["ModelCheckpoint"] == {"kept": ["1.weights.h5", "2.weights.h5"], "distance": 0}
    assert callbacks["ModelCheckpoint, .keras"] == 0


@pytest.mark.matrix
def test_callbacks_write(callbacks: dict[str, Any]) -> None:
    assert callbacks["CSVLogger"] == 4
    assert set(callbacks["TensorBoard"]) >= {"train"}
    assert callbacks["LambdaCallback"] == [0, 1, 2]
    assert callbacks["RemoteMonitor"] == 3
    assert set(callbacks["History"]) >= {"loss", "val_loss"}


@pytest.mark.matrix
def test_a_loss_that_is_no_number_ends_the_training(callbacks: dict[str, Any]) -> None:
    assert callbacks["TerminateOnNaN"] < 100


REFUSED = {
    "strategy": "strategy: one_device is not for models of Keras 3",
    "api": "set api to custom_loop",
    "lazy_optimizers": "lazy_optimizers: Mine can't change the rows of a step alone",
    "exact": "take distributed",
    "initial_weights": "call model.load_weights in build_model",
    "run_eagerly": "run_eagerly=True, which workers cannot do",
    "gradient_accumulation_steps": "Add them up within a step",
    "ema_overwrite_frequency": "averages are taken for weights at the end",
    "LossScaleOptimizer": "take mixed_bfloat16",
    "MultiOptimizer": "take one optimizer, or a train_step with several",
    "ScheduleFreeAdamW": "workers would overwrite each other's",
    "clipnorm": "take global_clipnorm",
    "Adafactor": "Set partitioner to none",
    "made before": "make it in build_model",
    "constraint": "table/embeddings has a constraint",
    "stateful": "is stateful: it would go on from a batch of another worker",
    "the other's metric": "write keras.metrics.MeanAbsoluteError instead of tf.keras.metrics.MeanAbsoluteError",
    "the other's loss": "write keras.losses.MeanSquaredError instead of tf.keras.losses.MeanSquaredError",
    "the other's loss, of tf_keras": "write tf.keras.losses.MeanSquaredError instead of keras.losses",
    "the other's callback": "it must be a list of keras.callbacks.Callback",
    "ProgbarLogger": "the log and `fab status` say how far the training is",
    "BackupAndRestore": "the trainer's checkpoints do that",
    "SwapEMAWeights": "averages are taken for weights at the end of the training",
    "on_batch_end": "use on_epoch_end",
    "save_freq": 'pass save_freq="epoch"',
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, Any]:
    return check("refusals")["refusals"]


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_with_the_fix(refusals: dict[str, Any], what: str) -> None:
    assert REFUSED[what] in refusals[what]


def test_a_fix_is_one(refusals: dict[str, Any]) -> None:
    assert refusals["clipnorm, whole"] == "trained"


# The tables of the page


def test_the_page_has_each_optimizer() -> None:
    assert sorted(OPTIMIZERS) == sorted(run_check("matrix_check.py", "--names", "matrix3"))


@pytest.mark.parametrize("case", QUICK)
def test_an_optimizer_goes_on_with_another_number_of_ps(case: str) -> None:
    examine(f"keras3 {case}", OPTIMIZERS[case], QUICK[case])


@pytest.mark.matrix
@pytest.mark.parametrize("case", sorted(OPTIMIZERS))
def test_every_optimizer_does_in_every_layout(case: str) -> None:
    examine(f"keras3 {case}", OPTIMIZERS[case])


def outcomes() -> dict[str, str]:
    """What docs/keras3.md says of each callback."""
    rows = CALLBACKS.finditer(PAGE.read_text(encoding="utf-8"))
    return {name: row["outcome"] for row in rows for name in re.findall(r"\w+", row["names"])}


def test_the_page_has_each_callback() -> None:
    assert sorted(outcomes()) == run_check("keras3_check.py", "named")["named"]


@pytest.mark.matrix
def test_those_work_that_the_page_says(callbacks: dict[str, Any]) -> None:
    works = {name.partition(",")[0] for name in callbacks} | {"Callback"}
    assert {name for name, outcome in outcomes().items() if outcome == "works"} == works

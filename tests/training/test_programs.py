"""Programs as people write them: how a run ends, and what docs/programs.md says of each thing that a model may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_check

from trainer.core import memory_limit
from trainer.core.failures import UserError

pytestmark = pytest.mark.timeout(1250)


def check(part: str) -> dict[str, Any]:
    """Train the programs of this part in a process of its own: each training leaves a hundred threads behind."""
    return run_check("programs_check.py", part, deadline=600)


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    return check("ends")


def test_a_finished_run_has_its_export(ends: dict[str, Any]) -> None:
    assert ends["with_signature"] == {"state": "finished", "step": 10, "message": "", "export": True}


def test_an_export_can_be_turned_off(ends: dict[str, Any]) -> None:
    assert ends["off"] == {"state": "finished", "step": 10, "message": "", "export": False}


def test_a_run_is_finished_though_its_export_fails(ends: dict[str, Any]) -> None:
    broken = ends["broken"]
    assert (broken["first"]["state"], broken["first"]["export"]) == ("finished", False)
    assert "the signature is broken" in broken["first"]["message"]
    assert "fab export --run test" in broken["first"]["message"]
    assert broken["again"] == broken["first"]


def test_a_run_is_exported_later(ends: dict[str, Any]) -> None:
    broken = ends["broken"]
    assert broken["codes"] == [78, 78, 0]
    assert (broken["written"], broken["message"]) == (True, "")
    assert broken["export"].endswith("/runs/test/export")


def test_a_model_without_call_says_what_to_do(ends: dict[str, Any]) -> None:
    assert ends["without_call"].startswith("the model could not be exported at the end of the run: OnlyTrains has no c")
    assert ends["without_call"].endswith("Correct that, or set export: false")


def test_an_export_that_was_cut_off_is_made_but_not_for_ever(ends: dict[str, Any]) -> None:
    assert (ends["cut_off_once"]["codes"], ends["cut_off_once"]["exported"]) == ([0], True)
    assert (ends["cut_off_again"]["codes"], ends["cut_off_again"]["exported"]) == ([0], False)
    assert "3 processes have ended while they exported" in ends["cut_off_again"]["message"]
    assert ends["cut_off_again"]["record"]["ended"]


def test_an_export_that_was_cut_off_is_not_made_where_it_is_turned_off_since(ends: dict[str, Any]) -> None:
    assert (ends["cut_off_and_off"]["codes"], ends["cut_off_and_off"]["exported"]) == ([0], False)


def test_an_export_that_was_cut_off_waits_for_the_coordinator_that_has_the_run(ends: dict[str, Any]) -> None:
    assert (ends["cut_off_and_led"]["codes"], ends["cut_off_and_led"]["exported"]) == ([75], False)
    assert not ends["cut_off_and_led"]["record"]["ended"]


def test_a_model_too_large_for_the_chief_is_refused_with_the_sizes(ends: dict[str, Any]) -> None:
    assert "GiB of variables, and this host lets it take 0.0 GiB: set export: false" in ends["no_room"]


def test_a_model_that_fits_the_chief_but_not_beside_others_is_exported_later(ends: dict[str, Any]) -> None:
    assert (ends["no_room_left"]["state"], ends["no_room_left"]["export"]) == ("finished", False)
    assert "this host lets it take 0.0 GiB: when others on it have ended" in ends["no_room_left"]["message"]


@pytest.mark.parametrize(
    ("own", "limits", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000000", "a/b/memory.max": "max"}, 1000000),
        ("4:memory:/slurm/job\n0::/\n", {"memory/slurm/job/memory.limit_in_bytes": "2000000"}, 2000000),
        # In a container the group's own name is that of the machine outside.
        ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "3000000"}, 3000000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8192000),
    ],
)
def test_the_limit_of_control_groups_of_either_version_counts(
    tmp_path: Path, own: str, limits: dict[str, str], limit: int
) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 8000 kB\n", "proc/self/cgroup": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, text in limits.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    assert memory_limit.memory_limit(tmp_path) == limit


def test_room_is_that_of_the_machine_or_of_less(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < memory_limit.memory_limit() <= total
    assert 0 < memory_limit.memory_available() < total
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: 2**30)
    memory_limit.check_room(2**30, "the export", "do that")
    monkeypatch.setattr(memory_limit, "memory_available", lambda: 2**29)
    memory_limit.check_room(2**30, "the export", "do that")
    with pytest.raises(UserError, match=r"1.0 GiB of variables, .* 0.5 GiB"):
        memory_limit.check_room(2**30, "the export", "do that", now=True)
    with pytest.raises(UserError, match=r"the export holds .* 1.5 GiB of variables, .* 1.0 GiB: do that"):
        memory_limit.check_room(3 * 2**29, "the export", "do that")


# docs/programs.md


@pytest.fixture(scope="module")
def features() -> dict[str, Any]:
    return {name: found for part in ("optimizers", "layers", "outputs") for name, found in check(part).items()}


def test_gradients_of_parts_of_a_batch_add_up_to_the_batchs(features: dict[str, Any]) -> None:
    assert features["accumulation"]["distance"] < 1e-5 < 0.01 < features["accumulation"]["moved"]


@pytest.mark.parametrize("clip", ["global_clipnorm", "second_clipnorm"])
def test_clipping_does_not_depend_on_how_a_table_is_split(features: dict[str, Any], clip: str) -> None:
    """Nor do `clipnorm` and `clipvalue`: test_optimizers.py tries the first here, and both by `make matrix`."""
    assert features[clip] < 1e-5


def test_a_split_table_is_left_out_of_weight_decay(features: dict[str, Any]) -> None:
    assert features["excluding"] < 1e-5


def test_a_constraint_holds_and_is_refused_where_a_weight_is_split(features: dict[str, Any]) -> None:
    bound, unbound = features["constrained"]["norms"]
    assert features["constrained"]["distance"] < 1e-5
    assert bound < 0.301 < unbound
    assert "has a constraint and is split over the ps" in features["split_constraint"]
    assert "Set partitioner to none" in features["split_constraint"]


def test_averages_that_overwrite_weights_are_refused(features: dict[str, Any]) -> None:
    for overwriting in ("SGD, every 4", "RMSprop, EMA"):
        assert "averages are taken for weights at the end" in features["overwriting"][overwriting]
    assert features["overwriting"]["RMSprop"] == "trained"


def test_two_optimizers_train_and_are_restored(features: dict[str, Any]) -> None:
    gan = features["two_optimizers"]
    assert gan["metrics"] == ["judges", "makes"]
    assert gan["steps"] == [4, 8, 8]
    assert gan["slots"] >= 8  # two moments for each of four weights
    assert gan["export"]


def test_a_model_that_is_compiled_with_a_list_of_optimizers_trains_with_each(features: dict[str, Any]) -> None:
    assert features["wide_and_deep"]["distance"] < 1e-5 < 0.01 < features["wide_and_deep"]["moved"]


def test_a_model_whose_call_takes_other_than_the_data_is_evaluated_and_exported(features: dict[str, Any]) -> None:
    assert features["from_noise"] == {"evaluation": ["judged"], "made": [3, 2], "trained": True}


def test_what_the_evaluator_would_refuse_is_refused_before_the_first_step(features: dict[str, Any]) -> None:
    assert "returns labels, which is no metric's and no number" in features["labels"]["why"]
    assert features["labels"]["saved"] == []


def test_rows_of_a_split_weight_are_taken_as_those_of_a_whole_one(features: dict[str, Any]) -> None:
    assert features["taken"] < 1e-6


def test_what_is_computed_of_a_split_weight_and_written_to_it_is_not_lost(features: dict[str, Any]) -> None:
    assert features["counted"] == 100 * 8 * 2 * 0.5


def test_a_layer_that_replaces_weights_is_refused(features: dict[str, Any]) -> None:
    assert "is a SpectralNormalization, which replaces weights" in features["spectral"]


def test_split_tables_train_in_bfloat16_and_are_restored_on_another_number_of_ps(features: dict[str, Any]) -> None:
    mixed = features["mixed"]
    first, tried, exported, again, *_ = mixed["shards"]
    assert (first, tried, exported, again) == ([2, 2, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1])
    assert mixed["kept"] == ["<dtype: 'float32'>"]
    before, after = mixed["losses"]
    assert after < min(before, 0.02)
    assert mixed["export"]


def test_float16_is_refused_with_what_to_take_instead(features: dict[str, Any]) -> None:
    assert "take the policy mixed_bfloat16" in features["float16"]


def test_weights_of_classes_count(features: dict[str, Any]) -> None:
    assert features["weighted"]["bias"] > 1  # the other class has no weight
    assert features["weighted"]["evaluation"]["accuracy"] == 1


def test_layers_that_were_adapted_look_up_on_workers_and_are_restored_and_exported(features: dict[str, Any]) -> None:
    adapted = features["adapted"]
    assert adapted["loss"] < 0.05
    assert adapted["served"] < 0.05
    assert adapted["begun"] == 5


@pytest.mark.parametrize("kind", ["ragged", "padded"])
def test_a_recurrent_net_trains_on_rows_of_any_length_and_is_exported(features: dict[str, Any], kind: str) -> None:
    loss, exported = features["sentences"][kind]
    assert loss < 1
    assert exported


def test_a_loss_that_a_step_calls_itself_is_the_batchs_mean(features: dict[str, Any]) -> None:
    assert features["own_loss"] == pytest.approx(1.0)


def test_several_inputs_outputs_and_losses_have_names(features: dict[str, Any]) -> None:
    several = features["several"]
    names = {"loss", "size_loss", "kind_loss", "size_examples", "kind_accuracy"}
    assert set(several["metrics"]) == set(several["evaluation"]) == names
    for metrics in (several["metrics"], several["evaluation"]):
        assert metrics["loss"] == pytest.approx(metrics["size_loss"] + 0.5 * metrics["kind_loss"], rel=1e-3)
    assert several["inputs"] == ["number", "word"]


def test_a_metric_of_ones_own_counts_each_example_once(features: dict[str, Any]) -> None:
    assert features["several"]["metrics"]["size_examples"] == 20 * 8
    assert features["several"]["evaluation"]["size_examples"] == 4 * 8


def test_layers_with_state_keep_it(features: dict[str, Any]) -> None:
    several = features["several"]
    assert several["normal"] == [12.0, 4.0]  # adapted in build_model
    assert all(abs(value - 1) > 0.01 for value in several["moving_variance"])
    assert several["moving_mean"] in several["exported_mean"]

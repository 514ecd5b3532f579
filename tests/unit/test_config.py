"""The run settings: what is refused, and in which words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.core.settings.config import Config, ConfigError, absolute_path

PROGRAM = "trainer.examples.digits:Digits"


def refused(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"program": PROGRAM, **settings})
    return str(caught.value)


def test_only_the_program_is_required() -> None:
    assert Config.from_dict({"program": PROGRAM}) == Config(program=PROGRAM)
    with pytest.raises(ConfigError, match=r"program is missing: name what to train as package\.module:Name"):
        Config.from_dict({})


def test_unknown_key_names_the_one_that_was_meant() -> None:
    assert "unknown key 'chekpoint_steps' in the run settings: did you mean 'checkpoint_steps'?" in refused(
        chekpoint_steps=3
    )


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("loss", "min"),
        ("mean_absolute_error", "min"),
        ("sparse_categorical_crossentropy", "min"),
        ("accuracy", "max"),
        ("sparse_top_k_categorical_accuracy", "max"),
        ("auc", "max"),
        ("f1_score", "max"),
    ],
)
def test_the_metrics_name_says_which_is_the_best(metric: str, mode: str) -> None:
    config = Config(program=PROGRAM, checkpoints_kept_best=1, checkpoints_best_metric=metric)
    assert config.best_mode == mode
    other = {"min": "max", "max": "min"}[mode]
    assert config.replace(checkpoints_best_mode=other).best_mode == other


@pytest.mark.parametrize("metric", ["score", "accuracy_loss"])
def test_which_is_the_best_must_be_said_where_the_name_does_not_say_it(metric: str) -> None:
    settings = {"checkpoints_kept_best": 1, "checkpoints_best_metric": metric}
    assert refused(**settings) == (
        f"checkpoints_best_mode: auto can't tell by the name whether the least or the greatest {metric!r} is the best: "
        "write min or max"
    )
    Config.from_dict({"program": PROGRAM, **settings, "checkpoints_best_mode": "max"})
    Config.from_dict({"program": PROGRAM, **settings, "checkpoints_kept_best": 0})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("batch_size", "; docs/run-settings.md lists them. A parameter of the program itself belongs in program_args"),
        ("max_steps", ": did you mean 'steps' or 'epoch_steps'?"),
        ("STEPS", ": did you mean 'steps'?"),
        ("epoch_step", ": did you mean 'epoch_steps'?"),
    ],
)
def test_an_unknown_key_gets_few_words(key: str, message: str) -> None:
    assert refused(**{key: 1}) == f"unknown key {key!r} in the run settings{message}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", "3000", "steps: expected a whole number, not '3000'; write it without quotes"),
        ("steps", "3,000", "steps: expected a whole number, not '3,000'; write 3000"),
        ("checkpoint_seconds", "10m", "expected a number, not '10m'; it is in seconds: write 600"),
        ("checkpoint_seconds", "1.5 hours", "expected a number, not '1.5 hours'; it is in seconds: write 5400"),
        ("checkpoint_seconds", "500ms", "expected a number, not '500ms'"),
        ("run", 2024, 'run: expected a text, not 2024; write it in quotes, "2024"'),
        ("export", "Yes", "export: expected true or false, not 'Yes'; write true without quotes"),
        ("export", "off", "export: expected true or false, not 'off'; write false without quotes"),
        ("export", "maybe", "export: expected true or false, not 'maybe'"),
        ("notify_webhook", "example.org", "and its name into notify_webhook_secret), not 'example.org'"),
        ("steps", True, "steps: expected a whole number, not True"),
        ("steps", 1.5, "steps: expected a whole number, not 1.5"),
        ("steps", 0, "steps: must be at least 1, not 0"),
        (
            "steps_per_execution",
            "many",
            "steps_per_execution: must be a whole number of at least 1, or \"auto\", not 'many'",
        ),
        ("steps_per_execution", 0, "steps_per_execution: must be a whole number"),
        ("steps_per_execution", None, "steps_per_execution: expected a whole number or a text, not None"),
        ("input_sharding", False, "input_sharding: expected a text, not False; YAML reads off, no, on and yes as that"),
        ("checkpoint_seconds", "soon", "checkpoint_seconds: expected a number, not 'soon'"),
        ("checkpoint_seconds", -1, "checkpoint_seconds: must be 0 (disabled) or more, not -1"),
        ("checkpoints_kept", 2, "checkpoints_kept: must be at least 3"),
        ("checkpoints_kept_best", -1, "checkpoints_kept_best: must be 0 (none but the newest) or more, not -1"),
        ("checkpoints_best_metric", "", "checkpoints_best_metric: must name a metric of the evaluation"),
        ("checkpoints_best_mode", "most", "checkpoints_best_mode: must be one of auto, min, max, not 'most'"),
        ("checkpoints_kept_hours", -1, "checkpoints_kept_hours: must be 0 (none besides) or more, not -1"),
        ("initial_weights", "weights.h5", "initial_weights: must be empty, RUN@STEP, or an absolute path"),
        ("run", "a/b", "run: is the name of a directory"),
        ("run", "..", "run: is the name of a directory"),
        ("run", "", "run: is the name of a directory"),
        ("run", "x\n", "run: is the name of a directory"),
        ("program", "digits", "program: must look like package.module:Name"),
        ("program", "my-nets:Net", "Rename the module my-nets (its file or directory) to my_nets"),
        ("program", "nets.2nd:Net", "Rename the module 2nd (its file or directory) to _2nd"),
        ("program", "nets:My-Net", "program: 'nets:My-Net' has 'My-Net', which Python can't import by name"),
        ("program", "nets/net.py:Net", "is a path: write the module with dots and without .py, as nets.net:Net"),
        ("program", "nets/net.py:Net", "; where release_program is the folder nets, as net:Net"),
        ("program", "net.py:Net", "is a path: write the module with dots and without .py, as net:Net"),
        ("shared_dir", "runs", "shared_dir: must be an absolute path"),
        ("shared_dir", "gs://bucket/runs", "shared_dir is 'gs://bucket/runs': the run directory lies in a file system"),
        ("local_run_dir", "yes", "local_run_dir: expected true or false, not 'yes'"),
        (
            "strategy",
            "mirorred",
            "strategy: must be one of parameter_server, multi_worker_mirrored, mirrored, one_device",
        ),
        ("strategy", "tpu", "there is no tpu: a TPU is driven by TPUStrategy"),
        ("api", "estimator", "api: must be one of custom_loop, fit, not 'estimator'"),
        ("epoch_steps", -1, "epoch_steps: must be 0 (the whole run is one epoch) or more, not -1"),
        ("evaluation", "all", "evaluation: must be one of sidecar, inline, distributed, exact, none, not 'all'"),
        ("input_sharding", "files", "input_sharding: must be one of program, auto, file, data, off, dynamic, not"),
        ("input", "remote", "input: must be one of local, service, not 'remote'"),
        ("input_position", "end", "input_position: must be one of beginning, exact, not 'end'"),
        ("partitioner", "min", "partitioner: must be one of min_size, max_size, fixed_shards, none, not 'min'"),
        ("elastic", "yes", "elastic: expected true or false, not 'yes'"),
        ("heartbeat_timeout_seconds", 1, "heartbeat_timeout_seconds: must be at least 3"),
        ("lease_seconds", 1, "lease_seconds: must be at least 10"),
        ("saving_timeout_seconds", 0, "saving_timeout_seconds: must be more than 0, not 0"),
        ("seed", -1, "seed: must be null or between 0 and 2147483647"),
    ],
)
def test_wrong_value_is_refused(key: str, value: object, expected: str) -> None:
    assert expected in refused(**{key: value})


def test_whole_number_is_a_number() -> None:
    assert Config.from_dict({"program": PROGRAM, "checkpoint_seconds": 60}).checkpoint_seconds == 60


def test_a_run_without_any_checkpoint_is_refused() -> None:
    assert "a crash would lose the whole run" in refused(checkpoint_steps=0, checkpoint_seconds=0)


def test_sharding_policy_under_parameter_server_is_refused() -> None:
    assert "input_sharding: 'file' does nothing under parameter_server" in refused(input_sharding="file")
    Config.from_dict({"program": PROGRAM, "input_sharding": "file", "strategy": "multi_worker_mirrored"})


@pytest.mark.parametrize("sharding", ["off", "dynamic"])
@pytest.mark.parametrize("strategy", ["parameter_server", "mirrored", "one_device", "central_storage"])
def test_the_data_service_takes_two_shardings(strategy: str, sharding: str) -> None:
    settings = {"input": "service", "input_sharding": sharding, "strategy": strategy}
    assert Config.from_dict({"program": PROGRAM, **settings}).input == "service"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "input: service: input_sharding is 'program'; expected dynamic"),
        ({"input_sharding": "file"}, "input: service: input_sharding is 'file'; expected dynamic"),
        ({"input_sharding": "off", "strategy": "multi_worker_mirrored"}, "each member reads for itself"),
        ({"input_sharding": "off", "local_run_dir": True}, "give all hosts a shared path, or leave input out"),
        ({"input_sharding": "off", "input_position": "exact"}, "know no position to go on from: leave input_position"),
        (
            {"input": "local", "input_sharding": "dynamic", "strategy": "mirrored"},
            "input_sharding: dynamic .* strategy mirrored has none.* set input: service",
        ),
    ],
)
def test_what_the_data_service_can_not_do_is_refused(settings: dict[str, object], expected: str) -> None:
    assert re.search(expected, refused(**{"input": "service", **settings}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"input_no_files_seconds": 9}, "input_no_files_seconds is 9, and input_new_files_seconds 0"),
        ({"input_new_files_seconds": 9}, "input_sharding is 'program', input local: set input_sharding: dynamic"),
        (
            {"input_new_files_seconds": 9, "input": "service", "input_sharding": "dynamic"},
            "input_new_files_seconds is 9.* input service: set input_sharding: dynamic and input: local",
        ),
    ],
)
def test_new_files_are_for_workers_that_are_given_them(settings: dict[str, object], expected: str) -> None:
    assert re.search(expected, refused(**settings))


def test_an_exact_position_without_parameter_servers_is_refused() -> None:
    message = refused(input_position="exact", strategy="multi_worker_mirrored")
    assert "input_position: exact is for workers of parameter servers" in message
    assert Config.from_dict({"program": PROGRAM, "input_position": "exact"}).input_position == "exact"


def test_incremental_saves_without_parameter_servers_are_refused() -> None:
    message = refused(incremental_saves=3, strategy="mirrored")
    assert "incremental_saves: it is for variables on parameter servers" in message
    assert Config.from_dict({"program": PROGRAM, "incremental_saves": 3}).incremental_saves == 3


def test_a_strategy_whose_members_read_the_run_directory_needs_a_shared_path() -> None:
    settings = {"local_run_dir": True, "strategy": "multi_worker_mirrored"}
    assert "with strategy multi_worker_mirrored every member reads the run directory" in refused(**settings)
    Config.from_dict({"program": PROGRAM, "local_run_dir": True, "strategy": "mirrored"})


@pytest.mark.parametrize("url", ["gs://bucket/runs", "s3://bucket", "file:///srv/trainer"])
def test_a_directory_of_the_command_line_is_no_url(url: str) -> None:
    assert absolute_path("/srv/trainer") == "/srv/trainer"
    assert absolute_path("runs") == str(Path("runs").absolute())
    with pytest.raises(ConfigError, match=f"shared_dir is '{url}'.*Give an absolute path"):
        absolute_path(url)


def test_settings_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        Config.from_dict(["steps"])  # type: ignore[arg-type]


def test_file_survives_a_round_trip(tmp_path: Path) -> None:
    config = Config(program=PROGRAM, steps=7, seed=3)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config.as_dict()))
    assert Config.from_file(path) == config


@pytest.mark.parametrize(("text", "expected"), [(None, "cannot read"), ("{", "are not JSON"), ('{"x": 1}', "'x'")])
def test_bad_file_is_named(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        Config.from_file(path)
    assert str(path) in str(caught.value)


def test_module_needs_nothing_but_python() -> None:
    """The control machine's preflight imports it."""
    script = (
        "import sys; before = set(sys.modules); import trainer.core.settings.config; "
        "print([name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert set(eval(done.stdout)) == {
        "trainer",
        "trainer.core",
        "trainer.core.settings",
        "trainer.core.settings.config",
        "trainer.core.settings.dynamic_tables",
        "trainer.core.settings.formats",
        "trainer.core.settings.parameters",
        "trainer.core.settings.possible",
        "trainer.core.settings.relations",
        "trainer.core.settings.setting",
        "trainer.core.settings.strategies",
    }

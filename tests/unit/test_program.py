"""Loading a user's program: each mistake has its message."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.programs import PROGRAMS
from trainer.core import slow_code
from trainer.core.failures import UserError
from trainer.core.program import load_program, program_file, reject_mixture, reject_modes

GOOD = f"""{PROGRAMS}class Arguments(Good):
    def __init__(self, needed): ...
class NoContext(Good):
    def train_dataset(self): ...
class Needs(Good):
    def build_model(self, size): ...
class NoData:
    def build_model(self): ...
ready = Good()
def made(): ...

"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(programs: Path, name: str, text: str = GOOD) -> str:
    (programs / f"{name}.py").write_text(text)
    return name


def test_class_is_built_and_object_is_taken(programs: Path) -> None:
    name = write(programs, "good_program")
    assert type(load_program(f"{name}:Good", {})).__name__ == "Good"
    program = load_program(f"{name}:ready", {})
    assert program_file(program) == (programs / f"{name}.py").resolve()


def test_a_module_that_never_ends_its_import_is_named_with_its_line(
    programs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_code.naming_slow_code.__wrapped__, "__defaults__", (None, 0.1))
    name = write(programs, "sleeping_program", f"{GOOD}import time\n\n\ntime.sleep(0.5)\n")
    load_program(f"{name}:Good", {})
    messages = [record.getMessage() for record in caplog.records]
    line = len((programs / f"{name}.py").read_text().splitlines())
    assert messages[0] == (
        f"importing the program's module {name} has not ended after 0 s: it is at {programs / name}.py:{line}"
    )
    assert len(messages) == 3  # after 0.1, 0.2 and 0.4 s
    assert "build" not in "".join(messages)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Goood", "has no 'Goood': did you mean 'Good'?"),
        ("Unlike", "has no 'Unlike': expected a class with build_model, train_dataset, eval_dataset"),
        (
            "NoEval",
            "has no method eval_dataset: write it, or set evaluation: none",
        ),
        (
            "NoData",
            "no method train_dataset and no method eval_dataset: expected build_model, train_dataset, eval_dataset",
        ),
        ("NoContext", "train_dataset can't be called (too many positional arguments): expected train_dataset(self"),
        ("Needs", "build_model can't be called (missing a required argument: 'size'): expected build_model(self)"),
        ("made", "and no method eval_dataset: it is a function, and is not called. Name a class, or an object of one"),
        ("Arguments", "its constructor needs needed: give it with --set needed=VALUE"),
    ],
)
def test_object_that_will_not_do(programs: Path, wanted: str, expected: str) -> None:
    name = write(programs, "bad_objects")
    with pytest.raises(UserError) as caught:
        load_program(f"{name}:{wanted}", {})
    assert expected in str(caught.value)


def test_missing_module_says_where_it_was_looked_for(programs: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_program("not_there.at_all:Good", {})
    assert "there is no module 'not_there'" in str(caught.value)
    assert str(programs) in str(caught.value)


def test_module_that_lacks_a_library_names_the_line(programs: Path) -> None:
    name = write(programs, "needs_library", "import sys\nimport no_such_library\n")
    with pytest.raises(UserError) as caught:
        load_program(f"{name}:Good", {})
    assert f"{programs}/needs_library.py:2: ModuleNotFoundError: No module named 'no_such_library'" in str(caught.value)
    assert "release_lock" in str(caught.value)


def test_module_that_fails_names_the_line(programs: Path) -> None:
    name = write(programs, "divides", "\n\n1 / 0\n")
    with pytest.raises(UserError) as caught:
        load_program(f"{name}:Good", {})
    assert f"{programs}/divides.py:3: ZeroDivisionError: division by zero" in str(caught.value)


@pytest.mark.parametrize("code", ["0", "'set DATA_DIR'"])
def test_module_or_class_that_says_exit_names_the_line(programs: Path, code: str) -> None:
    name = write(programs, "exits", f"import sys\nsys.exit({code})\n")
    with pytest.raises(UserError, match=r"exits.py:2: SystemExit: "):
        load_program(f"{name}:Good", {})
    name = write(programs, "exits_later", f"import sys\nclass Good:\n    def __init__(self): sys.exit({code})\n")
    with pytest.raises(UserError, match=r"exits_later.py:3: SystemExit: "):
        load_program(f"{name}:Good", {})


def test_module_or_class_that_raises_an_interrupt_names_the_line(programs: Path, heeds_ctrl_c: object) -> None:
    name = write(programs, "interrupts", "raise KeyboardInterrupt\n")
    with pytest.raises(UserError, match=r"interrupts.py:1: KeyboardInterrupt: .* raise an error"):
        load_program(f"{name}:Good", {})
    name = write(programs, "waits", "import signal\nsignal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        load_program(f"{name}:Good", {})


def test_a_program_that_ends_python_says_what_to_do(programs: Path) -> None:
    text = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rate', required=True)\n"
    name = write(programs, "parses", f"{text}options = parser.parse_args()\n")
    with pytest.raises(UserError, match=r"parses.py:4: SystemExit: 2: .* take options as arguments of the constructor"):
        load_program(f"{name}:Good", {})
    name = write(programs, "has_flags", "raise ValueError('Trying to access flag --rate before flags were parsed.')\n")
    with pytest.raises(UserError, match=r"no flags are parsed: take options as arguments of the constructor"):
        load_program(f"{name}:Good", {})


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_another_backend_of_keras_is_not_to_be_installed(
    programs: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    fails = f"raise ModuleNotFoundError('No module named {backend}', name='{backend}')"
    name = write(programs, f"of_{backend}", f"import os\nos.environ['KERAS_BACKEND'] = '{backend}'\n{fails}\n")
    with pytest.raises(UserError, match="leave KERAS_BACKEND out of the program"):
        load_program(f"{name}:Good", {})
    name = write(programs, f"needs_{backend}", f"{fails}\n")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(UserError, match="install it"):
        load_program(f"{name}:Good", {})


def test_storage_that_fails_under_an_import_is_no_mistake_of_the_program(programs: Path) -> None:
    stale = "raise OSError(errno.ESTALE, 'Stale file handle', 'words.txt')"
    name = write(programs, "reads", f"import errno\n{stale}\n")
    with pytest.raises(OSError, match="Stale file handle"):
        load_program(f"{name}:Good", {})
    name = write(programs, "reads_later", f"import errno\nclass Good:\n    def __init__(self):\n        {stale}\n")
    with pytest.raises(OSError, match="Stale file handle"):
        load_program(f"{name}:Good", {})
    name = write(programs, "misses", "open('/no/such/words.txt')\n")
    with pytest.raises(UserError, match=r"misses.py:1: FileNotFoundError"):
        load_program(f"{name}:Good", {})


def test_a_metric_of_ones_own_is_of_the_keras_it_derives_from() -> None:
    theirs = type("Metric", (), {"__module__": "keras.src.metrics.metric"})
    own = type("Own", (theirs,), {})
    model = SimpleNamespace(loss="mse", compiled_metrics=SimpleNamespace(_user_metrics={"out": [own()]}))
    with pytest.raises(UserError, match=r"\.Own, .* write tf.keras.metrics.Metric instead of keras.metrics.Metric"):
        reject_mixture(model, "Program.build_model")
    model.compiled_metrics._user_metrics = ["mae", SimpleNamespace()]
    reject_mixture(model, "Program.build_model")


@pytest.mark.parametrize(
    ("eager", "functions", "soft", "expected"),
    [
        (True, False, True, ""),
        (False, False, True, "program p:P has switched eager execution off"),
        (True, True, True, "program p:P has called tf.config.run_functions_eagerly"),
        (True, False, False, r"program p:P has called tf.config.set_soft_device_placement\(False\)"),
    ],
)
def test_modes_of_tensorflow_that_workers_can_not_have_are_named(
    monkeypatch: pytest.MonkeyPatch, eager: bool, functions: bool, soft: bool, expected: str
) -> None:
    config = SimpleNamespace(functions_run_eagerly=lambda: functions, get_soft_device_placement=lambda: soft)
    modes = SimpleNamespace(executing_eagerly=lambda: eager, config=config)
    monkeypatch.setitem(sys.modules, "tensorflow", modes)  # type: ignore[arg-type]
    if not expected:
        reject_modes("program p:P")
        return
    with pytest.raises(UserError, match=expected):
        reject_modes("program p:P")

"""The command line: what it lists, and the exit code that each kind of trouble ends with."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fabric.main import make_program
from invoke import Context, Exit

from fleet import command_line
from fleet.command_line import VerbCall, leaving, verb

ROOT = Path(__file__).resolve().parent.parent.parent
VERBS = ["start-cluster", "stop-cluster", "restart-cluster", "status", "logs", "runs", "export", "checkpoints", "hosts"]
VERBS += ["history"]


def fab(*words: str) -> int:
    for name in [name for name in sys.modules if name.startswith("fleet.command_line.")]:
        del sys.modules[name]  # some verbs look at sys.argv as they are defined
    with pytest.raises(SystemExit) as ended:
        make_program().run(["fab", "--search-root", str(ROOT), *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def silent_inventory(tmp_path: Path) -> Path:
    """Hosts whose SSH port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    groups = [f"{job}:\n  hosts:\n    here:\n" for job in ("chief", "ps", "worker")]
    variables = (
        f"all:\n  hosts:\n    here: {{ansible_host: 127.0.0.1, ansible_port: {port}}}\n"
        "  vars:\n    cluster_shared_dir: /srv/x\n    cluster_uid: 6006\n"
        "    trainer_run: {program: 'trainer.examples.digits:Digits'}\n"
    )
    path = tmp_path / "hosts.yml"
    path.write_text("".join(groups) + variables)
    return path


@pytest.mark.parametrize("words", ["runs", "drain a", "sweep --status", "validate"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "kill"])
def test_a_verb_that_is_left_while_it_reads_the_inventory_exits_130(
    words: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, heeds_ctrl_c: object
) -> None:
    def leave(*_: object, **_more: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("sys.argv", ["fab", *words.split()])
    monkeypatch.setattr(command_line, "recall_inventory", leave)
    monkeypatch.setattr("fleet.verbs.validate.read_source", leave)
    assert fab(*words.split()) == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_list_shows_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert fab("--list") == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"  {verb} " not in shown] == []


def test_what_was_compiled_is_kept_for_the_next_call(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    program = "from fabric.main import make_program; make_program().run()"
    subprocess.run([sys.executable, "-c", program, "--list"], cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.rglob("fleet/command_line/__init__.*.pyc"))


def test_a_terminal_that_lacks_letters_gets_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    monkeypatch.setattr(command_line, "_VERBS", set())

    @verb()
    def say(call: VerbCall) -> None:
        call.console.print("für 漢字")

    say(Context())
    assert written.getvalue() == b"f\xfcr \\u6f22\\u5b57\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_documents_every_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fab(verb, "--help") == 0
    options = capsys.readouterr().out.partition("Options:")[2].splitlines()
    flags = [line.split() for line in options if line.strip().startswith("--")]
    assert ["--inventory=STRING"] in [flag[:1] for flag in flags]
    assert [flag for flag in flags if len(flag) < 2] == []


@pytest.mark.parametrize("verb", ["drain", "prune", "sweep", "drill"])
def test_a_verb_that_takes_words_prints_its_help(verb: str) -> None:
    program = "from fabric.main import make_program; make_program().run()"
    called = [sys.executable, "-c", program, verb, "--help"]
    done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"Usage: -c [--core-opts] {verb} [--options]" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_wrong_inventory_exits_2(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fab(verb, "--inventory", "nowhere") == 2
    assert "there is no inventory 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "hosts.yml", "no-key"])
def test_an_inventory_after_fabrics_own_flag_for_a_key_exits_2(
    name: str, silent_inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = str(silent_inventory.parent / name)
    assert fab("-i", given, "status", "--inventory", str(silent_inventory)) == 2
    expected = "expected the file of an SSH key. For an inventory write it after the verb: --inventory"
    assert f"-i is '{given}': {expected} {given}" in capsys.readouterr().err


def test_a_key_after_fabrics_own_flag_is_taken(silent_inventory: Path) -> None:
    key = silent_inventory.with_name("id_ed25519")
    key.touch()
    assert fab("-i", str(key), "status", "--inventory", str(silent_inventory)) == 4


@pytest.mark.parametrize("keys", ["/home/ann/key", ["/home/ann/key"]])
def test_a_key_of_a_configuration_file_is_no_flags(keys: str | list[str], silent_inventory: Path) -> None:
    file = silent_inventory.with_name("fabric.yml")
    file.write_text(json.dumps({"connect_kwargs": {"key_filename": keys}}))
    assert fab("--config", str(file), "status", "--inventory", str(silent_inventory)) == 4


@pytest.mark.parametrize("verb", VERBS)
def test_unreachable_host_exits_4(verb: str, silent_inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fab(verb, "--inventory", str(silent_inventory)) == 4
    shown = capsys.readouterr().err
    assert "here is unreachable: 127.0.0.1:" in shown
    assert "[Errno" not in shown
    rest = {"start-cluster", "restart-cluster", "stop-cluster", "rollback"}  # they say themselves what to do
    assert ("says what to try" in shown) == (verb not in rest)


def test_environment_names_the_inventory(silent_inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSFLEET_INVENTORY", str(silent_inventory))
    assert fab("status") == 4


def test_wrong_run_name_exits_2_before_a_host_is_asked(silent_inventory: Path) -> None:
    assert fab("start-cluster", "--run", "a/b", "--inventory", str(silent_inventory)) == 2


@pytest.mark.parametrize("words", ["--from digits-1 --run digits-2", "--from digits-1@20"])
def test_a_checkpoint_that_names_none_exits_2_before_a_host_is_asked(
    words: str, silent_inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fab("start-cluster", *words.split(), "--inventory", str(silent_inventory)) == 2
    assert "--from" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["start-cluster", "restart-cluster"])
def test_parameter_without_a_value_exits_2_before_a_host_is_asked(
    verb: str, silent_inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fab(verb, "--set", "rate=1", "--set", "layers", "--inventory", str(silent_inventory)) == 2
    assert capsys.readouterr().err.startswith("--set layers: expected NAME=VALUE")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("start-cluster --program trainer.examples.digits:Digts", "digits.py has no Digts. Did you mean Digits?"),
        ("start-cluster --program trainer.examples.digit:Digits --plan", "Did you mean trainer.examples.digits?"),
        ("restart-cluster --program trainer.examples.digits:Digits --set dropot=1", "takes learning_rate, dropout"),
        ("start-cluster --set rate=1 --set rate=2", "--set rate is given twice"),
        ("start-cluster --set rate=" + 900 * "[" + 900 * "]", "nested too deeply"),
        ("logs --task=", "has no task ''"),
        ("rollback --to=", "--to is '': expected a release"),
        ("logs --lines 99999999999999999999", "expected 1,000,000 at most"),
        ("logs --lines " + "9" * 5000, "expected a whole number of 1 or more, as in --lines 20"),
        ("logs --since " + "9" * 5000 + "s", "expected a time such as '10 min'"),
        ("tensorboard --port " + "9" * 5000, "expected a whole number"),
        ("report --out /nowhere/at/all.html", "it is a directory, or /nowhere/at is none; expected a file to write"),
        ("report --out " + "a" * 5000, "expected a file to write, such as --out report.html"),
        ("report --out /", "expected a file to write"),
        ("drill worker --seed 5", "--seed is for faults by chance"),
        ("drill worker --minutes 5", "--minutes is for faults by chance"),
        ("sweep /dev/zero", "'/dev/zero' can't be read: it is no regular file"),
    ],
)
def test_what_a_verb_can_not_do_exits_2_before_a_host_is_asked(
    words: str,
    message: str,
    silent_inventory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["fab", *words.split()])
    assert fab(*words.split(), "--inventory", str(silent_inventory)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "drill --random --seed x", "drill --random --seed -3", "drill --random --minutes nan",
        "drill --random --bounds-factor 0", "start-cluster --timeout x", "restart-cluster --timeout inf",
        "logs --lines 1.5",
    ],
)  # fmt: skip
def test_a_flag_that_is_no_number_exits_2_and_says_what_was_expected(
    words: str, silent_inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, value = words.split()[-2:]
    monkeypatch.setattr("sys.argv", ["fab", *words.split()])  # where the verb looks for --random
    assert fab(*words.split(), "--inventory", str(silent_inventory)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"{flag} is {value!r}: expected a ")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_is_shut_and_kill_are_as_ctrl_c(number: signal.Signals) -> None:
    def leave() -> None:
        with leaving("left"):
            assert signal.getsignal(number) is not signal.SIG_DFL
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)
                cleaned_up.append(number)

    cleaned_up: list[int] = []
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(Exit, match="left") as left:
            leave()
        assert left.value.code == 130
        assert signal.getsignal(number) is signal.SIG_DFL
        assert cleaned_up == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("as_json", [True, False])
def test_how_far_a_verb_is_goes_to_standard_error(as_json: bool) -> None:
    console = VerbCall(Context(), as_json, None, False).console
    assert (console.progress_out or console.out) is sys.stderr
    assert (console.json_out or console.out) is sys.stdout


@pytest.mark.parametrize("words", [["--sweep", "rates.yml"], ["--sweep=rates.yml"]])
def test_a_sweep_is_added_without_a_run(words: list[str]) -> None:
    program = "from fabric.main import make_program; make_program().run()"
    command = [sys.executable, "-c", program, "queue-add", *words, "--inventory", "nowhere"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, "there is no inventory 'nowhere'" in ended.stderr) == (2, True)


def test_commands_that_are_named_are_for_the_same_inventory(
    silent_inventory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PSFLEET_INVENTORY", raising=False)
    assert fab("undrain", "here", "--inventory", str(silent_inventory)) == 4
    assert f"fab undrain --inventory {silent_inventory} here when it is back" in capsys.readouterr().err
    call = VerbCall(Context(), True, "inventory/my lab", False)
    text = (
        "`fab drain w`; fab by itself; ansible-playbook site.yml --limit w; fab status --inventory x, fab queue-add r"
    )
    assert call.complete(text) == (
        "`fab drain --inventory 'inventory/my lab' w`; fab by itself; ansible-playbook site.yml --inventory "
        "'inventory/my lab' --limit w; fab status --inventory x, fab queue-add --inventory 'inventory/my lab' r"
    )
    call.console.print(text)
    call.console.print_json("drain", {"next": "fab hosts"})
    printed = capsys.readouterr()
    assert json.loads(printed.out)["next"] == "fab hosts --inventory 'inventory/my lab'"
    assert "`fab drain --inventory" in printed.err
    assert VerbCall(Context(), True, None, False).complete(text) == text
    monkeypatch.setenv("PSFLEET_INVENTORY", "x")
    text = "ansible-playbook site.yml, fab status"
    assert (
        VerbCall(Context(), True, None, False).complete(text) == "ansible-playbook site.yml --inventory x, fab status"
    )

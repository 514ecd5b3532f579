"""The command psfleet: a mistake ends with 2 and a sentence, and `init` takes its hosts as they are typed."""

from __future__ import annotations

import locale
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet import program
from fleet.init import make_site
from fleet.output.tables import put
from fleet.output.terminal import printable, typing_psfleet
from fleet.places import KIT
from fleet.rollout.release import utf8_locale

FULL = "standard output can't be written: the disk is full. The verb goes on to its end\n"


def psfleet(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["psfleet", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("stauts", "psfleet has no verb 'stauts'. Did you mean status?"),
        ("reboot", "psfleet has no verb 'reboot'. Did you mean update-hosts --reboot only?"),
        ("start", "psfleet has no verb 'start'. Did you mean start-cluster?"),
        ("stop", "psfleet has no verb 'stop'. Did you mean stop-cluster?"),
        ("train", "psfleet has no verb 'train'. Did you mean start-cluster?"),
        ("kill", "psfleet has no verb 'kill'. Did you mean stop-cluster?"),
        ("pause", "psfleet has no verb 'pause'. Did you mean stop-cluster?"),
        ("exit", "psfleet has no verb 'exit'. Did you mean stop-cluster?"),
        ("plan", "psfleet has no verb 'plan'. Did you mean start-cluster --plan?"),
        ("version", "psfleet has no verb 'version'. Did you mean --version?"),
        ("start-cluster --dry-run", "psfleet start-cluster has no flag '--dry-run'. Did you mean --plan?"),
        ("delete-run a --force", "psfleet delete-run has no flag '--force'. Did you mean --yes?"),
        ("validate --check", "psfleet validate has no flag '--check'. `psfleet validate --help` lists them"),
        ("deploy", "psfleet has no verb 'deploy'. Did you mean playbook site.yml?"),
        ("site.yml", "psfleet has no verb 'site.yml'. Did you mean playbook site.yml?"),
        ("uninstall", "psfleet has no verb 'uninstall'. Did you mean playbook reset.yml?"),
        ("local", "psfleet has no verb 'local'. Did you mean `python -m trainer local`?"),
        ("xyzzy", "psfleet has no verb 'xyzzy'. `psfleet --help` lists them"),
        ("validate extra", "psfleet validate takes no word 'extra' here, and no verb has this name. `psfleet validate"),
        ("start-cluster first", "psfleet start-cluster takes no word 'first' here. Did you mean --run first?"),
        ("logs worker-0", "psfleet logs takes no word 'worker-0' here. Did you mean --task worker-0?"),
        ("logs gamma", "psfleet logs takes no word 'gamma' here. Did you mean --run gamma?"),
        ("init new --hosts a,b", "host 'a,b' has a comma; expected spaces between hosts: a b"),
        ("start-cluster --run a b", "psfleet start-cluster takes no word 'b' here. --run is 'a'; expected one name"),
        ("validate stauts", "psfleet has no verb 'stauts'. Did you mean status?"),
        ("--lits", "psfleet has no flag '--lits'. Did you mean --list?"),
        ("status --jsn", "psfleet status has no flag '--jsn'. Did you mean --json?"),
        ("status --jsn=1", "psfleet status has no flag '--jsn'. Did you mean --json?"),
        ("status --run first", "psfleet status has no flag '--run'. `psfleet status --help` lists them"),
        ("start-cluster --steps 9", "steps is a run setting, and no flag here: write it in trainer_run of the"),
        ("start-cluster --steps=9", "steps is a run setting, and no flag here: write it in trainer_run of the"),
        ("--inventory=x status", "--inventory is a flag of verbs; expected it after one: psfleet VERB --inventory"),
        ("help", "psfleet has no verb 'help'. Did you mean --help?"),
        ("--help nothing", "psfleet has no verb 'nothing'. `psfleet --help` lists them"),
        ("-t soon status", "'soon' is no number; expected a whole one, as in -t 10"),
        (
            "-S /nope status",
            "a file of Fabric's settings or of ssh's can't be read: [Errno 2] No such file",
        ),
        ("-f /nope status", "a file of Fabric's settings or of ssh's can't be read: Config files of type '' (from"),
        ("--list -F xml", "-F is 'xml'; expected one of flat, nested, json"),
        ("--list status", "--list is for all verbs, and takes no 'status'. `psfleet VERB --help`"),
        ("-H", "-H has no value; expected one after it"),
        ("logs --lines", "--lines has no value; expected one after it"),
        ("init", "psfleet init lacks its directory; expected psfleet init DIRECTORY [HOST...] [--flags], as `psfleet"),
        ("drain", "psfleet drain lacks its host; expected psfleet drain HOST [--flags], as `psfleet drain --help`"),
        ("init --hosts a", "psfleet init has no flag '--hosts'. `psfleet init --help` lists them"),
        ("init new a --hots", "psfleet init has no flag '--hots'. Did you mean --host?"),
        ("init  a", "'' can't be a folder: it is empty; expected a name, as in psfleet init ~/mine"),
        (f"init {'x' * 300} a", "'xxxx"),
        ("init ~nobody-here/x a", "'~nobody-here/x' can't be a folder: Could not determine home directory"),
        ("init new", "no host is named; expected one or more, the coordinator's first: psfleet init new alpha="),
        ("init new a_", "host 'a_' can't have this name"),
        ("playbook", "name a playbook, as in psfleet playbook site.yml"),
    ],
)
def test_a_mistake_ends_with_2_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert psfleet(monkeypatch, *words.split(" ")) == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.yml", "run: [", 'while parsing a flow node expected the node content, but found .* in "own.yml", line 1'),
        ("own.json", "{", "Expecting property name"),
        ("own.py", "run =", r"invalid syntax \(own.py, line 1\)"),
        ("own.yml", "- run", "'list' object has no attribute"),
    ],
)
def test_a_broken_file_of_fabrics_settings_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert psfleet(monkeypatch, "-f", name, "status") == 2
    assert re.match(f"a file of Fabric's settings or of ssh's can't be read: {message}", capsys.readouterr().err)


@pytest.mark.parametrize("words", [["init", "--help"], ["init", "new", "-h"], ["drain", "--help"], ["--help", "logs"]])
def test_help_of_a_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert psfleet(monkeypatch, *words) == 0
    verb = words[1] if words[0] == "--help" else words[0]
    takes = {"init": " DIRECTORY [HOST...]", "drain": " HOST"}.get(verb, "")
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: psfleet {verb}{takes} [--flags]\n\n")
    assert "--core-opts" not in shown


@pytest.mark.parametrize("columns", [20, 80])
def test_help_has_the_verbs_first_in_any_window(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setattr("invoke.program.pty_size", lambda: (columns, 24))
    assert psfleet(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    order = (
        "Usage: psfleet VERB [--flags]",
        "A new cluster: init",
        "Verbs:",
        "  status",
        "Fabric's own options",
        "--list-agent-keys",
    )
    places = [shown.index(each) for each in order]
    assert places == sorted(places)


@pytest.mark.parametrize("hosts", [["a", "b=192.0.2.2"], ["--host", "a", "b=192.0.2.2"]])
def test_init_takes_its_hosts_as_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, hosts: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        made: list[tuple[Path, list[str]]] = []
        patched.setattr(program, "make_site", lambda directory, hosts, *_: made.append((directory, hosts)))
        patched.setattr("sys.argv", ["psfleet", "init", str(tmp_path), *hosts])
        program.main()
    assert made == [(tmp_path, ["a", "b=192.0.2.2"])]


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    command = f"rmdir {gone}; exec {sys.executable} -c 'from fleet.program import main; main()' validate"
    paths = os.environ | {"PYTHONPATH": str(KIT)}
    done = subprocess.run(["sh", "-c", command], cwd=gone, env=paths, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "the working directory was removed; expected one that exists: cd ~\n")


def test_an_output_that_is_shut_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert psfleet(monkeypatch, "--version") == 0
    put(sys.stdout, "as a verb prints")


def test_a_verb_goes_on_where_its_output_is_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.output.tables.lost", lost := [])
    with Path("/dev/full").open("w") as full:
        put(full, "one")
        put(full, "two")
    assert capsys.readouterr().err == FULL
    assert lost == [full]


@pytest.mark.parametrize("words", ["--help", "status --help", "validate --json", "validate"])
def test_a_disk_that_is_full_ends_with_1(tmp_path: Path, words: str) -> None:
    make_site(tmp_path / "site", ["a=192.0.2.1", "b=192.0.2.2"], lambda _: None)
    command = [sys.executable, "-c", "from fleet.program import main; main()", *words.split()]
    # Other tests have Ansible's settings in this process's environment.
    around = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(KIT), "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=tmp_path / "site", env=around, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, FULL)


def test_an_example_is_no_host() -> None:
    words = ["psfleet", "init", "mine", "--example", "cloud-aws"]
    assert program.as_invoke_reads(words) == words


def test_playbook_becomes_ansible_in_the_sites_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    became: list[tuple[str, list[str], Path]] = []
    monkeypatch.setattr("os.execv", lambda path, words: became.append((path, words, Path.cwd())))
    for name in ("ansible.cfg", "fabfile.py", "site.yml"):
        (tmp_path / name).touch()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    program.run_playbook(["site.yml", "--check"])
    ((path, words, place),) = became
    assert (Path(path).name, words[1:], place) == ("ansible-playbook", ["site.yml", "--check"], tmp_path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Type `fab status`, or fab status --watch.", "Type `psfleet status`, or psfleet status --watch."),
        ("`fab start-cluster --run a`", "`psfleet start-cluster --run a`"),
        ("`ansible-playbook site.yml --limit @site.retry`", "`psfleet playbook site.yml --limit @site.retry`"),
        ("fab has a path; my-fab status, fab status-quo", "fab has a path; my-fab status, fab status-quo"),
        ("ansible-playbook is missing", "ansible-playbook is missing"),
    ],
)
def test_messages_name_commands_as_they_were_typed(text: str, shown: str) -> None:
    with typing_psfleet(["status", "start-cluster"]):
        assert printable(text) == shown
    assert printable(text) == text


def test_a_refusal_names_psfleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert psfleet(monkeypatch, "sweep", "") == 2
    assert "as in psfleet sweep" in (shown := capsys.readouterr().err)
    assert "fab " not in shown


@pytest.mark.parametrize(
    ("value", "added"),
    [("C.UTF-8", {}), ("C", {"LC_ALL": "C.UTF-8"}), ("xx_YY.UTF-8", {"LC_ALL": "C.UTF-8"})],
)
def test_ansible_gets_a_locale_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, value: str, added: dict[str, str]
) -> None:
    monkeypatch.setenv("LC_ALL", value)
    before = locale.setlocale(locale.LC_ALL)
    assert utf8_locale() == added
    assert locale.setlocale(locale.LC_ALL) == before

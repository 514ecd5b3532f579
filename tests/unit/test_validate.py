"""`fab validate`: the whole of an inventory's mistakes, with their places, and never a traceback."""

from __future__ import annotations

import configparser
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ansible.constants as settings
import pytest

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.places import KIT
from fleet.site.inventory import find_problems, load_inventory
from fleet.site.preflight import preflight_problems
from fleet.site.reader import find_source, read_source
from fleet.site.schema.inventory_files import _PASSED_OVER, beside_problems, file_problems, range_problems
from fleet.site.schema.yaml_structure import shape_problems
from fleet.site.schema.yaml_text import text_problems, unread_problems
from fleet.verbs.validate import validate
from tests.unit.stand_ins import put_program

ROOT = Path(__file__).resolve().parents[2]
HOSTS = """chief:
  hosts:
    head: {ansible_host: 192.0.2.10}
ps:
  hosts:
    store: {ansible_host: 192.0.2.20}
worker:
  hosts:
    train: {ansible_host: 192.0.2.30}
"""
SITE = """cluster_shared_dir: /srv/trainer
cluster_uid: 6006
trainer_run:
  program: trainer.examples.digits:Digits
  evaluation: none
"""


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
LAUGHS += "common_packages: *a8\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "hosts.yml").write_text(HOSTS)
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(SITE)
    return tmp_path


def problems(site: Path) -> list[str]:
    return list(map(str, find_problems(read_source(str(site), lenient=True))))


def test_a_right_inventory_is_said_to_be_right(site: Path) -> None:
    out = io.StringIO()
    validate(Console(out), str(site))
    assert out.getvalue() == f"{site} is right: 3 hosts, 3 tasks\n"


def test_one_host_is_no_plural(site: Path) -> None:
    (site / "hosts.yml").write_text("{chief: &one {hosts: {a: {ansible_host: 192.0.2.1}}}, ps: *one, worker: *one}")
    out = io.StringIO()
    validate(Console(out), str(site))
    assert out.getvalue() == f"{site} is right: 1 host, 3 tasks\n"


def test_json_has_all_problems_with_their_places(site: Path) -> None:
    (site / "group_vars" / "worker.yml").write_text("worker_tasks: two\n")
    out = io.StringIO()
    with pytest.raises(OperatorMistake) as caught:
        validate(Console(out, json_out=out), str(site))
    assert (str(caught.value), caught.value.code) == ("", 2)
    shown = json.loads(out.getvalue())
    (problem,) = shown["problems"]
    assert (shown["right"], problem["hosts"], problem["variable"], problem["value"], problem["line"]) == (
        False, ["train"], "worker_tasks", "'two'", 1,
    )  # fmt: skip
    assert problem["file"] == str(site / "group_vars" / "worker.yml")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("group_vars/all.yml", SITE + "cluster_foo: 1\n", "all.yml:6: unknown variable 'cluster_foo'"),
        ("group_vars/all.yml", SITE + "  step: 1\n", "all.yml:6: trainer_run: unknown key 'step'"),
        ("group_vars/workers.yml", "a: 1\n", "no group 'workers', so no host gets its variables. Did you mean wo"),
        ("host_vars/trane.yml", "a: 1\n", "no host 'trane', so no host gets its variables. Did you mean t"),
        ("hosts.yml", HOSTS + "gpus:\n  hosts:\n    train:\n", "hosts.yml:10: group 'gpus' is none of psfleet's"),
        ("hosts.yml", HOSTS.replace("train:", "t[1:20000000]:"), "stands for 20000000 hosts; expected 10,000 at most"),
        ("hosts.yml", HOSTS.replace("train:", "t[1:2000][1:2000]:"), "stands for 4000000 hosts"),
        ("hosts.yml", HOSTS.replace("192.0.2.30}", "192.0.2.30, ansible_port: ssh}"), "has ansible_port: 'ssh'; e"),
        ("hosts.yml", HOSTS.replace("192.0.2.30", "'{{ ip }}'"), "ansible_host can't be read: 'ip' is undefined"),
        ("hosts.yml", HOSTS.replace("train:", "all:"), "can't have this name: Ansible has a group of this name"),
        ("hosts.yml", "", "the inventory has no hosts"),
        ("hosts.yml", "[", "hosts.yml"),
        ("hosts.yml", "\t\x00", "hosts.yml"),
        ("hosts.yml", "chief: 7\n", "hosts.yml:1: 'chief' is the number '7'; expected a group"),
        ("hosts.yml", "- a\n- b\n", "hosts.yml:1: this is a list; expected groups by name"),
        ("hosts.yml", HOSTS + "    t2: 192.0.2.31\n", "yml:10: host 't2' in group 'worker' is the text '192.0.2.31'"),
        ("more.yml", "worker:\n  hosts: [a, b]\n", "more.yml:2: hosts of group 'worker' is a list; expected a mapping"),
        ("more.yml", "ps:\n  hosts:\n    1:\n", "more.yml:3: the name of a host is the number '1'; expected a text"),
        ("more.yml", "train: 192.0.2.31\n", "A host stands below its group: worker: {hosts: {train: {ansible_host: "),
        ("more.yml", "all:\n  children:\n    gpu:\n      children: [ps]\n", "yml:4: children of group 'gpu' is a list"),
        ("hosts.yml", HOSTS + "all:\n  vars:\n    cluster_uid: " + "9" * 5000 + "\n", "hosts.yml"),
        ("hosts.yml", HOSTS + "  var:\n    worker_tasks: 2\n", "yml:10: group 'worker' has the key 'var', which A"),
        ("hosts.yml", HOSTS + "gpu:\n  childern:\n    worker:\n", "yml:11: group 'gpu' has the key 'childern'"),
        ("hosts.yml", HOSTS + "all:\n  children:\n    gpu: {host: {train: }}\n", "'gpu' has the key 'host'"),
        ("hosts.yml", HOSTS + "worker:\n  hosts:\n    t2:\n", "yml:10: 'worker' stands twice, in line 7 too"),
        ("hosts.yml", HOSTS.replace("30}", "30, worker_port: 02400}"), "yml:9: worker_port: YAML reads 02400 as 1280"),
        ("hosts.yml", HOSTS.replace("30}", "30, worker_port: 24:00}"), "worker_port: YAML reads 24:00 as 1440"),
        ("group_vars/all.yml", SITE + "  steps: 0777\n", "all.yml:6: steps: YAML reads 0777 as 511"),
        ("group_vars/all.yml", SITE + "cluster_uid: 7\n", "all.yml:6: 'cluster_uid' stands twice, in line 2 too"),
        ("group_vars/all.yml", SITE + "  evaluation: exact\n", "all.yml:6: 'evaluation' stands twice"),
        ("group_vars/all.yml", SITE + "steps: 5\n", "unknown variable 'steps' (hosts head, store, train): it is a run"),
        ("group_vars/worker.yml", "vars:\n  worker_tasks: 2\n", "yml:1: worker_tasks stands below 'vars' and sets not"),
        ("group_vars/worker.yml", "worker: {vars: {worker_tasks: 2}}\n", "worker_tasks stands below 'worker' and sets"),
        ("group_vars/worker.txt", "worker_tasks: 2\n", "Ansible reads no file that ends in '.txt', so worker gets"),
        ("host_vars/train.ini", "worker_tasks=2\n", "Ansible reads no file that ends in '.ini', so train gets"),
        ("group_vars/worker.yml", LAUGHS, "common_packages can't be read: it has more than 20000 values"),
        ("group_vars/all.yaml", "cluster_uid: 7007\n", "Ansible reads all.yml and not all.yaml; expected one of them"),
        ("group_vars/all/more.yml", "release_keep: 3\n", "Ansible reads all and not all.yml; expected one of them"),
        ("group_vars/gpu.yml", "gpu_batch: 1\n", "gpu_batch counts on the command line alone"),
        ("hosts.yml", HOSTS.replace("192.0.2.30}", "192.0.2.30, gpu_batch: 1}"), "hosts.yml:9: gpu_batch counts on"),
        ("groups_vars/worker.yml", "worker_tasks: 2\n", "in 'groups_vars'; expected group_vars or host_vars"),
        ("host-vars/train.yml", "worker_tasks: 2\n", "in 'host-vars'; expected group_vars or host_vars. Ren"),
        ("group_vars/all.yml", SITE + "  program_args: {lr: 1e-3}\n", "yml:6: program_args: YAML reads 1e-3 as a t"),
        ("group_vars/all.yml", SITE + "  program_args: {lr: 1e-3}\n", "Write 0.001, or quotes where you mean the text"),
        ("group_vars/all.yml", SITE + "  program_args: {a: [{b: 3.E8}]}\n", "YAML reads 3.E8 as a text"),
        ("group_vars/all.yml", SITE + "  program_args: {a: -1e-9}\n", "Write -1.0e-9, or"),
        ("group_vars/all.yml", SITE + "  steps: 1e6\n", "yml:6: trainer_run: steps: expected a whole number, not"),
        ("group_vars/all.yml", SITE + "  program_args: {since: 2024-01-01}\n", "since has the date 2024-01-01; exp"),
        ("group_vars/all.yml", SITE + "  run: 2024-01-01\n", "yml:6: trainer_run: run: expected a text, not the d"),
        ("hosts.yml", HOSTS + "gpu:\n  hosts:\n    train: {ansible_host: 192.0.2.31}\n",
         "yml:12: host 'train' has ansible_host here and with another value in line 9, and one of them is lost"),
        ("hosts.yml", HOSTS + "all:\n  vars:\n    a: &a [*a]\n    cluster_uid: 1\n", "can't be read"),
        ("hosts.yml", HOSTS.replace("train:", "train-[5:1]:"), "yml:9: 'train-[5:1]: {ansible_host: 192.0.2.30}' "),
        ("hosts.yml", HOSTS.replace("train:", "train-[5:1]:"), "no host; expected the lower number first, as in [1:5]"),
        ("hosts.yml", HOSTS.replace("train:", "train-[1:9:0]:"), "stands for no host"),
        ("more.ini", "[gpu]\ntrain-[2:9:-1]\n", "more.ini:2: 'train-[2:9:-1]' stands for no host"),
        ("more.ini", "[gpu]\n# a [1] b\ntrain ansible_host=192.0.2.31\n", "more.ini:3: host 'train' has ansible_host"),
        ("more.ini", "[gpu]\ntrain ansible_host=192.0.2.31\n", "hosts.yml:9, and one of them is lost; expected one va"),
        ("more.ini", "[gpu]\ntrain worker_tasks=1\n[gpu]\ntrain worker_tasks=2\n", "another value in line 2, and one"),
        ("old/hosts.yml", HOSTS.replace(".2.30", ".2.31"), "old/hosts.yml:9: host 'train' has ansible_host here and"),
        ("group_vars/worker.yml", "- worker_tasks: 2\n", "worker.yml:1: this is a list; expected variables by name"),
        ("group_vars/worker/a.yml", "worker_tasks\n", "a.yml:1: this is the text 'worker_tasks'; expected variables"),
        ("host_vars/train.yml", "7\n", "train.yml:1: this is the number '7'; expected variables by name, such as wor"),
        ("group_vars/worker.yml", "worker_tasks: !vault 5\n", "Write !vault | and below it what ansible-vault encrypt"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(site: Path, file: str, text: str, message: str) -> None:
    (site / file).parent.mkdir(exist_ok=True)
    (site / file).write_text(text)
    found = problems(site)
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    "broken",
    [
        "a: [1\n", "a: 'b\n", "a: b: c\n", "$ANSIBLE_VAULT;1.1;AES256\n6162\n", "\t- x\n",
        "a: &x *y\n", "a: !!python/object:os.x {}\n", f"steps: {'9' * 5000}:10\n",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_does_not_hide_the_rest(site: Path, broken: str) -> None:
    (site / "group_vars" / "worker.yml").write_text(broken)
    (site / "group_vars" / "all.yml").write_text(SITE.replace("6006", "7"))
    found = problems(site)
    assert any("worker.yml" in problem and "can't be read" in problem for problem in found), found
    assert any("cluster_uid is 7" in problem for problem in found), found


@pytest.mark.parametrize("code", ["latin-1", "utf-16"])
def test_a_file_in_another_code_is_told_how_to_be_saved(site: Path, code: str) -> None:
    (site / "group_vars" / "worker.yml").write_bytes("note: café\n".encode(code))
    (problem,) = problems(site)
    assert "worker.yml: can't be read: it is not UTF-8. Save it as UTF-8, as with: iconv" in problem


def test_values_of_a_file_that_cannot_be_read_are_not_called_missing(site: Path) -> None:
    (site / "group_vars" / "all.yml").write_text(SITE + "a: [\n")
    (problem,) = problems(site)
    assert "all.yml:7: can't be read" in problem


@pytest.mark.parametrize("place", ["group_vars", "host_vars", "ansible/group_vars"])
def test_variables_beside_the_playbooks_are_refused(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Each playbook reads its own directory's, and fab the root's: the hosts would get another cluster than it sees."""
    root = tmp_path_factory.mktemp("root")
    (root / place).mkdir(parents=True)
    assert list(beside_problems([str(site)], root)) == []  # an empty directory has none
    (root / place / "all.yml").write_text("worker_tasks: 2\n")
    monkeypatch.setattr("fleet.places._folder", lambda *_: root)
    (problem,) = problems(site)
    assert problem.startswith(f"{root / place}: variables beside the playbooks count for some playbooks")
    assert problem.endswith(f"Move them to {site}/{Path(place).name}")
    assert any(str(root / place) in each for each in preflight_problems({}, {}, "2.19.0", [str(site)], str(root)))
    if "/" not in place:
        (root / "hosts.yml").write_text(HOSTS)
        assert list(beside_problems([str(root / "hosts.yml")], root)) == []  # they are the inventory's own


def test_a_directory_without_hosts_says_what_it_lacks(site: Path) -> None:
    (site / "hosts.yml").unlink()
    (problem,) = problems(site)
    assert problem.startswith(f"{site}: this directory has no file of hosts; expected one, such as hosts.yml. Write it")
    (site / "hosts.txt").write_text(HOSTS)
    (problem,) = problems(site)
    assert "such as hosts.yml. Ansible passes over hosts.txt for the name's end. Write it" in problem
    assert tuple(settings.INVENTORY_IGNORE_EXTS) == _PASSED_OVER


def run_validate(site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fabric", "validate", "--inventory", str(site)]
    return subprocess.run(command, cwd=KIT, env=os.environ | variables, capture_output=True, text=True)


OTHERWISE = {
    "ANSIBLE_ENABLE_TASK_DEBUGGER": ("1", "Ansible's setting ENABLE_TASK_DEBUGGER is True here; expected False"),
    "ANSIBLE_ANY_ERRORS_FATAL": ("1", "Ansible's setting ANY_ERRORS_FATAL is True here; expected False"),
    "ANSIBLE_STRATEGY": ("free", "Ansible's setting DEFAULT_STRATEGY is 'free' here; expected 'linear'"),
    "ANSIBLE_BECOME_METHOD": ("su", "DEFAULT_BECOME_METHOD is 'su' here; expected 'sudo', which fab uses too"),
    "ANSIBLE_TRANSPORT": ("local", "Ansible's setting DEFAULT_TRANSPORT is 'local' here; expected 'ssh'"),
    "ANSIBLE_TASK_TIMEOUT": ("60", "TASK_TIMEOUT is 60 here; expected 0, since packages and wheels may take long"),
}


@pytest.mark.parametrize(
    "settings",
    [
        OTHERWISE,
        {"ANSIBLE_FORKS": ("lots", "can't be read: Config 'DEFAULT_FORKS' from 'env: ANSIBLE_FORKS'")},
        {"ANSIBLE_CONFIG": ("/dev/null", "Ansible's settings can't be read: Unsupported configuration file")},
        {"ANSIBLE_CACHE_PLUGIN": ("jsonfile", "")},  # Ansible warns that it has no place for it, and goes on
    ],
)
def test_settings_of_the_operators_own_ansible_are_named(site: Path, settings: dict[str, tuple[str, str]]) -> None:
    done = run_validate(site, **{name: value for name, (value, _) in settings.items()})
    assert "Traceback" not in done.stdout + done.stderr
    expected = [words for _, words in settings.values() if words]
    assert done.returncode == (2 if expected else 0)
    assert [words for words in expected if words not in done.stdout + done.stderr] == []


def test_settings_of_ansible_from_elsewhere_are_refused(site: Path, tmp_path: Path) -> None:
    """Without psfleet's own, hosts would be handled otherwise than they were tested."""
    (tmp_path / "own.cfg").write_text("[defaults]\nforks = 5\n")
    done = run_validate(site, ANSIBLE_CONFIG=str(tmp_path / "own.cfg"))
    assert done.returncode == 2
    assert f"Ansible reads its settings from {tmp_path}/own.cfg here; expected the ansible.cfg" in done.stderr


def test_a_playbook_from_another_folder_says_where_to_go(site: Path, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    command = ["ansible-playbook", "--inventory", str(site), str(KIT / "site.yml")]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Ansible reads its settings from no file here; expected the ansible.cfg of your folder" in done.stdout


def test_the_port_of_ansibles_settings_is_fabs_too(site: Path) -> None:
    hosts = f"load_inventory({str(site)!r}).hosts.values()"
    script = f"from fleet.site.inventory import load_inventory; print({{host.port for host in {hosts}}})"
    environment = os.environ | {"ANSIBLE_REMOTE_PORT": "2222"}
    done = subprocess.run([sys.executable, "-c", script], cwd=KIT, env=environment, capture_output=True, text=True)
    assert done.stdout == "{2222}\n", done.stderr


def test_a_script_that_fails_is_no_broken_ini_file(site: Path) -> None:
    put_program(site / "more.sh", "#!/bin/sh\necho no cloud today >&2\nexit 3\n")
    (problem,) = problems(site)
    assert "can't be read: Inventory script returned non-zero exit code 3: no cloud today (as script)" in problem


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("more.py", "#!/usr/bin/env python3\nprint()\n", "this is a script that may not be run"),
        ("more.ini", "[worker]\na\n[ps\nb\n", "more.ini:3: '[ps' has no ]; expected a group, as [worker]"),
        ("more", "\ufeff[worker]\na ansible_host=192.0.2.7\n", "it begins with a byte order mark"),
    ],
)
def test_what_ansible_would_read_otherwise_than_it_is_meant(site: Path, name: str, text: str, message: str) -> None:
    (site / name).write_text(text)
    (problem,) = problems(site)
    assert message in problem
    (site / name).rename(site / f"{name}.bak")
    assert problems(site) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("more", "\ufeffall: {vars: {note: x}}\n"),
        ("more", "all: {vars: {note:\n[1,\n2]}}\n"),
        ("more.toml", "[all.vars]\nnote = [\n[1, 2],\n[3,\n4]]\n"),
        ("more.py", "#!/usr/bin/env python3\nprint()\n"),
    ],
)
def test_what_ansible_reads_as_it_is_meant_is_right(
    site: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    ignored = re.compile(b"^group_vars$|" + re.escape(b".py") + b"$")  # as of inventory_ignore_extensions
    monkeypatch.setattr("ansible.inventory.manager.IGNORED", ignored)
    (site / name).write_text(text)
    assert problems(site) == []


@pytest.mark.parametrize("name", ["a" * 5000, "x/" + "b" * 300, "a\nb", "-x", "a\0b"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(OperatorMistake, match=r"expected the path of an inventory|there is no inventory"):
        read_source(name)


def test_a_value_whose_vault_is_shut_does_not_hide_the_rest(site: Path) -> None:
    vault = "worker_tasks: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6162636465\nworker_port: 80\n"
    (site / "group_vars" / "worker.yml").write_text(vault)
    first, second = problems(site)
    assert "worker.yml:1: host 'train': worker_tasks can't be read" in first
    assert "host 'train' has worker_port: 80; expected a number from 1024" in second


def test_a_vault_opens_with_ansibles_password_file(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ansible.constants
    from ansible.parsing.vault import VaultLib, VaultSecret

    password = site.parent / f"{site.name}-password"
    password.write_text("secret")
    shut = VaultLib([("default", VaultSecret(b"secret"))]).encrypt("worker_port: 80\n")
    (site / "group_vars" / "worker.yml").write_bytes(shut)
    (before,) = problems(site)
    assert "worker.yml: can't be read" in before
    assert "ANSIBLE_VAULT_PASSWORD_FILE" in before
    monkeypatch.setattr(ansible.constants, "DEFAULT_VAULT_PASSWORD_FILE", str(password))
    (after,) = problems(site)
    assert "worker_port: 80; expected a number from 1024" in after


def test_hosts_that_cannot_be_read_do_not_hide_the_variables(site: Path) -> None:
    (site / "hosts.yml").write_text("chief: [\n")
    (site / "group_vars" / "all.yml").write_text(SITE.replace("6006", "'6006'") + "cluster_sharde_dir: /x\n")
    found = problems(site)
    assert "hosts.yml:2: can't be read" in found[0]
    assert any("cluster_uid is '6006'" in problem for problem in found), found
    assert any("did you mean cluster_shared_dir?" in problem for problem in found), found


def test_own_groups_and_variables_are_allowed_as_the_page_says(site: Path) -> None:
    own = "bastion:\n  hosts:\n    $door:\n      Cluster: 1\nsite_a:\n  hosts:\n    train: {my_tasks: 3}\n"
    (site / "hosts.yml").write_text(HOSTS + own)
    refused = problems(site)
    assert len(refused) == 2, refused
    (site / "group_vars" / "all.yml").write_text(SITE + 'cluster_own_groups: [bastion, "site_*"]\n')
    assert problems(site) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("group_vars/worker.yml.bak", "worker_tasks: x\n"),
        ("group_vars/worker.yml~", "worker_tasks: x\n"),
        ("group_vars/notes.txt", "what we thought\n"),
        ("group_vars/worker/a.yml", "worker_tasks: 2\n"),
        ("group_vars/worker.json", '{"worker_tasks": 2}'),
        ("host_vars/train", "worker_tasks: 2\n"),
        ("README.md", "none here\n"),
        ("group_vars.old/worker.yml", "worker_tasks: x\n"),
        ("group_vars/worker.yml", "my_mode: 0644\nmy_time: 12:30\nvars: {a: 1}\nworker_port: 0x960\n"),
        ("group_vars/worker.yml", "base: &a {my: 1}\nother:\n  <<: *a\n  my: 2\n"),
        ("more.yml", "worker:\n  hosts:\n    other: {ansible_host: 192.0.2.31}\n"),
        ("more.yml", "worker:\n  hosts: other\nall:\n  vars: {ansible_host: 192.0.2.31}\n"),
        ("hosts.yml", HOSTS + "all:\n  children:\n    worker:\n      hosts: {train: {ansible_host: 192.0.2.30}}\n"),
        ("group_vars/all.yml", SITE.replace("digits:Digits", "heroes:Heroes") + "my: {rate: 1e-3}\n"),
        ("more", "[worker]\nother ansible_host=192.0.2.31 worker_tasks=2\n"),
    ],
)  # fmt: skip
def test_what_is_right_and_unusual_is_right(site: Path, file: str, text: str) -> None:
    (site / file).parent.mkdir(parents=True, exist_ok=True)
    (site / file).write_text(text)
    assert problems(site) == []


def test_a_playbook_does_not_go_on_with_half_of_the_hosts(site: Path) -> None:
    """Ansible itself warns of the broken file alone."""
    assert list(unread_problems([str(site)])) == []
    (site / "more.yml").write_text("worker:\n  hosts: [\n")
    (problem,) = unread_problems([str(site)])
    assert f"{site}/more.yml:3: can't be read, so that its hosts would be missing" in str(problem)


@pytest.mark.parametrize(
    "shape",
    [
        "worker: {hosts: [a, b]}\n",
        "ps: {hosts: {1: {ansible_host: 192.0.2.9}}}\n",
        "a: 192.0.2.9\n",
        "ps: 7\n",
        "[a]\n",
    ],
)
def test_what_ansible_half_reads_is_one_problem_with_its_reason(
    site: Path, shape: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert list(shape_problems([str(site)])) == []
    (site / "hosts.yml").write_text(shape)
    (problem,) = problems(site)
    assert f"{site}/hosts.yml:1: " in problem
    assert "; expected " in problem
    assert list(map(str, shape_problems([str(site)]))) == [problem]
    with pytest.raises(OperatorMistake, match=r"hosts\.yml:1"):
        load_inventory(str(site))
    assert capfd.readouterr().err == ""  # Ansible's warnings fill a screen


def test_a_file_of_a_wrong_shape_does_not_hide_the_rest(site: Path) -> None:
    (site / "more.yml").write_text("worker: {hosts: [a]}\n")
    (site / "group_vars" / "all.yml").write_text(SITE.replace("6006", "'6006'") + "cluster_uid: 07\n")
    text = "\n".join(problems(site))
    assert "more.yml:1" in text
    assert "cluster_uid is 7" in text
    assert "'cluster_uid' stands twice" in text


def test_aliases_that_lead_back_end(site: Path) -> None:
    (site / "hosts.yml").write_text("all: &a\n  children: {chief: *a, ps: *a, worker: *a}\n")
    assert list(shape_problems([str(site)])) == []
    assert list(text_problems([str(site)])) == []


def test_a_playbook_stops_at_a_file_that_ansible_half_reads(site: Path) -> None:
    (site / "more").write_text("[worker]\nother ansible_host=192.0.2.31\n[worker:var]\nworker_tasks=2\n")
    command = ["ansible-inventory", "--inventory", str(site), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert f"Completely failed to parse inventory source {site}/more" in done.stderr
    (problem,) = problems(site)
    assert (
        f"{site}/more: can't be read: Failed to parse inventory: Section [worker:var] has unknown type: var (as ini); "
        in problem
    )
    with pytest.raises(OperatorMistake, match="has unknown type: var"):
        load_inventory(str(site))


def test_what_a_clouds_plugin_says_is_told(site: Path) -> None:
    (site / "aws_ec2.yml").write_text("plugin: psfleet.nowhere.cloud\n")
    (problem,) = problems(site)
    assert "psfleet.nowhere.cloud" in problem
    assert "(as yaml)" not in problem


@pytest.mark.parametrize("named", ["aws", "gcp", "openstack"])
def test_a_clouds_library_that_is_missing_is_named_with_the_command(
    site: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    for library in ("boto3", "botocore", "google.auth", "openstack"):
        monkeypatch.setitem(sys.modules, library, None)
    (file,) = (ROOT / f"inventory/cloud-{named}").glob("*.yml")
    (site / file.name).write_text(file.read_text())
    package = {"aws": "botocore and boto3", "gcp": "google-auth", "openstack": "openstacksdk"}[named]
    wanted = (
        f"its plugin needs the Python package {package}. Install what the clouds' plugins need: "
        f"{sys.executable} -m uv pip install --require-hashes -r {ROOT}/locks/cloud.txt"
    )
    assert problems(site) == [f"{site}/{file.name}: can't be read: {wanted}"]
    with pytest.raises(OperatorMistake) as error:
        load_inventory(str(site))
    assert str(error.value).endswith(wanted)


def test_a_file_that_nobody_may_read_is_left_to_ansible(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (site / "more.ini").write_text("[gpu]\ntrain ansible_host=192.0.2.31\n")
    assert len(list(text_problems([str(site)]))) == 1
    monkeypatch.setattr(Path, "read_text", refuse)  # root may read any file
    assert list(range_problems(str(site / "hosts.yml"))) == []
    assert list(text_problems([str(site)])) == []
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert list(text_problems([str(site)])) == list(shape_problems([str(site)])) == []
    assert list(file_problems([str(site)], [], [])) == []


@pytest.mark.parametrize("place", ["group_vars/worker.yml", "host_vars/train.yml", "more.yml"])
def test_what_is_no_file_is_refused_before_anybody_waits_for_it(site: Path, place: str) -> None:
    (site / "host_vars").mkdir()
    os.mkfifo(site / place)
    (problem,) = problems(site)
    assert f"{place}: this is no regular file" in problem
    (site / place).unlink()
    (site / place).symlink_to("nowhere")
    (problem,) = problems(site)
    assert f"{place}: this is a link that leads nowhere" in problem


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--inventory is empty"),
        ("/dev/zero", "is no regular file"),
        ("~nobody-here/hosts.yml", "there is no inventory '~nobody-here/hosts.yml'"),
    ],
)
def test_what_can_be_no_inventory_is_refused(given: str, message: str) -> None:
    with pytest.raises(OperatorMistake, match=message):
        load_inventory(given)


def test_an_inventory_of_the_environment_is_named_as_that() -> None:
    with pytest.raises(OperatorMistake, match="ANSIBLE_INVENTORY: there is no inventory 'nope'"):
        find_source(None, {"ANSIBLE_INVENTORY": "nope"}, ["nope"])


def test_a_missing_inventory_is_the_one_problem() -> None:
    out = io.StringIO()
    with pytest.raises(OperatorMistake):
        validate(Console(out, json_out=out), "nowhere")
    shown: dict[str, Any] = json.loads(out.getvalue())
    assert "there is no inventory 'nowhere'" in shown["problems"][0]["message"]
    with pytest.raises(OperatorMistake, match=r"^--inventory: there is no inventory 'nowhere'.*inventory/lab"):
        validate(Console(out), "nowhere")


def test_a_start_is_refused_with_every_problem(site: Path) -> None:
    (site / "group_vars" / "all.yml").write_text(SITE.replace("6006", "7") + "cluster_foo: 1\n")
    with pytest.raises(OperatorMistake, match=r"(?s)cluster_foo.*cluster_uid is 7"):
        load_inventory(str(site), check=True)


def test_each_line_of_ansible_cfg_is_a_setting_of_ansibles() -> None:
    """A name that it does not know has no effect, and no message."""
    settings_file = configparser.ConfigParser(interpolation=None)
    settings_file.read(KIT / "ansible.cfg")
    root = Path(settings.__file__).parent
    texts = [path.read_text() for path in (root / "config" / "base.yml", *(root / "plugins").rglob("*.py"))]
    known = {key for text in texts for key in re.findall(r"\bkey: '?([a-z_]+)'?", text)}
    names = [name for section in settings_file.sections() for name in settings_file[section]]
    assert [name for name in names if name not in known] == []
    assert len(names) > 10

"""A secret goes from the vault to a file that root alone reads, and is found nowhere else on the way."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import task_secrets
import yaml
from ansible.parsing.vault import VaultLib, VaultSecret

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.hosts.host_scripts import RESTORE_STATE, SAVE_STATE
from fleet.rollout.release import Shipment
from fleet.site.inventory import load_inventory
from fleet.verbs.validate import validate
from tests.unit.test_host_scripts import host, run
from tests.unit.test_vault import HOSTS, PASSWORD, SITE

__all__ = ["host"]

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "planted-3f9c0d71b2-secret"
# As it stands in text, in JSON that was encoded, and in a module's arguments.
FORMS = (PLANTED.encode(), base64.b64encode(PLANTED.encode())[:-4])
TASKS = [
    {"name": "chief-0", "server": False},
    {"name": "evaluator-0", "server": False},
    {"name": "worker-0", "server": True},
]


def holds(data: bytes) -> bool:
    return any(form in data for form in FORMS)


class Site:
    """An inventory with a vault, and a playbook that runs the role's own tasks on directories of the test's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.etc, self.units = root / "host/etc/trainer", root / "host/systemd"
        self.units.mkdir(parents=True)
        self.inventory = root / "site"
        (self.inventory / "group_vars/all").mkdir(parents=True)
        head = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        hosts = {"chief": {"hosts": {"head": head}}}
        (self.inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
        (root / "password").write_text(PASSWORD)
        self.tell({"API_KEY": PLANTED})
        tasks = yaml.safe_load((ROOT / "roles/trainer/tasks/main.yml").read_text())
        keeping = next(each for each in tasks if "task_secrets" in each)
        play = {
            "hosts": "chief",
            "gather_facts": False,
            "vars_files": [str(ROOT / "roles/trainer/vars/main.yml")],
            "tasks": [
                {"ansible.builtin.import_tasks": str(ROOT / "roles/trainer/tasks/secrets.yml")},
                {key: value for key, value in keeping.items() if key != "notify"},
            ],
        }
        (root / "play.yml").write_text(yaml.safe_dump([play]))

    def tell(self, secrets: dict[str, Any]) -> None:
        text = yaml.safe_dump({"trainer_secrets": secrets})
        shut = VaultLib([("default", VaultSecret(PASSWORD.encode()))]).encrypt(text)
        (self.inventory / "group_vars/all/vault.yml").write_bytes(shut)

    def play(self, *arguments: str, tasks: list[dict[str, Any]] = TASKS) -> subprocess.CompletedProcess[str]:
        given = {
            "trainer_tasks": tasks,
            "__trainer_secrets_dir": f"{self.etc}/secrets",
            "__trainer_secrets_coming": f"{self.etc}/secrets-coming",
        }
        command = ["ansible-playbook", "--inventory", self.inventory, "--extra-vars", json.dumps(given)]
        return subprocess.run(
            [*command, "--extra-vars", json.dumps({"__trainer_units": str(self.units)}), *arguments, "play.yml"],
            cwd=self.root,
            env=os.environ
            | {
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_LIBRARY": str(ROOT / "roles/trainer/library"),
                "ANSIBLE_VAULT_PASSWORD_FILE": str(self.root / "password"),
                "ANSIBLE_LOG_PATH": str(self.root / "log"),
                "ANSIBLE_LOCAL_TEMP": str(self.root / "tmp"),
                "ANSIBLE_REMOTE_TEMP": str(self.root / "remote"),
                "ANSIBLE_DISPLAY_ARGS_TO_STDOUT": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def changed(self, *arguments: str, **more: Any) -> bool:
        done = self.play(*arguments, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return "changed=0" not in done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def seen_in_proc() -> Iterator[list[str]]:
    """Where the secret stands in a command line or an environment, looked for as often as can be."""
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for name in ("cmdline", "environ"):
                for path in Path("/proc").glob(f"[0-9]*/{name}"):
                    try:
                        if holds(path.read_bytes()):
                            seen.append(str(path))
                    except OSError:
                        continue

    looking = threading.Thread(target=look)
    looking.start()
    yield seen
    over.set()
    looking.join()


def test_a_planted_secret_is_found_in_its_own_files_alone(site: Site, seen_in_proc: list[str]) -> None:
    done = site.play("-vvvvv", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not holds((done.stdout + done.stderr).encode())
    assert (site.root / "log").read_text().count("Keep the secrets for the tasks") > 0
    found = [path for path in site.root.rglob("*") if path.is_file() and holds(path.read_bytes())]
    assert sorted(found) == [site.etc / "secrets/API_KEY", site.etc / "secrets-coming/API_KEY"]
    for path in found:
        assert path.read_text() == PLANTED
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert seen_in_proc == []


def test_a_task_that_fails_does_not_say_it_either(site: Site) -> None:
    site.etc.parent.mkdir(parents=True)
    site.etc.write_text("in the way of the directory")
    done = site.play("-vvvvv", "--diff")
    assert done.returncode == 2
    assert not holds((done.stdout + done.stderr + (site.root / "log").read_text()).encode())


def drop_ins(site: Site) -> dict[str, str]:
    found = sorted(site.units.rglob("*.conf"))
    return {path.relative_to(site.units).as_posix(): path.read_text() for path in found}


def test_the_tasks_that_run_the_program_load_it_and_no_others(site: Site) -> None:
    assert site.changed("--check")
    assert drop_ins(site) == {}
    assert not (site.etc / "secrets").exists()
    assert site.changed()
    loaded = f"# Ansible managed\n[Service]\nLoadCredential=API_KEY:{site.etc}/secrets/API_KEY\n"
    tasks = ("chief-0", "evaluator-0")
    assert drop_ins(site) == {f"trainer@{task}.service.d/psfleet-secrets.conf": loaded for task in tasks}
    assert not site.changed()


class Kept:
    """What the module keeps in directories of the test's, without Ansible."""

    def __init__(self, root: Path) -> None:
        self.directory, self.units = root / "secrets", root / "units"
        self.units.mkdir()

    def keep(self, secrets: dict[str, str], *tasks: str) -> tuple[int, int]:
        written, removed = task_secrets.keep(secrets, self.directory, self.units, tasks, check=False)
        return len(written), len(removed)

    def there(self) -> tuple[dict[str, str], list[str]]:
        found = sorted(self.directory.glob("*"))
        loading = sorted(path.parent.name for path in self.units.rglob(task_secrets.DROP_IN))
        return {path.name: path.read_text() for path in found}, loading


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_what_changed_is_written_and_what_is_gone_is_taken_away(kept: Kept) -> None:
    assert kept.keep({"API_KEY": PLANTED, "OTHER.key": "x"}, "chief-0", "evaluator-0") == (5, 0)
    assert kept.keep({"API_KEY": PLANTED, "OTHER.key": "x"}, "chief-0", "evaluator-0") == (0, 0)
    assert kept.keep({"API_KEY": "another"}, "chief-0") == (2, 2)
    assert kept.there() == ({"API_KEY": "another"}, ["trainer@chief-0.service.d"])
    assert "OTHER" not in "".join(path.read_text() for path in kept.units.rglob("*.conf"))
    assert kept.keep({}, "chief-0") == (0, 2)
    assert kept.there() == ({}, [])
    assert kept.keep({}, "chief-0") == (0, 0)


def test_a_directory_that_others_may_change_is_found_by_a_look_and_fixed(kept: Kept) -> None:
    kept.keep({"API_KEY": PLANTED}, "chief-0")
    kept.directory.chmod(0o777)
    found = task_secrets.keep({"API_KEY": PLANTED}, kept.directory, kept.units, ["chief-0"], check=True)
    assert found == ([str(kept.directory)], [])
    assert kept.keep({"API_KEY": PLANTED}, "chief-0") == (1, 0)
    assert kept.directory.stat().st_mode & 0o777 == 0o700


def test_a_text_that_is_encrypted_by_itself_is_opened(site: Site) -> None:
    shut = VaultLib([("default", VaultSecret(PASSWORD.encode()))]).encrypt(PLANTED).decode()
    text = "".join(f"    {line}\n" for line in shut.splitlines())
    (site.inventory / "group_vars/all/vault.yml").write_text(f"trainer_secrets:\n  API_KEY: !vault |\n{text}")
    assert site.changed("-vvvvv", "--diff")
    assert (site.etc / "secrets/API_KEY").read_text() == PLANTED
    assert not holds((site.root / "log").read_bytes())


def test_a_host_that_only_serves_gets_none(site: Site) -> None:
    site.changed()
    assert site.changed(tasks=[TASKS[2]])
    assert list((site.etc / "secrets").iterdir()) == []
    assert drop_ins(site) == {}


def test_a_file_that_others_may_read_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "API_KEY"
    path.write_text(PLANTED)
    path.chmod(0o644)
    assert task_secrets.write(path, PLANTED, 0o600, check=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not task_secrets.write(path, PLANTED, 0o600, check=False)


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("as it was")
    (tmp_path / "API_KEY").symlink_to("elsewhere")
    assert task_secrets.write(tmp_path / "API_KEY", PLANTED, 0o600, check=False)
    assert (tmp_path / "elsewhere").read_text() == "as it was"
    assert not (tmp_path / "API_KEY").is_symlink()


def inventory(root: Path, secrets: Any) -> Path:
    (root / "group_vars").mkdir()
    (root / "hosts.yml").write_text(yaml.safe_dump(HOSTS))
    (root / "group_vars/worker.yml").write_text("ansible_host: 10.7.0.3\n")
    text = yaml.safe_dump({**SITE, "trainer_secrets": secrets})
    shut = VaultLib([("default", VaultSecret(PASSWORD.encode()))]).encrypt(text)
    (root / "group_vars/all.yml").write_bytes(shut)
    (root.parent / "password").write_text(PASSWORD)
    return root


@pytest.fixture
def open_vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ansible.constants.DEFAULT_VAULT_PASSWORD_FILE", str(tmp_path / "password"))


def refusal(made: Path, as_json: bool = False) -> str:
    """Return all that `fab validate` says of a wrong inventory."""
    out = io.StringIO()
    with pytest.raises(OperatorMistake) as caught:
        validate(Console(out, json_out=out if as_json else None), str(made))
    return out.getvalue() + str(caught.value)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "inventory"
    place.mkdir()
    return place


@pytest.mark.parametrize(
    "secrets",
    [{"no/name": PLANTED}, {"LIST": [PLANTED]}, PLANTED, {"": PLANTED}, {"EMPTY": "", "OTHER": PLANTED}],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_one_is_refused_without_its_text(secrets: Any, as_json: bool, place: Path, open_vault: None) -> None:
    message = refusal(inventory(place, secrets), as_json)
    assert "trainer_secrets is not shown here; expected texts by name" in message
    assert not holds(message.encode())


def test_two_hosts_that_differ_are_told_without_it(place: Path, open_vault: None) -> None:
    made = inventory(place, {"API_KEY": PLANTED})
    (made / "host_vars").mkdir()
    (made / "host_vars/ps.yml").write_text("trainer_secrets: {API_KEY: another}\n")
    message = refusal(made)
    assert "trainer_secrets differs between 'head' and 'ps'" in message
    assert not holds(message.encode())
    assert "another" not in message


def test_fab_gives_ansible_none_of_it(place: Path, open_vault: None) -> None:
    """ansible-playbook opens the vault itself; a command line is for everybody to read."""
    known = load_inventory(str(inventory(place, {"API_KEY": PLANTED})))
    assert known.variables["head"]["trainer_secrets"] == {"API_KEY": PLANTED}
    assert not holds(json.dumps(Shipment(known, ("preflight.yml",), "abc123", {}).arguments).encode())


def test_what_a_start_keeps_has_them_for_root_alone(host: Path) -> None:
    unit = host / "etc/systemd/system/trainer@chief-0.service.d/psfleet-secrets.conf"
    new = host / "etc/systemd/system/trainer@evaluator-0.service.d/psfleet-secrets.conf"
    secret = host / "etc/trainer/secrets/API_KEY"
    for path in (unit, new, secret):
        path.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    secret.write_text(PLANTED)
    secret.chmod(0o600)
    run(SAVE_STATE, host)
    before = host / "opt/trainer/before"
    readable = [path for path in before.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert [path.name for path in readable] == ["running"]
    assert before.stat().st_mode & 0o777 == 0o755
    secret.unlink()
    unit.write_text("[Service]\n# new\n")
    new.write_text("[Service]\n")
    run(RESTORE_STATE, host)
    assert secret.read_text() == PLANTED
    assert secret.stat().st_mode & 0o777 == 0o600
    assert unit.read_text() == "[Service]\n"
    assert not new.exists()

"""Vault-encrypted variables in `fab`: opened with a password's file, or with one that is typed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ansible.parsing.vault import VaultLib, VaultSecret

from fleet.errors import OperatorMistake
from fleet.output.tables import ProgressLine
from fleet.rollout.release import Shipment, ship
from fleet.site.inventory import load_inventory

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct horse"
HOSTS = {
    "chief": {"hosts": {"head": {"ansible_host": "10.7.0.1"}}},
    "ps": {"hosts": {"ps": {"ansible_host": "10.7.0.2"}}},
    "worker": {"hosts": {"worker": {}}},
}
SITE = {
    "cluster_shared_dir": "/srv/trainer",
    "cluster_uid": 6006,
    "trainer_run": {"program": "trainer.examples.digits:Digits"},
}


def shut(text: str) -> str:
    return VaultLib([("default", VaultSecret(PASSWORD.encode()))]).encrypt(text).decode()


BOTH = pytest.mark.parametrize("inventory", ["one variable", "a whole file"], indirect=True)


@pytest.fixture
def inventory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An inventory in which the worker's address is secret."""
    variables = tmp_path / "site" / "group_vars"
    variables.mkdir(parents=True)
    (tmp_path / "site" / "hosts.yml").write_text(yaml.safe_dump(HOSTS))
    (variables / "all.yml").write_text(yaml.safe_dump(SITE))
    if getattr(request, "param", "") == "a whole file":
        (variables / "worker.yml").write_text(shut("ansible_host: 10.7.0.3\n"))
    else:
        secret = "".join(f"  {line}\n" for line in shut("10.7.0.3").splitlines())
        (variables / "worker.yml").write_text(f"ansible_host: !vault |\n{secret}")
    return tmp_path / "site"


def fab(*arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    # In a session without a terminal: else getpass would ask the one that the tests were started from.
    return subprocess.run(
        [sys.executable, "-m", "fabric", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        input=typed,
        capture_output=True,
        text=True,
        start_new_session=True,
    )


@BOTH
def test_without_a_password_the_fix_is_named(inventory: Path) -> None:
    done = fab("validate", "--inventory", str(inventory))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Say where the vault's password is: ANSIBLE_VAULT_PASSWORD_FILE, or --ask-vault-pass" in done.stderr


@BOTH
def test_a_passwords_file_opens_it(inventory: Path, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    done = fab("validate", "--inventory", str(inventory), ANSIBLE_VAULT_PASSWORD_FILE=str(tmp_path / "password"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("arguments", "setting"), [(["--ask-vault-pass"], "0"), ([], "1")])
def test_a_typed_password_opens_it(inventory: Path, arguments: list[str], setting: str) -> None:
    asked = ["validate", "--inventory", str(inventory), *arguments]
    done = fab(*asked, typed=f"{PASSWORD}\n", ANSIBLE_ASK_VAULT_PASS=setting)
    assert done.returncode == 0, done.stdout + done.stderr
    assert PASSWORD not in done.stdout + done.stderr


@pytest.mark.parametrize(("typed", "message"), [("", "no password was typed"), ("\n", "the password is empty")])
def test_no_password_is_a_mistake(inventory: Path, typed: str, message: str) -> None:
    done = fab("validate", "--inventory", str(inventory), "--ask-vault-pass", typed=typed)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr


def type_password(_prompt: str) -> str:
    return PASSWORD


def test_ansible_gets_what_was_typed(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getpass", type_password)
    monkeypatch.setenv("ANSIBLE_ASK_VAULT_PASS", "1")  # it would wait at a terminal that it doesn't have
    read = load_inventory(str(inventory), check=True, ask_vault_pass=True)
    assert read.hosts["worker"].address == "10.7.0.3"
    ship(Shipment(read, ("preflight.yml",), "abc123", {}), ProgressLine(io.StringIO()))
    forgotten = replace(read, vault_password=None)
    with pytest.raises(OperatorMistake, match=r"(?i)vault"):
        ship(Shipment(forgotten, ("preflight.yml",), "abc123", {}), ProgressLine(io.StringIO()))


def test_a_password_is_not_shown(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getpass", type_password)
    assert PASSWORD not in repr(load_inventory(str(inventory), ask_vault_pass=True))

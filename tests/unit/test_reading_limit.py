"""An inventory whose script or lookup hangs is refused by every verb, with the command that hangs."""

from __future__ import annotations

import io
import signal
import subprocess
import threading
from pathlib import Path

import ansible.constants as settings
import pytest

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.site.inventory import load_inventory
from fleet.site.inventory_cache import recall_inventory
from fleet.site.reading_limit import READ_SECONDS, Late, limited
from fleet.verbs.validate import validate
from tests.unit.stand_ins import put_program
from tests.unit.test_validate import HOSTS, SITE

FIX = "Run it by hand to see what it waits for. PSFLEET_INVENTORY_SECONDS gives it longer"
LATE = f"has not ended after {READ_SECONDS:g} s. {FIX}"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "hosts.yml").write_text(
        HOSTS.replace("    train:", "    train-2: {ansible_host: 192.0.2.31}\n    train:")
    )
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(SITE)
    return tmp_path


def refused(site: Path) -> str:
    with pytest.raises(OperatorMistake) as caught:
        validate(Console(io.StringIO()), str(site))
    return str(caught.value)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Have the limit end whenever a command is waited for; these are the commands."""
    found: list[subprocess.Popen[bytes]] = []

    def communicate(self: subprocess.Popen[bytes]) -> None:
        found.append(self)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    return found


def test_a_script_that_hangs_is_named_and_ended(site: Path, waited: list[subprocess.Popen[bytes]]) -> None:
    script = put_program(site / "more.sh", "#!/bin/sh\nexec sleep 3600\n")
    assert f"`{script} --list` {LATE}" in refused(site)
    for read in (load_inventory, recall_inventory):
        with pytest.raises(OperatorMistake, match=r"more\.sh --list` has not ended"):
            read(str(site))
    assert [each.wait() for each in waited] == [-signal.SIGKILL] * 3


def test_a_lookup_that_hangs_is_waited_for_once_and_named(site: Path, waited: list[subprocess.Popen[bytes]]) -> None:
    with (site / "group_vars" / "all.yml").open("a") as file:
        file.write("trainer_return_seconds: \"{{ lookup('pipe', 'exec sleep 3600') }}\"\n")
    assert f"trainer_return_seconds can't be read: `exec sleep 3600` {LATE}" in refused(site)
    assert [each.wait() for each in waited] == [-signal.SIGKILL]  # of four hosts
    with pytest.raises(OperatorMistake, match=r"variable 'trainer_return_seconds' can't be rendered: .*has not ended"):
        load_inventory(str(site)).variables["train"]["trainer_return_seconds"]


def test_a_script_with_a_vaults_password_that_hangs_is_named(
    site: Path, waited: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = put_program(site.parent / "password.sh", "#!/bin/sh\nexec sleep 3600\n")
    monkeypatch.setattr(settings, "DEFAULT_VAULT_IDENTITY_LIST", [str(script)])
    assert f"the vault's password can't be read: `{script}` {LATE}" in refused(site)
    assert [each.wait() for each in waited] == [-signal.SIGKILL]


def test_what_ends_leaves_no_timer_and_the_handler_as_it_was() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limited("it"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)


def test_a_slow_inventory_is_given_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSFLEET_INVENTORY_SECONDS", "600")
    with limited("it"):
        assert READ_SECONDS < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    with pytest.raises(Late, match="it has not ended after 600 s"), limited("it"):
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("given", ["0", "-1", "inf", "nan", "2 min"])
def test_a_limit_that_is_no_number_of_seconds_is_named(site: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSFLEET_INVENTORY_SECONDS", given)
    assert refused(site) == f"PSFLEET_INVENTORY_SECONDS is {given!r}: expected a number of seconds, such as 360"


def test_a_thread_reads_without_a_limit() -> None:
    done: list[bool] = []

    def read() -> None:
        with limited("it"):
            done.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert done == [True]

"""An inventory is known again by all that Ansible reads for it, and read by Ansible where that differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.errors import OperatorMistake
from fleet.places import CODE as ROOT
from fleet.site import inventory_cache
from fleet.site.inventory import Inventory, load_inventory
from fleet.site.reader import plain_value

HOSTS = """
chief: {hosts: {head: {ansible_host: 192.0.2.10}}}
ps: {hosts: {store: {ansible_host: 192.0.2.20, ansible_port: 2222}}}
worker: {hosts: {w-0: {ansible_host: 192.0.2.30}, w-1: {ansible_host: 192.0.2.31}}, vars: {worker_tasks: 2}}
"""
SITE = "ansible_user: admin\ncluster_shared_dir: /srv/trainer\ntrainer_run: {run: a, steps: 3}\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site/group_vars").mkdir(parents=True)
    (tmp_path / "site/hosts.yml").write_text(HOSTS)
    (tmp_path / "site/group_vars/all.yml").write_text(SITE)
    return tmp_path / "site"


@pytest.fixture
def recall(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Inventory, bool]]:
    """Read the inventory; returns it, and whether Ansible read it."""
    read, asked = inventory_cache.read_by_ansible, []
    monkeypatch.setattr(inventory_cache, "read_by_ansible", lambda *given: (asked.append(1), read(*given))[1])

    def recall(**environment: str) -> tuple[Inventory, bool]:
        asked.clear()
        more = {"HOME": str(tmp_path), **environment}
        return inventory_cache.recall_inventory(str(site), more), bool(asked)

    return recall


def plain(inventory: Inventory) -> Inventory:
    return replace(inventory, variables={host: plain_value(dict(each)) for host, each in inventory.variables.items()})


def test_what_is_recalled_is_what_ansible_reads(site: Path, recall: Callable[..., tuple[Inventory, bool]]) -> None:
    first, by_ansible = recall()
    assert by_ansible
    again, by_ansible = recall()
    assert not by_ansible
    assert plain(again) == plain(first) == plain(load_inventory(str(site)))
    assert again.hosts["store"].port == 2222
    assert [task.name for task in again.tasks] == ["chief-0", "ps-0", *(f"worker-{number}" for number in range(4))]


def edit(site: Path) -> None:
    before = (site / "group_vars/all.yml").stat()
    (site / "group_vars/all.yml").write_text(SITE.replace("admin", "other"))
    os.utime(site / "group_vars/all.yml", ns=(before.st_atime_ns, before.st_mtime_ns))


def add_variables_of_a_host(site: Path) -> None:
    (site / "host_vars").mkdir()
    (site / "host_vars/store.yml").write_text("ansible_user: other\n")


def add_a_directory(site: Path) -> None:
    (site / "group_vars/ps").mkdir()
    (site / "group_vars/ps/login.yml").write_text("ansible_user: other\n")


@pytest.mark.parametrize("change", [edit, add_variables_of_a_host, add_a_directory])
def test_a_change_is_read(
    site: Path, recall: Callable[..., tuple[Inventory, bool]], change: Callable[[Path], None]
) -> None:
    recall()
    change(site)
    inventory, by_ansible = recall()
    assert by_ansible
    if change is edit:  # of the others Ansible remembers in this process that they were missing
        assert inventory.hosts["store"].user == "other"
    assert not recall()[1]


def test_ansibles_environment_counts(recall: Callable[..., tuple[Inventory, bool]]) -> None:
    recall()
    assert recall(ANSIBLE_REMOTE_USER="x")[1]


def test_what_was_edited_while_ansible_read_is_not_kept(
    site: Path, recall: Callable[..., tuple[Inventory, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = inventory_cache.read_by_ansible
    monkeypatch.setattr(inventory_cache, "read_by_ansible", lambda *given: (read(*given), edit(site))[0])
    recall()
    monkeypatch.setattr(inventory_cache, "read_by_ansible", read)
    (site / "group_vars/all.yml").write_text(SITE)
    assert not list((site.parent / ".cache/psfleet/inventories").glob("*"))


@pytest.mark.parametrize(
    "line",
    [
        "a: '{{ 1 }}'",
        "a: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  00",
        "day: 2026-01-01",
        "a: !unsafe '{{ b }}'",
        '"plugin": x',
    ],
)
def test_what_the_files_do_not_say_is_read_each_time(
    site: Path, recall: Callable[..., tuple[Inventory, bool]], line: str
) -> None:
    with (site / "group_vars/all.yml").open("a") as file:
        file.write(f"{line}\n")
    assert [recall()[1] for _ in range(2)] == [True, True]


def test_a_script_or_a_fifo_is_ansibles(site: Path) -> None:
    assert inventory_cache.name_of(str(site), {}) is not None
    (site / "hosts.yml").chmod(0o755)
    assert inventory_cache.name_of(str(site), {}) is None
    (site / "hosts.yml").chmod(0o644)
    os.mkfifo(site / "group_vars/all")
    assert inventory_cache.name_of(str(site), {}) is None


def test_a_mistake_is_no_memory(site: Path, recall: Callable[..., tuple[Inventory, bool]]) -> None:
    (site / "hosts.yml").write_text("ps: {hosts: {store: {ansible_host: 192.0.2.20}}}\n")
    for _ in range(2):
        with pytest.raises(OperatorMistake, match="group 'chief' has no task"):
            recall()


def test_a_memory_is_the_users_own_and_few_are_kept(
    site: Path, tmp_path: Path, recall: Callable[..., tuple[Inventory, bool]]
) -> None:
    for number in range(inventory_cache.KEPT + 3):
        (site / "group_vars/all.yml").write_text(f"{SITE}number: {number}\n")
        recall()
    kept = list((tmp_path / ".cache/psfleet/inventories").iterdir())
    assert len(kept) == inventory_cache.KEPT
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    for path in kept:
        path.write_text("{")
    assert recall()[1]  # a damaged one is read by Ansible


def test_a_look_imports_no_ansible(tmp_path: Path) -> None:
    """As `fab status` reads the default inventory, where ansible.cfg says which one that is."""
    shutil.copytree(ROOT / "inventory/three-machines", tmp_path / "site")
    look = "import sys; from fleet.site.inventory_cache import recall_inventory; recall_inventory(sys.argv[1])"
    look += "; print(any(name.partition('.')[0] == 'ansible' for name in sys.modules))"
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-c", look, str(tmp_path / "site")]
    found = [
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert found == ["True\n", "False\n"]

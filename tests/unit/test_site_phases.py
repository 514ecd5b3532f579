"""Which hosts and which tags site.yml's phases have, as Ansible lists them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def listed(inventory: Path, *arguments: str) -> str:
    command = ["ansible-playbook", "--inventory", inventory, "site.yml", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_no_play_names_a_host_that_is_in_no_group_of_ours(tmp_path: Path) -> None:
    inventory = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
    inventory["bastions"] = {"hosts": {"bastion": {"ansible_host": "127.0.0.1"}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    said = listed(tmp_path / "hosts.yml", "--list-hosts")
    assert said.count("      worker-0\n") >= 6
    assert "      bastion\n" not in said


def test_tags_are_the_roles_names() -> None:
    tags = re.findall(r"TASK TAGS: \[(.*)\]", listed(ROOT / "inventory/lab", "--list-tags"))
    found = {tag for line in tags for tag in line.split(", ")} - {""}
    assert found == {role.name for role in (ROOT / "roles").iterdir()} | {"always"}

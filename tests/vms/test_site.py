"""site.yml on VMs: run again."""

import json
import os
import subprocess

from tests.hosts import ROOT


def test_second_run_changes_nothing():
    environment = os.environ | {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"}
    again = subprocess.run(["ansible-playbook", "site.yml"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr
    stats = json.loads(again.stdout[again.stdout.find("{\n") :])["stats"]
    assert {host: one["changed"] for host, one in stats.items() if one["changed"]} == {}

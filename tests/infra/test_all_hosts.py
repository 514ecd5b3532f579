"""What every host has in common."""

import json
import re
from pathlib import Path

import pytest

from tests.hosts import name_of

testinfra_hosts = ["ansible://all"]
pytestmark = pytest.mark.usefixtures("long_run", "_as_root")
ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/trainer/current/env/bin/python"


def python_minor(host):
    return host.check_output(f"{PYTHON} -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'")


def test_user_has_the_one_uid(host, truth):
    user = host.user("trainer")
    name = next(iter(truth["_meta"]["hostvars"]))
    assert user.uid == user.gid == truth["_meta"]["hostvars"][name]["cluster_uid"]
    assert user.shell == "/usr/sbin/nologin"


def test_silent_connections_are_given_up_soon(host):
    assert host.sysctl("net.ipv4.tcp_retries2") == 6


def test_ports_of_tasks_are_kept_from_outgoing_connections(host, truth):
    jobs = [job for job in ("chief", "ps", "worker") if name_of(host) in truth[job]["hosts"]]
    kept = host.file("/proc/sys/net/ipv4/ip_local_reserved_ports").content_string.strip()
    assert kept == ",".join({"chief": "2222", "ps": "2300", "worker": "2400"}[job] for job in jobs)


def test_everybody_may_read_the_release_and_its_environment(host):
    shut = "find -L /opt/trainer/current ! -perm -004 -o -type d ! -perm -001"
    assert host.check_output(shut) == ""


def test_journal_has_its_limit(host):
    output = host.check_output("journalctl --quiet --output=cat --identifier=systemd-journald --grep='System Journal'")
    assert re.search(r" max 1(\.0)?G,", output.splitlines()[-1])  # systemd 252 writes 1.0G, 257 1G


def test_journal_has_no_text_of_the_files_that_were_written(host):
    """Ansible's modules note there what they were given."""
    assert host.check_output("journalctl --quiet --output=cat --identifier=ansible-many_files") == ""


def test_shared_path_is_mounted_and_writable_by_the_user(host):
    assert host.mount_point("/srv/trainer").exists
    # runuser: a strict sudo wants a terminal for all users but the login.
    assert host.run("runuser -u trainer -- test -w /srv/trainer").rc == 0


def test_every_host_left_its_marker(host, truth):
    written = {
        marker: host.file(f"/srv/trainer/.psfleet-host-{marker}").content_string
        for marker in truth["_meta"]["hostvars"]
    }
    assert len(set(written.values())) == len(written)
    assert host.file("/etc/machine-id").content_string in written.values()


def test_check_of_the_shared_path_passes(host):
    assert host.run("/usr/local/sbin/psfleet-check-shared-path").rc == 0


def test_current_release_is_complete(host):
    release = json.loads(host.file("/opt/trainer/current/release.json").content_string)
    assert host.file("/opt/trainer/current").linked_to == f"/opt/trainer/releases/{release['id']}"
    assert host.file("/opt/trainer/current/slow.py").exists
    assert host.file("/opt/trainer/current/env").linked_to.endswith(release["environments"][python_minor(host)]["name"])


INSTALLED = """
import json
from importlib.metadata import distributions
found = list(distributions())
versions = {each.name.lower().replace("_", "-"): each.version for each in found}
gone = [str(file) for each in found for file in each.files or () if not file.locate().exists()]
left_out = ("tensorflow/include/",)  # as python_environment says
gone = [file for file in gone if not file.endswith(".pyc") and not file.startswith(left_out)]
print(json.dumps({"versions": versions, "gone": gone}))
"""


def test_environment_has_the_locked_versions_with_all_of_their_files(host):
    lock = (ROOT / f"locks/cpu-no-gpu-{python_minor(host)}.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", lock, re.MULTILINE))
    installed = json.loads(host.check_output(f"{PYTHON} -c %s", INSTALLED))
    assert locked.items() <= installed["versions"].items()
    assert installed["gone"] == []


def test_bytecode_is_compiled(host):
    package = "/opt/trainer/current/env/lib/python3*/site-packages/tensorflow/python/framework"
    assert int(host.check_output(f"ls {package}/__pycache__ | wc -l")) >= int(
        host.check_output(f"ls {package}/*.py | wc -l")
    )


def test_what_runs_belongs_to_root(host):
    """A user who may write there would run as the user of the next start."""
    places = "/opt/trainer/releases /opt/trainer/envs /etc/trainer /etc/systemd/system /usr/local/sbin"
    assert host.check_output(f"find {places} ! -user root") == ""

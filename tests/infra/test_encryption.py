"""The same hosts with cluster_encryption, and back: what passes their bridge, and what a broken tunnel holds up."""

import json
import subprocess
import time

import pytest

from tests.hosts import wait_until

from .conftest import copy_inventory, fab, play, reboot, status, units, wait_for_progress

RUN = f"infra-encrypted-{int(time.time())}"
CLEAR = f"infra-clear-{int(time.time())}"
END = f"{RUN}-end"
# wireguard-go is for kernels without WireGuard.
ENCRYPTION = {"cluster_encryption": True, "wireguard_userspace": True}
LONG = {"program": "slow:Slow", "steps": 1_000_000, "checkpoint_seconds": 5}
# In TensorFlow's calls between tasks it stands hundreds of times a second.
PATTERN = b"/job:worker"
SECONDS = 10
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return copy_inventory(tmp_path_factory.mktemp("plain") / "lab", LONG | {"run": CLEAR}, "tests/infra/programs")


@pytest.fixture(scope="module")
def inventory(tmp_path_factory):
    copy = tmp_path_factory.mktemp("encrypted") / "lab"
    return copy_inventory(copy, LONG | {"run": RUN}, "tests/infra/programs", **ENCRYPTION)


@pytest.fixture(scope="module")
def encrypted(lab, inventory, plain):
    """A training through the tunnel; afterwards the hosts are as the lab's inventory says."""
    for name, host in lab.items():
        assert host.file("/dev/net/tun").exists, f"{name} has no /dev/net/tun: vagrant reload {name}"
    fab("stop-cluster", inventory=plain)
    done = play("site.yml", inventory=inventory)
    assert done.code == 0, done.failed
    started = fab("start-cluster", "--run", RUN, "--detach", inventory=inventory)
    assert started.returncode == 0, started.stdout + started.stderr
    wait_for_progress(lab)
    yield inventory
    fab("stop-cluster", inventory=inventory)
    done = play("site.yml")
    with lab["head"].sudo():
        runs = " ".join(f"/srv/trainer/runs/{run}" for run in (RUN, END, CLEAR))
        lab["head"].run_expect([0], f"rm -rf {runs} /srv/trainer/selection.json")
    assert done.code == 0, done.failed


def captured(tmp_path, what=""):
    """What passes the hosts' bridge in some seconds."""
    path = tmp_path / "capture"
    command = ["timeout", str(SECONDS), "tcpdump", "-i", "lxcbr0", "-s", "0", "-U", "-Z", "root", "-w", path, what]
    subprocess.run([word for word in command if word], capture_output=True)
    return path.read_bytes()


def keys(inventory):
    return (inventory / "wireguard-keys.txt").read_text()


def test_a_second_run_changes_nothing_and_restarts_nothing(lab, encrypted):
    before = units(lab)
    again = play("site.yml", inventory=encrypted)
    assert (again.code, again.changed) == (0, [])
    assert units(lab) == before


def test_tasks_know_one_another_by_the_tunnels_addresses_alone(lab, encrypted):
    for host in lab.values():
        with host.sudo():
            assert "10.0.3." not in host.check_output("cat /etc/trainer/*.env")


def test_a_capture_has_nothing_that_can_be_read(lab, encrypted, tmp_path):
    assert PATTERN not in captured(tmp_path)
    assert b"TensorFlow" not in captured(tmp_path)
    assert len(captured(tmp_path, "udp port 51820")) > 10_000
    wait_for_progress(lab)


def test_no_task_starts_without_the_interface_though_its_unit_is_active(lab, encrypted):
    host = lab["worker-0"]
    with host.sudo():
        host.run_expect([0], "ip link delete psfleet0")
        assert host.service("psfleet-wireguard").is_running
        host.run("systemctl restart --no-block trainer@worker-0")
        journal = "journalctl --no-pager --since=-90s --unit=trainer@worker-0"
        wait_until(lambda: "there is no interface psfleet0" in host.run(journal).stdout, 90, "the start is refused")
        assert not host.service("trainer@worker-0").is_running
        host.run_expect([0], "systemctl restart psfleet-wireguard")
        wait_until(lambda: host.service("trainer@worker-0").is_running, 120, "worker-0 runs")
    wait_for_progress(lab)


def test_keys_are_changed_while_tasks_train(lab, encrypted):
    before, running = keys(encrypted), units(lab)
    done = play("ansible/rotate_keys.yml", "--extra-vars", "reason=monthly", inventory=encrypted)
    assert done.code == 0, done.failed
    acts = json.loads(fab("history", "--json", "--lines", "3", inventory=encrypted).stdout)["history"]
    assert ("rotate_keys.yml", "done", "monthly") in [(act["verb"], act["outcome"], act.get("reason")) for act in acts]
    after = keys(encrypted)
    hosts = [line for line in before.splitlines() if not line.startswith("#")]
    assert len(hosts) == 5
    assert not set(hosts) & set(after.splitlines())
    wait_for_progress(lab)
    assert units(lab) == running
    again = play("site.yml", "--tags", "wireguard", inventory=encrypted)
    assert (again.code, again.changed, keys(encrypted)) == (0, [], after)


def test_keys_of_some_hosts_alone_are_not_changed(encrypted):
    before = keys(encrypted)
    done = play("ansible/rotate_keys.yml", "--limit", "ps-0,localhost", inventory=encrypted)
    assert done.code == 2
    assert any("worker-1" in message and "rotate_without=" in message for _, message in done.failed)
    assert keys(encrypted) == before


def test_the_tunnel_is_there_after_a_reboot(lab, encrypted):
    reboot(lab["ps-1"])
    with lab["ps-1"].sudo():
        lab["ps-1"].run_expect([0], "/usr/local/sbin/psfleet-wireguard check")
        wait_until(lambda: lab["ps-1"].service("trainer@ps-1").is_running, 120, "ps-1 runs")
    wait_for_progress(lab)


def test_a_training_through_the_tunnel_comes_to_its_end(lab, encrypted, tmp_path):
    fab("stop-cluster", inventory=encrypted)
    run = {"program": "trainer.examples.digits:Digits", "run": END, "steps": 500, "checkpoint_steps": 250}
    ending = copy_inventory(tmp_path / "lab", run, **ENCRYPTION)
    done = fab("start-cluster", "--run", END, inventory=ending)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (status(lab)["state"], status(lab)["step"]) == ("finished", 500)
    fab("stop-cluster", inventory=ending)


def test_it_goes_again_without_a_trace(lab, encrypted, plain, tmp_path):
    refused = fab("start-cluster", "--run", CLEAR, "--detach", inventory=plain)
    assert refused.returncode != 0
    assert "has a tunnel, and cluster_encryption is false" in refused.stdout + refused.stderr
    done = play("site.yml", inventory=plain)
    assert done.code == 0, done.failed
    for host in lab.values():
        with host.sudo():
            assert host.run("ip link show psfleet0").rc != 0
            left = host.check_output("find /etc /usr/local /run -name '*wireguard*' -path '*psfleet*'")
            assert left == "", left
            assert not host.file("/etc/systemd/system/trainer@.service.d/wireguard.conf").exists
    again = play("site.yml", inventory=plain)
    assert (again.code, again.changed) == (0, [])
    started = fab("start-cluster", "--run", CLEAR, "--detach", inventory=plain)
    assert started.returncode == 0, started.stdout + started.stderr
    wait_for_progress(lab)
    assert captured(tmp_path).count(PATTERN) > 100  # so it would have been found
    fab("stop-cluster", inventory=plain)

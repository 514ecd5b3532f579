"""The power goes right after a checkpoint was saved: what its manifest names is whole, and the training goes on.

libvirt ends the two processes that are the machines of the NFS server and of the chief. What their kernels had in
memory alone is lost: what the client had not sent to the server, and what the server had not written to its disk. So
this is about the whole way over NFS: the client's sync, an export that answers when its disk has it, the server's ext4.
The lab machine's own cache of the virtual disks survives. tests/training/test_power.py has a disk that loses its cache.

All tasks are one process on the chief's host, which a person starts again: test_reboot.py has a cluster that comes back
by itself.
"""

import json
import time

import pytest

from tests.hosts import answer, wait_until

from .conftest import boot_of, domain, virsh, wait_for_boot

UNSYNCED = "/var/tmp/psfleet-unsynced"
# Waits until the trainer says that a checkpoint is saved, and writes what nobody syncs, to see that the cut loses it.
WATCH = """
import json, os, sys, time
directory, unsynced = sys.argv[1:]
def saved():
    with open(os.path.join(directory, "events.jsonl")) as file:
        return [line for line in file if '"checkpoint-saved"' in line and line.endswith("\\n")]
before = len(saved())
while len(now := saved()) == before:
    time.sleep(0.02)
with open(unsynced, "wb") as file:
    file.write(bytes(4 << 20))
print(json.loads(now[-1])["message"].removeprefix("step "), flush=True)
"""
# What the server's own disk has, by Debian's Python and before the training is back.
COMPARE = """
import hashlib, json, pathlib, re, sys
found = {}
for path in pathlib.Path(sys.argv[1]).iterdir():
    if named := re.fullmatch(r"ckpt-(\\d+)\\.manifest\\.json", path.name):
        found[int(named[1])] = path
path = found[max(found)]
manifest = json.loads(path.read_text())
for name, size in manifest["files"].items():
    there = path.with_name(name).stat().st_size
    assert there == size > 0, f"{name} has {there} bytes instead of {size}"
index = path.with_name(f"ckpt-{manifest['step']}.index").read_bytes()
assert hashlib.sha256(index).hexdigest() == manifest["index_sha256"], f"the index of {path} is not what was saved"
print(manifest["step"])
"""
UNIT = "psfleet-test-power"
TRAIN = (
    "systemd-run --quiet --collect --unit={unit} --uid=trainer --setenv=PYTHONDONTWRITEBYTECODE=1 "
    "--working-directory=/opt/trainer/current /opt/trainer/current/env/bin/python -m trainer local --in-process "
    "--workers 1 --ps 1 --program trainer.examples.digits:Digits --shared-dir {path} --run {run} --steps 1000000 "
    "--checkpoint-seconds 20 --evaluation none --lease-seconds 60 --heartbeat-timeout-seconds 120"
)


@pytest.fixture(scope="module")
def train(head, site):
    """Begins the training, or goes on with it; gives the run."""
    run = f"power-{int(time.time())}"
    command = TRAIN.format(unit=UNIT, path=site["cluster_shared_dir"], run=run)

    def begin():
        with head.sudo():
            head.run_expect([0], command)
        return run

    yield begin
    answer(head, f"systemctl stop {UNIT}")


@pytest.fixture
def machines(head, server):
    """Both machines with their boots; what is without power afterwards gets it again."""
    boots = {host: boot_of(host) for host in (server, head)}
    assert all(boots.values())
    try:
        yield boots
    finally:
        for host in boots:
            if virsh("domstate", domain(host)).strip() == "shut off":
                virsh("start", domain(host))


def test_a_saved_checkpoint_is_whole_and_the_training_goes_on_from_it(train, machines, head, server, site):
    directory = f"{site['cluster_nfs_dir']}/runs/{train()}"
    wait_until(lambda: steps(server, directory, "checkpoint-saved"), 3600, "the first checkpoint")
    with server.sudo():
        step = int(server.check_output("timeout 1800 python3 -c %s %s %s", WATCH, directory, UNSYNCED))
    for host in machines:
        virsh("destroy", domain(host))

    for host in machines:
        virsh("start", domain(host))
    wait_for_boot(server, machines[server])
    left = answer(server, f"stat --format %s {UNSYNCED} || echo gone")
    assert left in ("0", "gone"), f"{left} bytes are there that nobody synced: the cut came too late, or lost nothing"
    with server.sudo():
        assert int(server.check_output("python3 -c %s %s/checkpoints", COMPARE, directory)) == step
    before = len(steps(server, directory, "restored"))

    wait_for_boot(head, machines[head])
    path = site["cluster_shared_dir"]
    wait_until(lambda: answer(head, f"findmnt --noheadings --output FSTYPE {path}") == "nfs4", 1200, "it is mounted")
    train()
    # TensorFlow compares the checksum of each tensor that it reads.
    wait_until(lambda: len(steps(server, directory, "restored")) > before, 3600, "it is restored")
    assert steps(server, directory, "restored")[before] == step
    wait_until(lambda: max(steps(server, directory, "checkpoint-saved")) > step, 3600, f"a checkpoint after {step}")
    assert "checkpoint-set-aside" not in answer(server, f"cat {directory}/events.jsonl")


def steps(server, directory, event):
    """The steps that the run's events of one kind name; a line that the cut broke off is left out."""
    found = []
    for line in answer(server, f"cat {directory}/events.jsonl").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["event"] == event:
            found.append(int(record["message"].split()[-1]))
    return found

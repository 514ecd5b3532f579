"""The power goes right after a checkpoint was saved: what its manifest names is whole, and the training goes on.

libvirt ends the two processes that are the machines of the NFS server and of the chief, where the ps is too. What their
kernels had in memory alone is lost: what the ps had not sent to the server, and what the server had not written to its
disk. So this is about the whole way over NFS: the client's sync, an export that answers when its disk has it, the
server's ext4. The lab machine's own cache of the virtual disks survives. tests/training/test_power.py has a disk that
loses its cache, too.
"""

import json

import pytest

from tests.hosts import answer, wait_until

from .conftest import boot_of, domain, status, virsh, wait_for_boot

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
# What the server's own disk has, by Debian's Python and before a client is back.
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
CHECK = """
import pathlib, sys
from trainer.run.catalogue import Catalogue
print(Catalogue(pathlib.Path(sys.argv[1])).check(int(sys.argv[2])) or "whole")
"""


@pytest.fixture(scope="module")
def cut(training, head, server, site):
    """Both machines without power, right after a checkpoint was saved: its step, and the boots that ended."""
    boots = {host: boot_of(host) for host in (server, head)}
    assert all(boots.values())
    directory = f"{site['cluster_nfs_dir']}/runs/{training}"
    with server.sudo():
        step = server.check_output("timeout 1800 python3 -c %s %s %s", WATCH, directory, UNSYNCED)
    for host in boots:
        virsh("destroy", domain(host))
    try:
        yield int(step), boots
    finally:
        for host in boots:
            if virsh("domstate", domain(host)).strip() == "shut off":
                virsh("start", domain(host))


def test_a_saved_checkpoint_is_whole_and_the_training_goes_on_from_it(cut, training, head, server, site):
    step, boots = cut
    virsh("start", domain(server))
    wait_for_boot(server, boots[server])
    left = answer(server, f"stat --format %s {UNSYNCED} || echo gone")
    assert left in ("0", "gone"), f"{left} bytes are there that nobody synced: the cut came too late, or lost nothing"
    directory = f"{site['cluster_nfs_dir']}/runs/{training}"
    with server.sudo():
        newest = int(server.check_output("python3 -c %s %s/checkpoints", COMPARE, directory))
    assert newest == step
    before = len(events(server, directory))

    virsh("start", domain(head))
    wait_for_boot(head, boots[head])
    path = site["cluster_shared_dir"]
    wait_until(lambda: answer(head, f"findmnt --noheadings --output FSTYPE {path}") == "nfs4", 1200, "it is mounted")
    with head.sudo("trainer"):
        program = "cd /opt/trainer/current && env/bin/python -c %s %s %s"
        assert head.check_output(program, CHECK, f"{path}/runs/{training}/checkpoints", str(step)) == "whole"

    after = wait_until(
        lambda: (now := status(head)).get("run") == training and (now.get("step") or 0) > step and now,
        3600,
        f"a step after {step}",
    )
    assert after["state"] == "training"
    since = events(server, directory)[before:]
    # TensorFlow compares the checksum of each tensor that it reads.
    assert [one["message"] for one in since if one["event"] == "restored"][:1] == [f"step {step}"], since
    assert not [one for one in since if one["event"] == "checkpoint-set-aside"], since


def events(server, directory):
    """What befell the run; a line that the cut broke off is left out."""
    found = []
    with server.sudo():
        lines = server.check_output("cat %s/events.jsonl", directory).splitlines()
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found

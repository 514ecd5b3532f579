"""A training on VMs, with its checkpoints on the NFS server."""

import json

from .conftest import status


def test_checkpoint_lies_on_the_server(training, head, server, site):
    run = f"{site['cluster_nfs_dir']}/runs/{training}"
    with server.sudo():
        manifests = server.check_output(f"ls {run}/checkpoints").split()
        newest = sorted(name for name in manifests if name.endswith(".manifest.json"))[-1]
        manifest = json.loads(server.file(f"{run}/checkpoints/{newest}").content_string)
        owner = server.file(f"{run}/checkpoints/{newest}").uid
    assert owner == site["cluster_uid"]
    assert manifest["step"] > 0
    assert status(head)["state"] in ("training", "finished")

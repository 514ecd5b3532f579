"""Reboots: of all machines at once, and of the server alone, with another disk behind its export."""

from .conftest import answer, reboot, status, wait_until


def test_all_machines_reboot_at_once_and_the_training_resumes(training, vms, head, site):
    before = status(head)
    assert before["state"] == "training", before
    reboot(*vms.values())
    after = wait_until(
        lambda: (now := status(head)).get("run") == training and (now.get("step") or 0) > before["step"] and now,
        3600,
        f"a step after {before['step']}",
    )
    assert after["updated"] > before["updated"]
    for host in vms.values():
        assert answer(host, "systemctl list-units --failed --plain --no-legend") == ""
    with head.sudo():
        assert head.mount_point(site["cluster_shared_dir"]).filesystem == "nfs4"


def test_a_stale_handle_is_mounted_anew(vms, head, server, site, truth):
    """The server's directory is made anew, as on a disk that was replaced: the clients' handles name nothing."""
    path, served = site["cluster_shared_dir"], site["cluster_nfs_dir"]
    worker = vms[truth["worker"]["hosts"][0]]
    answer(server, "exportfs -ua; echo 2 >/proc/sys/vm/drop_caches")
    moved = answer(
        server,
        f"cp --archive {served} {served}.new && mv {served} {served}.old && mv {served}.new {served} "
        f"&& rm -r {served}.old && exportfs -ra && echo moved",
    )
    assert moved == "moved"
    wait_until(lambda: "Stale" in answer(worker, f"LC_ALL=C ls {path} 2>&1"), 60, "the handle is stale")
    with worker.sudo():
        check = worker.run("/usr/local/sbin/psfleet-check-shared-path")
        assert check.rc == 1
        assert "stale" in check.stderr
        wait_until(lambda: worker.run("/usr/local/sbin/psfleet-check-shared-path").rc == 0, 120, "it is mounted anew")
        assert worker.mount_point(path).filesystem == "nfs4"

"""Reboots: of all machines at once, and of the server alone, with another disk behind its export."""

from tests.hosts import answer, wait_until

from .conftest import reboot, status


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


def test_a_stale_handle_is_mounted_again_by_itself(training, vms, head, server, site, truth):
    """The server's directory is made again, as on a disk that was replaced: the clients' handles name nothing."""
    path, served = site["cluster_shared_dir"], site["cluster_nfs_dir"]
    clients = {host: answer(host, "date +%s") for host in (head, vms[truth["worker"]["hosts"][0]])}
    # cp complains of what a save renames under its hands; such a checkpoint has no manifest yet.
    copy = f"rm -rf {served}.new; cp -a {served} {served}.new"
    # The tasks write on to the old directory until its last part is gone.
    swap = f"mv {served} {served}.old && mv {served}.new {served} && until rm -rf {served}.old; do sleep 0.1; done"
    assert answer(server, f"{copy}; {swap}; exportfs -f && exportfs -ra && echo moved") == "moved"
    for host, since in clients.items():
        command = f"journalctl --no-pager --unit=psfleet-remount --since=@{since}"
        wait_until(
            lambda host=host, command=command: "mounting it again" in answer(host, command),
            1200,
            "a stale handle is seen",
        )
        wait_until(
            lambda host=host: answer(host, f"ls -A {path}").count(".psfleet-host-") > 1, 1200, "it is mounted again"
        )
    before = status(head)  # as it was copied, or of a coordinator that is back
    wait_until(
        lambda: (now := status(head)).get("updated", 0) > before["updated"] and (now["step"] or 0) > before["step"],
        3600,
        f"a step after {before['step']}",
    )

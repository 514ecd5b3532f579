"""Reboots: of all machines at once, and of the server alone, with another disk behind its export."""

import json

from tests.hosts import answer, name_of, wait_until

from .conftest import boot_of, fab, reboot, status


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


def test_the_server_s_update_reboots_it_and_no_task_restarts(training, vms, head, server, site):
    """NFS hangs meanwhile, for reads too: what needs the path waits, and no step is lost."""
    units = "systemctl show --property=Id,InvocationID 'trainer@*.service'"
    log = f"cat {site['cluster_nfs_dir']}/runs/{training}/events.jsonl"
    before, boot = status(head), boot_of(server)
    tasks, past = [answer(host, units) for host in vms.values()], len(answer(server, log).splitlines())
    updated = fab("update-hosts", name_of(server), "--reboot", "only", "--timeout", "1800", "--json")
    assert updated.returncode == 0, updated.stdout + updated.stderr
    (row,) = json.loads(updated.stdout)["hosts"]
    print(row)
    assert (row["outcome"], row["rebooted"]) == ("updated", True)
    assert boot_of(server) not in ("", boot)
    wait_until(lambda: (status(head).get("step") or 0) > before["step"], 3600, f"a step after {before['step']}")
    assert [answer(host, units) for host in vms.values()] == tasks
    new = [json.loads(line) for line in answer(server, log).splitlines()[past:]]
    print([event for event in new if event["event"] != "checkpoint-saved"])
    assert [event for event in new if event.get("steps_lost")] == []


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

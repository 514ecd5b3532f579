"""What a task may do on the hosts, and what root does not do for it: sandboxes as systemd and the kernel make them."""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.hosts import ROOT, wait_until
from tests.unit.test_exposure import MOST

from .conftest import LONG_RUN, children, fab, play, wait_for_progress

pytestmark = pytest.mark.usefixtures("long_run")
PYTHON = "/opt/trainer/current/env/bin/python"
SHARED = "/srv/trainer"
PROBE = Path(__file__).with_name("sandbox_probe.py")
# A task of each job that the lab has, its host, and what of the shared path it may write.
TASKS = {
    "chief-0": ("head", {"runs", "sweeps"}),
    "evaluator-0": ("head", {"runs"}),
    "ps-0": ("ps-0", {"runs"}),
    "worker-0": ("worker-0", set()),
}
OF_THE_HOST = ("/etc", "/etc/trainer", "/opt/trainer", "/opt/trainer/current/", "/usr/local/sbin", "/var/lib/trainer")
# What the sandbox alone refuses; the rest the kernel refuses every user.
BY_THE_SANDBOX = {"a user namespace", "netlink", "packets to others", "processes of others", "homes", "a setuid file"}
INSTANCE = "trainer@probe.service"
DROP_INS = f"/run/systemd/system/{INSTANCE}.d"
# The tasks' own unit with another program: everything else of it stays.
OVERRIDE = """\
[Service]
Type=oneshot
NotifyAccess=none
Restart=no
WatchdogSec=0
TimeoutStartSec=300
EnvironmentFile=
ExecStartPre=
ExecStart=
ExecStart={command}
StandardOutput=truncate:/run/psfleet-probe.json
StandardError=journal
"""


def put(host, path, text):
    host.run_expect([0], f"cat >{path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE")


@contextmanager
def probe_on(host):
    with host.sudo():
        put(host, "/run/psfleet-probe.py", PROBE.read_text())
        try:
            yield
        finally:
            host.run_expect([0], f"rm -rf {DROP_INS} /run/psfleet-probe.*; systemctl daemon-reload")
            host.run(f"systemctl reset-failed {INSTANCE}")


def inside(host, task, *words, more=""):
    """What the probe says from within a task's sandbox: an instance of the tasks' unit with the task's drop-ins."""
    with probe_on(host):
        host.run_expect([0], f"mkdir -p {DROP_INS}; cp /etc/systemd/system/trainer@{task}.service.d/*.conf {DROP_INS}/")
        command = " ".join([PYTHON, "/run/psfleet-probe.py", *words])
        put(host, f"{DROP_INS}/zz-probe.conf", OVERRIDE.format(command=command) + more)
        host.run_expect([0], "systemctl daemon-reload")
        host.run_expect([0], f"systemctl start {INSTANCE}")
        return json.loads(host.check_output("cat /run/psfleet-probe.json"))


def outside(host, *words):
    """The same from the tasks' user without a sandbox."""
    with probe_on(host):
        command = f"setpriv --reuid=trainer --regid=trainer --init-groups {PYTHON} /run/psfleet-probe.py"
        return json.loads(host.check_output(" ".join([f"cd /; TMPDIR=/var/tmp {command}", *words])))


def test_no_installed_unit_exposes_more_than_it_must(lab):
    listed = "systemctl list-units --all --plain --no-legend 'trainer@*' 'psfleet-*.service' tensorboard.service"
    units = f"systemctl show --property=Id,FragmentPath $({listed} | cut --delimiter=' ' --fields=1)"
    found = {}
    for name, host in lab.items():
        with host.sudo():
            blocks = [dict(re.findall("(.+)=(.+)", block)) for block in host.check_output(units).split("\n\n")]
            # Not a timer of the moment.
            installed = [block["Id"] for block in blocks if block.get("FragmentPath", "").startswith("/etc/")]
            summaries = host.check_output(f"for unit in {' '.join(installed)}; do systemd-analyze security $unit; done")
        found |= {
            (name, unit): float(score) for unit, score in re.findall(r"exposure level for (\S+): ([0-9.]+)", summaries)
        }
        assert {unit for host, unit in found if host == name} == set(installed)
    print(found)
    bounds = {(name, unit): MOST[re.sub(r"@.*\.", "@.", unit)] for name, unit in found}
    assert {key: score for key, score in found.items() if score > bounds[key]} == {}
    assert {unit for _, unit in found} >= {"trainer@chief-0.service", "tensorboard.service", "psfleet-firewall.service"}


def test_what_tensorflow_needs_works_inside(lab):
    results = inside(lab["worker-0"], "worker-0", "needs")
    assert {name: what for name, what in results.items() if what != "ok"} == {}


@pytest.mark.slow
def test_the_probe_sees_a_sandbox_that_is_too_tight(lab):
    """What the unit says that it leaves out, and why."""
    results = inside(lab["worker-0"], "worker-0", "needs", more="MemoryDenyWriteExecute=yes\n")
    assert results["oneDNN's convolution"] != "ok"
    results = inside(lab["worker-0"], "worker-0", "needs", more="SystemCallFilter=~@resources\n")
    assert results["processors of threads"].startswith("PermissionError")
    results = inside(lab["worker-0"], "worker-0", "needs", more="ProcSubset=pid\n")
    assert results["the boot's id"].startswith("FileNotFoundError")


def test_nothing_of_the_machine_is_within_reach(lab):
    results = inside(lab["worker-0"], "worker-0", "refused")
    assert {name for name, what in results.items() if what == "ok"} == set()
    without = outside(lab["worker-0"], "refused")
    assert {name for name, what in without.items() if what == "ok"} >= BY_THE_SANDBOX


@pytest.mark.parametrize("task", TASKS)
def test_what_a_task_may_write_depends_on_its_job(lab, task):
    name, wanted = TASKS[task]
    host = lab[name]
    directories = host.check_output(f"find {SHARED} -maxdepth 1 -type d ! -name lost+found").split()
    assert {f"{SHARED}/{each}" for each in ("runs", "sweeps", "wheels", "data-service")} <= set(directories)
    results = inside(host, task, "writes", *directories, *OF_THE_HOST)
    assert {place for place, what in results.items() if what == "ok"} == {f"{SHARED}/{each}" for each in wanted}
    without = outside(host, "writes", *directories, *OF_THE_HOST)
    assert {place for place, what in without.items() if what == "ok"} == set(directories)


@pytest.fixture
def device(lab):
    """A device file that everybody may open, as the driver makes one for each GPU: FUSE's, which a lab host may use."""
    path = "/dev/psfleet-probe"
    with lab["worker-0"].sudo():
        lab["worker-0"].run_expect([0], f"mknod --mode=0666 {path} c 10 229")
        yield path
        lab["worker-0"].run_expect([0], f"rm -rf {path} /var/cache/trainer-cuda /var/cache/private/trainer-cuda")


def test_a_gpu_hosts_drop_in_opens_the_device_files_that_it_names_and_no_others(lab, device):
    """Without a GPU: the kernel knows no class char-nvidia then, so a device of the lab stands in for it."""
    drop_in = (ROOT / "roles/gpu/templates/psfleet-gpu.conf.j2").read_text().partition("\n")[2]
    results = {
        name: inside(lab["worker-0"], "worker-0", "opens", device, more=more)[device]
        for name, more in {
            "no GPUs": "",
            "GPUs": drop_in,
            "GPUs with this file": drop_in.replace("char-nvidia rw", f"{device} rw"),
        }.items()
    }
    assert results.pop("GPUs with this file") == "ok"
    assert results["no GPUs"].startswith(("PermissionError", "FileNotFoundError"))
    assert results["GPUs"].startswith("PermissionError: [Errno 1]")  # the group's, not the file's mode


ATTACK = """
import os, sys
os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
import tensorflow as tf
from tensorflow.python.eager import context
job, target, *places = sys.argv[1:]
tf.config.experimental_connect_to_host(target, job_name=job)
with tf.device(f"/job:{job}/task:0"):
    print("read", tf.io.read_file("/etc/hostname").numpy().decode().strip(), flush=True)
    for place in places:
        try:
            tf.io.write_file(place, "planted")
            context.async_wait()
            print("wrote", place, flush=True)
        except tf.errors.OpError as error:
            print("refused", place, error.message[:200], flush=True)
            context.context().clear_executor_errors()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "task", "port", "writes"),
    [("head", "worker-0", 2400, False), ("worker-0", "ps-0", 2300, True), ("worker-0", "chief-0", 2222, True)],
)
def test_a_graph_from_a_member_writes_what_the_servers_job_may(lab, truth, source, task, port, writes):
    """A member that was taken over sends one: docs/security.md says what it gets."""
    other, wheel = f"{SHARED}/runs/planted/checkpoint", f"{SHARED}/wheels/planted.whl"
    name, _ = TASKS[task]
    address = truth["_meta"]["hostvars"][name]["ansible_host"]
    attacker = lab[source]
    with attacker.sudo():
        attacker.run_expect([0], f"install -d -o trainer -g trainer {SHARED}/runs/planted")
        put(attacker, "/run/psfleet-attack.py", ATTACK)
        try:
            job = task.partition("-")[0]
            command = f"timeout 120 {PYTHON} /run/psfleet-attack.py {job} {address}:{port} {other} {wheel}"
            output = attacker.check_output(command)
            assert f"read {name}" in output
            assert (f"wrote {other}" in output) == writes, output
            assert f"refused {wheel}" in output, output
            assert attacker.file(other).exists == writes
            assert not attacker.file(wheel).exists
        finally:
            attacker.run_expect([0], f"rm -rf {SHARED}/runs/planted /run/psfleet-attack.py {wheel}")
    wait_for_progress(lab)


# Limits


def cgroup_values(host, task):
    """What the kernel holds a task to, in version 1's files or in version 2's; None for what it has no group for."""
    group = host.check_output(f"systemctl show --value --property=ControlGroup trainer@{task}")
    names = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max", "pids.max")}
    names |= {"cpu": ("cpu.max", "cpu.cfs_quota_us"), "weight": ("cpu.weight", "cpu.shares")}
    found = {}
    for name, (new, old) in names.items():
        controller = "cpu" if name == "weight" else name
        places = f"/sys/fs/cgroup{group}/{new} /sys/fs/cgroup/{controller}{group}/{old}"
        found[name] = host.run(f"cat {places} 2>/dev/null").stdout.strip() or None
    return found


def test_every_task_has_limits_of_memory_and_of_processes(lab):
    for task, (name, _) in TASKS.items():
        with lab[name].sudo():
            memory = 1024 * int(lab[name].check_output("grep MemTotal: /proc/meminfo").split()[1])
            values = cgroup_values(lab[name], task)
        assert abs(int(values["memory"]) - 0.9 * memory) < 0.01 * memory, task
        assert values["pids"] == "16384", task


@pytest.mark.slow
def test_limits_of_the_inventory_are_the_kernels(lab, long_run, tmp_path):
    limited = tmp_path / "limited"
    shutil.copytree(long_run, limited)
    variables = limited / "group_vars" / "all.yml"
    limits = {"all": {"tasks_max": 4096}, "worker": {"memory_max": "3G", "cpu_quota": "150%", "cpu_weight": 50}}
    variables.write_text(yaml.safe_dump(yaml.safe_load(variables.read_text()) | {"trainer_limits": limits}))
    try:
        done = play("site.yml", "--limit", "worker-0", inventory=limited)
        assert done.code == 0, done.failed
        with lab["worker-0"].sudo():
            values = cgroup_values(lab["worker-0"], "worker-0")
            shown = lab["worker-0"].check_output(
                "systemctl show --value --property=CPUQuotaPerSecUSec --property=CPUWeight trainer@worker-0"
            )
        assert (values["memory"], values["pids"]) == (str(3 * 2**30), "4096")
        assert values["cpu"] in (None, "150000", "150000 100000")
        assert values["weight"] in (None, "50", "512")  # version 1 counts from 1,024
        quota, weight = sorted(shown.split())  # what systemd asks for, also where the lab has no such group
        assert quota.startswith("1.5")
        assert weight == "50"
    finally:
        back = play("site.yml", "--limit", "worker-0", inventory=long_run)
    assert back.code == 0, back.failed
    wait_for_progress(lab)


def test_a_task_that_crashes_leaves_no_core(lab):
    host = lab["worker-1"]
    with host.sudo():
        pid = host.check_output("systemctl show --value --property=MainPID trainer@worker-1")
        child, _ = children(host)["worker-1"]
        for process in (pid, child):
            limit = host.check_output(f"grep 'Max core file size' /proc/{process}/limits").split()
            assert limit[4:6] == ["0", "0"]
        before = host.check_output("date +%s.%N")
        host.run_expect([0], f"kill -ABRT {child}")
        path = f"/proc/{pid}/task/{pid}/children"
        wait_until(lambda: host.run(f"cat {path}").stdout.split() not in ([], [child]), 60, "another task was forked")
        look = f"find / -xdev -name 'core*' -size +1M -newermt @{before} -not -path '/proc/*'"
        assert host.check_output(look) == ""
        assert (
            host.check_output(f"find /proc/{pid}/root/var/tmp {SHARED} -name 'core*' -type f -newermt @{before}") == ""
        )
    wait_for_progress(lab)


# Root follows nothing that the tasks' user has put somewhere


@contextmanager
def planted(host, link, target):
    """A link that the tasks' user, or a task, has put there; what was there before comes back."""
    as_trainer = "setpriv --reuid=trainer --regid=trainer --init-groups"
    with host.sudo():
        host.run(f"mv {link} {link}.before")
        host.run_expect([0], f"{as_trainer} ln -s {target} {link}")
        try:
            yield
        finally:
            host.run_expect([0], f"rm -f {link}")
            host.run(f"mv {link}.before {link}")


def test_nobody_plants_a_link_in_the_tasks_users_home(lab):
    for host in lab.values():
        with host.sudo("trainer"):
            assert host.run("ln -s /etc/shadow /var/lib/trainer/planted").rc != 0
        home = host.file("/var/lib/trainer")
        assert (home.user, home.group, home.mode) == ("root", "root", 0o755)


CHECK = "/usr/local/sbin/psfleet-check-shared-path"
HASTY = "/run/psfleet-check-hastily"  # the same, which waits for two seconds alone


def test_the_check_reads_no_file_of_roots_through_a_marker_or_a_probe(lab):
    host = lab["worker-0"]
    with host.sudo():
        host.run_expect([0], "install -m 600 /etc/machine-id /root/psfleet-secret; echo SECRET >>/root/psfleet-secret")
        try:
            with planted(host, f"{SHARED}/.psfleet-host-head", "/root/psfleet-secret"):
                done = host.run(CHECK)
                assert done.rc == 1
                assert "no marker of head is there" in done.stderr
            with planted(host, f"{SHARED}/.psfleet-probe-head", "/root/psfleet-secret"):
                host.run_expect([0], f"sed 's/^rename_seconds=.*/rename_seconds=2/' {CHECK} >{HASTY}")
                done = host.run(f"sh {HASTY} --read 'head text'")
                assert done.rc == 1
                assert "what head wrote and renamed is not seen here, but ''" in done.stderr
                assert "SECRET" not in done.stdout + done.stderr
        finally:
            host.run_expect([0], f"rm -f /root/psfleet-secret {HASTY}")
        assert host.run(CHECK).rc == 0


def test_the_check_writes_no_file_of_roots_through_a_probe(lab):
    host = lab["worker-0"]
    with host.sudo():
        with planted(host, f"{SHARED}/.psfleet-probe-worker-0.new", "/etc/psfleet-planted"):
            done = host.run(f"{CHECK} --write")
            assert done.rc == 1
            assert "can't write" in done.stderr
            assert not host.file("/etc/psfleet-planted").exists
        assert host.run(f"{CHECK} --write").rc == 0


def test_no_task_starts_where_its_directory_is_a_link(lab):
    """systemd would make the place that it leads to writable."""
    host = lab["worker-0"]
    with host.sudo():
        with planted(host, f"{SHARED}/data-service", "/etc"):
            done = host.run(CHECK)
            assert done.rc == 1
            assert "data-service is a link" in done.stderr
        assert host.run(CHECK).rc == 0


# A member that leaves


# Opens a connection, asks for a page when a file is there, and notes whether an answer came.
HOLD = """
import pathlib, socket, sys, time
address, name = sys.argv[1:]
with socket.create_connection((address, 6006), timeout=10) as held:
    pathlib.Path(f"/run/psfleet-{name}.open").touch()
    while not pathlib.Path(f"/run/psfleet-{name}.say").exists():
        time.sleep(0.2)
    held.settimeout(15)
    try:
        held.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        said = "answered" if held.recv(100) else "closed"
    except OSError:
        said = "silent"
pathlib.Path(f"/run/psfleet-{name}.heard").write_text(said)
"""


@pytest.mark.slow
def test_a_host_that_left_is_a_stranger_and_its_open_connection_is_cut(lab, truth, long_run, tmp_path):
    without = tmp_path / "without"
    shutil.copytree(long_run, without)
    hosts = yaml.safe_load((without / "hosts.yml").read_text())
    del hosts["worker"]["hosts"]["worker-1"]
    (without / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    address = {name: values["ansible_host"] for name, values in truth["_meta"]["hostvars"].items()}
    leaver = lab["worker-1"]

    def heard(name):
        """Have a connection that is open say something: what came back."""
        leaver.run_expect([0], f"touch /run/psfleet-{name}.say")
        wait_until(lambda: leaver.file(f"/run/psfleet-{name}.heard").exists, 30, f"{name} heard something, or nothing")
        return leaver.check_output(f"cat /run/psfleet-{name}.heard")

    with leaver.sudo():
        put(leaver, "/run/psfleet-hold.py", HOLD)
        for name in ("before", "after"):
            command = f"python3 /run/psfleet-hold.py {address['head']} {name}"
            leaver.run_expect([0], f"systemd-run --quiet --unit=hold-{name} {command}")
            wait_until(lambda name=name: leaver.file(f"/run/psfleet-{name}.open").exists, 20, "a connection is open")
        assert heard("before") == "answered"
    try:
        started = fab("start-cluster", "--run", LONG_RUN, "--detach", inventory=without)
        assert started.returncode == 0, started.stdout + started.stderr
        with leaver.sudo():
            assert heard("after") == "silent"
            for host, port in (("ps-0", 2300), ("head", 6006)):
                assert leaver.run(f"timeout 2 bash -c ': >/dev/tcp/{address[host]}/{port}'").rc == 124
    finally:
        with leaver.sudo():
            leaver.run(
                "systemctl stop hold-before hold-after; rm -f /run/psfleet-hold.py /run/psfleet-{before,after}.*"
            )
        back = fab("start-cluster", "--run", LONG_RUN, "--detach", inventory=long_run)
    assert back.returncode == 0, back.stdout + back.stderr
    with leaver.sudo():
        wait_until(lambda: leaver.service("trainer@worker-1").is_running, 180, "worker-1 runs")
    wait_for_progress(lab)

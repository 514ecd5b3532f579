"""Another firewall on a host of the cluster: `site.yml` names what to do, and then its tasks are reached again."""

import re
import subprocess

import pytest

from tests.hosts import ROOT, wait_until

from .conftest import play, wait_for_progress
from .test_firewall import MEMBERS, address, elsewhere, knock, reaches

__all__ = ["address", "elsewhere"]
APT = "DEBIAN_FRONTEND=noninteractive apt-get"
HOST, PORT = "worker-0", 2400
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("long_run")]


@pytest.fixture
def install(lab, long_run):
    """Installs a package on a member; afterwards that host is as before."""
    installed = []

    def do(packages):
        installed.append(packages)
        lab[HOST].run_expect([0], f"sudo {APT} install --yes --no-install-recommends {packages}")

    yield do
    with lab[HOST].sudo():
        for packages in installed:
            lab[HOST].run_expect([0], f"{APT} purge --yes --autoremove {packages}")
        # A firewall that is purged may leave its tables in the kernel.
        for line in lab[HOST].check_output("nft list tables").splitlines():
            if " psfleet" not in line:
                lab[HOST].run_expect([0], line.replace("table", "nft delete table", 1))
    back = play("site.yml", "--limit", HOST, inventory=long_run)
    assert back.code == 0, back.failed
    wait_for_progress(lab)


def note(of):
    """What `site.yml` says of another firewall."""
    command = ["ansible-playbook", "site.yml", "--limit", HOST, "--tags", "firewall"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf'"{of} is running: (.*)"', done.stdout)
    assert found, done.stdout
    return found[1]


def let_members_in(lab, address, commands):
    with lab[HOST].sudo():
        for member in MEMBERS:
            for command in commands:
                lab[HOST].run_expect([0], command.replace("ADDRESS", address(member)))


@pytest.mark.parametrize(
    ("packages", "begin", "pattern"),
    [
        (
            "firewalld netbase",
            "systemctl start firewalld",
            r"(firewall-cmd --permanent .*ADDRESS), then (firewall-cmd .*)",
        ),
        ("ufw", "ufw allow 22/tcp && ufw --force enable", r"(ufw allow from ADDRESS)"),
    ],
)
def test_a_member_is_refused_until_it_is_let_in_as_the_note_says(
    lab, address, elsewhere, install, packages, begin, pattern
):
    assert reaches(lab["head"], address(HOST), PORT)
    install(packages)
    lab[HOST].run_expect([0], f"sudo sh -c {begin!r}")
    assert not reaches(lab["head"], address(HOST), PORT)
    found = re.search(pattern, note(packages.split()[0]))
    assert found
    let_members_in(lab, address, found.groups())
    wait_until(lambda: reaches(lab["head"], address(HOST), PORT), 30, "the coordinator's host is let in")
    assert knock(address(HOST), PORT, *elsewhere) in ("refused", "silent")
    wait_for_progress(lab)


@pytest.fixture
def container(lab, install):
    """Runs a command in a container of Docker's, which has busybox and nothing else."""
    install("docker.io busybox-static")
    with lab[HOST].sudo():
        lab[HOST].run_expect([0], "tar --create --directory=/ bin/busybox | docker import - box")
        yield lambda options, command: lab[HOST].run(f"docker run {options} box /bin/busybox {command}")
        lab[HOST].run_expect([0], "docker rm --force $(docker ps --all --quiet); docker image rm box")
        lab[HOST].run_expect([0], "systemctl stop docker.socket docker.service containerd.service")
        lab[HOST].run_expect([0], "ip link delete docker0")
        lab[HOST].run_expect([0], "sysctl --quiet --write net.ipv4.ip_forward=0")


def test_docker_opens_what_it_publishes_and_no_port_of_a_task(lab, address, elsewhere, container):
    published = 8099
    started = container(f"--detach --publish {published}:80", "httpd -f -p 80")
    assert started.rc == 0, started.stderr
    wait_until(lambda: knock(address(HOST), published, *elsewhere) == "open", 10, "the published port is open")
    assert "ports that it publishes are forwarded" in note("docker")
    # The table is whole, and says what it said before: members alone.
    with lab[HOST].sudo():
        lab[HOST].run_expect([0], "/usr/local/sbin/psfleet-firewall check")
    assert reaches(lab["head"], address(HOST), PORT)
    assert knock(address(HOST), PORT, *elsewhere) in ("refused", "silent")
    # A container is a stranger to its own host, and the other members take it for that host.
    doors = ((HOST, PORT), ("ps-0", 2300))
    own, other = (container("--rm", f"nc -w 2 {address(host)} {port} -e /bin/busybox true") for host, port in doors)
    assert own.rc != 0
    assert other.rc == 0, other.stderr
    wait_for_progress(lab)

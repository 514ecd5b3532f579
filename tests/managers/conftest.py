"""Slurm's daemons on this machine, as one node of many processors; needs root and Debian's slurm-wlm and munge."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of one node; every command gets its configuration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, cwd=self.directory)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]

    def wait(self, job: str, states: set[str], seconds: float) -> str:
        until = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < until, f"job {job} is {state}: {self.output()[-4000:]}"
            time.sleep(1)
        return state

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.directory.glob("slurm-*.out"))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    ports = {"port": free_port(), "node_port": free_port()}
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.format(host=host, directory=tmp_path, **ports))
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o400)
    cluster = Slurm(tmp_path)
    munge = ["/usr/sbin/munged", "--foreground", "--force", f"--key-file={tmp_path}/munge.key"]
    munge += [f"--socket={tmp_path}/munge.socket", f"--log-file={tmp_path}/munge.log"]
    munge += [f"--pid-file={tmp_path}/munge.pid", f"--seed-file={tmp_path}/munge.seed"]
    daemons = [munge, ["/usr/sbin/slurmctld", "-D"], ["/usr/sbin/slurmd", "-D", "-N", host]]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            running.append(subprocess.Popen(command, env=cluster.environment, cwd=tmp_path))
            time.sleep(1)
        until = time.monotonic() + 60
        while "idle" not in cluster.call("sinfo", "--noheader", "--format=%T"):
            assert time.monotonic() < until, (tmp_path / "slurmctld.log").read_text()
            time.sleep(1)
        yield cluster
        subprocess.run(["scancel", "--user=root"], env=cluster.environment)
        until = time.monotonic() + 90
        while cluster.call("squeue", "--noheader") and time.monotonic() < until:
            time.sleep(1)
    finally:
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(30)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

"""Members and a stranger, each a network namespace, with what listens there and what reaches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.networks import Networks
from tests.rendered_firewall import SSH, program, table

FAMILIES = (4, 6)
NOBODY = 65534
# What a program opens unasked, on every interface.
UNASKED = 45555
GROUPS = {
    "chief": ["alpha"],
    "ps": ["alpha", "beta"],
    "worker": ["beta", "gamma"],
    "tensorboard": ["alpha"],
    "nfs_server": ["store"],
}
MEMBERS = ("alpha", "beta", "gamma", "store")
PORTS = {
    "alpha": {"chief": 2222, "ps": 2300, "tensorboard": 6006},
    "beta": {"ps": 2300, "worker": 2400},
    "gamma": {"worker": 2400},
    "store": {"nfs": 2049},
}
# Stand-ins for systemd: there is none in a namespace. The timer sleeps, and the lab's tests have the real one.
SYSTEMD_RUN = """#!/bin/sh
for word; do
    case $word in
    --on-active=*) seconds=${word#*=} ;;
    -*) ;;
    *) break ;;
    esac
    shift
done
setsid sh -c 'echo $$ >"$0"; sleep "$1"; shift; exec "$@"' "$TIMER" "$seconds" "$@" </dev/null >/dev/null 2>&1 &
"""
SYSTEMCTL = """#!/bin/sh
[ "$1" != stop ] || [ ! -e "$TIMER" ] || kill -- "-$(cat "$TIMER")"
rm -f "$TIMER"
"""
LISTEN = """
import json, selectors, socket, sys, time
ready = selectors.DefaultSelector()
for port in json.loads(sys.argv[1]):
    server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    ready.register(server, selectors.EVENT_READ)
print("listening", flush=True)
while True:
    for key, _ in ready.select():
        if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            ready.register(key.fileobj.accept()[0], selectors.EVENT_READ)
            continue
        try:
            said = key.fileobj.recv(65536)
            time.sleep(1.5 if said.startswith(b"late") else 0)
            key.fileobj.sendall(said)
        except OSError:
            said = b""
        if not said:
            ready.unregister(key.fileobj)
            key.fileobj.close()
"""
KNOCK = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
endpoints, seconds = json.loads(sys.argv[1]), float(sys.argv[2])
def knock(endpoint):
    try:
        socket.create_connection(tuple(endpoint), timeout=seconds).close()
        return "open"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
with ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(knock, endpoints))))
"""
# Says each line of its input to the other end, and prints how long the answer took, or "silent".
TALK = """
import socket, sys, time
talk = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
talk.settimeout(float(sys.argv[3]))
print("connected", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    try:
        talk.sendall(line.encode())
        said = talk.recv(65536)
        print(f"{time.monotonic() - began:.3f}" if said else "closed", flush=True)
    except OSError:
        print("silent", flush=True)
"""


class Hosts:
    """Namespaces that one bridge joins. A host's address is its own of one family; it has one of the other too."""

    def __init__(self, family: int, directory: Path, networks: type[Networks] = Networks) -> None:
        self.family = family
        self._directory = directory
        self._listening: list[subprocess.Popen[str]] = []
        self.networks = networks(["switch", *MEMBERS, "stranger"])
        for name, text in (("systemd-run", SYSTEMD_RUN), ("systemctl", SYSTEMCTL)):
            path = directory / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def address(self, host: str, family: int | None = None) -> str:
        return self.networks.address(host) if (family or self.family) == 4 else self.networks.address6(host)

    def hostvars(self) -> dict[str, dict[str, Any]]:
        run = {"program": "trainer.examples.digits:Digits"}
        return {host: {"ansible_host": self.address(host), "trainer_run": run} for host in MEMBERS}

    def listen(self) -> None:
        """Have each member listen on its ports, on SSH's, and on one more."""
        for host in MEMBERS:
            self._start(host, [SSH, UNASKED, *PORTS[host].values()])
        self._start("stranger", [SSH])

    def _start(self, host: str, ports: Sequence[int]) -> None:
        command = [*self.networks.under(host), sys.executable, "-c", LISTEN, json.dumps(list(ports))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._listening.append(process)
        assert process.stdout
        assert process.stdout.readline() == "listening\n"

    def end(self) -> None:
        for process in self._listening:
            process.kill()
            process.wait()
        for host in MEMBERS:
            self.stop_timer(host)
        self.networks.end()

    def knock(
        self, source: str, endpoints: Sequence[tuple[str, int]], uid: int | None = None, seconds: float = 1.0
    ) -> dict[tuple[str, int], str]:
        """Try addresses and ports from a host, as one of its users: open, refused or silent."""
        user = [] if uid is None else ["setpriv", f"--reuid={uid}", "--regid=65534", "--clear-groups"]
        command = [*self.networks.under(source), *user, "python3", "-c", KNOCK, json.dumps(endpoints), str(seconds)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(zip(endpoints, json.loads(output), strict=True))

    def seen(self, source: str, target: str, family: int | None = None) -> set[int]:
        """Which of a member's ports a host can open."""
        address = self.address(target, family)
        endpoints = [(address, port) for port in (SSH, UNASKED, *PORTS[target].values())]
        return {port for (_, port), found in self.knock(source, endpoints).items() if found == "open"}

    @contextmanager
    def talk(self, source: str, target: str, port: int, seconds: float = 1.0, address: str = "") -> Iterator[Talk]:
        """Hold a connection open."""
        words = [address or self.address(target), str(port), str(seconds)]
        command = [*self.networks.under(source), "python3", "-c", TALK, *words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Talk(process)
            finally:
                process.kill()

    def table(self, host: str, groups: Mapping[str, Sequence[str]] = GROUPS, **settings: Any) -> str:
        """The table that site.yml would write for a host."""
        return table(groups, self.hostvars(), host, **settings)

    def close(self, *only: str, groups: Mapping[str, Sequence[str]] = GROUPS, **settings: Any) -> None:
        """Load the hosts' tables."""
        for host in only or MEMBERS:
            self.load(host, self.table(host, groups, **settings))

    def load(self, host: str, text: str) -> None:
        subprocess.run([*self.networks.under(host), "nft", "-f", "-"], input=text, text=True, check=True)

    def open(self) -> None:
        """Take all tables and timers away, and what the hosts' programs keep."""
        for host in MEMBERS:
            self.stop_timer(host)
            subprocess.run([*self.networks.under(host), "nft", "flush", "ruleset"], check=True)
            for path in (self._directory / host).glob("*/*"):
                path.unlink()

    # What loads the table on a host

    def kept(self, host: str) -> Path:
        return self._directory / host / "kept"

    def running(self, host: str) -> Path:
        return self._directory / host / "running"

    def tool(self, name: str) -> Path:
        """What the hosts' program runs in the place of a real command."""
        return self._directory / "bin" / name

    def program(self, host: str, *words: str | Path, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run the host's psfleet-firewall."""
        script = self._directory / host / "psfleet-firewall"
        script.parent.mkdir(exist_ok=True)
        script.write_text(program(self.kept(host), self.running(host)))
        script.chmod(0o755)
        environment = os.environ | {
            "PATH": f"{self._directory / 'bin'}:{path or os.environ['PATH']}",
            "TIMER": str(self._timer(host)),
        }
        command = [*self.networks.under(host), script, *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def wanted(self, host: str, text: str) -> Path:
        """Write a table's file."""
        path = self._directory / f"{host}.nft"
        path.write_text(text)
        return path

    def _timer(self, host: str) -> Path:
        return self._directory / f"{host}.timer"

    def stop_timer(self, host: str) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int(self._timer(host).read_text()), 15)
            self._timer(host).unlink()


class Talk:
    """A connection that is open, and says something when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout
        assert process.stdout.readline() == "connected\n"

    def say(self, word: str = "word") -> str:
        """Say a word: the seconds until it came back, `silent` or `closed`."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

"""Members that speak through WireGuard. The kernel's is taken where it is there, else wireguard-go."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.networks import Networks
from fleet.site.wireguard import INTERFACE, PORT, tunnel_address
from tests.rendered_wireguard import files
from tests.security.hosts import GROUPS, MEMBERS, Hosts, Talk

ECHO_PORT = 45556
# Stand-in for systemd, which is not in a namespace: sleeps until the second that is asked for.
SYSTEMD_RUN = """#!/usr/bin/python3
import os, sys, time
words, second = sys.argv[1:], 0.0
while words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    if name == "--on-calendar":
        second = float(value.removeprefix("@"))
if os.fork() == 0:
    os.setsid()
    with open(os.path.join(os.path.dirname(sys.argv[0]), "timers"), "a") as timers:
        print(os.getpid(), file=timers)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    time.sleep(max(0, second - time.time()))
    os.execv(words[0], words)
"""
SYSTEMCTL = """#!/bin/sh
[ "$1 $2" = "stop psfleet-wireguard-switch.timer" ] && kill $(cat "$(dirname "$0")/timers")
"""
ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.bind(("", int(sys.argv[1])))
print("listening", flush=True)
while True:
    said, sender = server.recvfrom(2048)
    try:
        server.sendto(said, sender)
    except OSError:
        pass
"""
# Asks 50 times a second until its input ends; then prints the longest time without an answer.
ASK = """
import select, socket, sys, time
address, port = sys.argv[1], int(sys.argv[2])
asking = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
answered, longest = None, 0.0
while True:
    try:
        asking.sendto(b"?", (address, port))
    except OSError:
        pass
    ended = sys.stdin in select.select([sys.stdin], [], [], 0.02)[0]
    try:
        while asking.recv(2048, socket.MSG_DONTWAIT):
            if answered is None:
                print("answered", flush=True)
            now = time.monotonic()
            longest, answered = max(longest, now - (answered or now)), now
    except OSError:
        pass
    if ended:
        print(max(longest, time.monotonic() - answered))
        break
"""


class Rooms(Networks):
    """Namespaces with a directory of their own for WireGuard's sockets, which have the interfaces' names alone."""

    def __init__(self, names: list[str]) -> None:
        self._holders: dict[str, subprocess.Popen[str]] = {}
        super().__init__(names)
        Path("/run/wireguard").mkdir(exist_ok=True)
        script = "mount -t tmpfs tmpfs /run/wireguard; echo ready; exec sleep infinity"
        for name in names:
            command = [*super().under(name), "unshare", "--mount", "--propagation", "private", "sh", "-c", script]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert holder.stdout
            assert holder.stdout.readline() == "ready\n"
            self._holders[name] = holder

    def under(self, name: str) -> tuple[str, ...]:
        if name not in self._holders:
            return super().under(name)
        return ("nsenter", f"--target={self._holders[name].pid}", "--net", "--mount")

    def end(self) -> None:
        for name, holder in self._holders.items():
            # A tunnel's process ends with its interface.
            subprocess.run([*self.under(name), "ip", "link", "delete", INTERFACE], capture_output=True)
            holder.kill()
            holder.wait()
        self._holders.clear()
        super().end()


class Wire(Hosts):
    """Hosts with tunnels as the role builds them, by the unit's own commands."""

    def __init__(self, family: int, directory: Path) -> None:
        super().__init__(family, directory, Rooms)
        self.keys: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self._tools = directory / "tools"
        self._tools.mkdir()
        for name, text in (("systemd-run", SYSTEMD_RUN), ("systemctl", SYSTEMCTL)):
            (self._tools / name).write_text(text)
            (self._tools / name).chmod(0o755)

    def hostvars(self) -> dict[str, dict[str, Any]]:
        found = super().hostvars()
        for number, values in enumerate(found.values(), 1):
            values |= {"cluster_encryption": True, **self.settings}
            if self.family == 6:  # the other way round: IPv4 in IPv6
                values |= {"wireguard_network": "10.88.0.0/16", "wireguard_address": f"10.88.0.{number}"}
        return found

    def inside(self, host: str) -> str:
        """A member's address in the tunnel."""
        return tunnel_address(host, self.hostvars()[host])

    def outside(self, host: str) -> str:
        """Where a member's encrypted packets go."""
        address = self.address(host)
        return f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"

    def listen(self) -> None:
        super().listen()
        self._start("stranger", [2300])  # as a member would

    # What the role does

    def build(self, *hosts: str) -> None:
        """Make keys and tunnels."""
        for host in hosts or MEMBERS:
            self.write(host)
            self.keys[host] = self.wire(host, "key")
        for host in hosts or MEMBERS:
            self.write(host)
            self.start(host)

    def write(self, host: str, groups: Mapping[str, Sequence[str]] = GROUPS) -> None:
        for name, text in self.rendered(host, self.keys, groups).items():
            path = self.place(host) / name
            path.write_text(text)
            path.chmod(0o700 if name == "psfleet-wireguard" else 0o600)

    def rendered(
        self, host: str, keys: Mapping[str, str], groups: Mapping[str, Sequence[str]] = GROUPS
    ) -> dict[str, str]:
        return files(groups, self.hostvars(), host, keys, self.place(host))

    def place(self, host: str) -> Path:
        path = self._directory / f"wire-{host}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, host: str) -> None:
        self._exec(host, "ExecStartPre", "ExecStart")

    def prepare_keys(self) -> dict[str, str]:
        """Have each member make its next key, and give all the next peers; returns the public keys."""
        keys = {host: self.wire(host, "new-key") for host in MEMBERS}
        for host in MEMBERS:
            (self.place(host) / "peers.conf.next").write_text(self.rendered(host, keys)["peers.conf"])
        return keys

    def switch_soon(self) -> int:
        """Have all members switch to the next keys in six seconds; returns the second since 1970."""
        second = int(time.time()) + 6
        for host in MEMBERS:
            self.wire(host, "switch-at", str(second))
        return second

    def stop(self, host: str) -> None:
        self._exec(host, "ExecStop")

    def _exec(self, host: str, *kinds: str) -> None:
        lines = (self.place(host) / "psfleet-wireguard.service").read_text().splitlines()
        for kind in kinds:
            for command in (line.partition("=")[2] for line in lines if line.startswith(f"{kind}=")):
                words = [*self.networks.under(host), *shlex.split(command.lstrip("-"))]
                subprocess.run(words, capture_output=True, check=not command.startswith("-"))

    def wire(self, host: str, *words: str) -> str:
        """Run the host's psfleet-wireguard; returns what it printed."""
        done = self.try_wire(host, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def try_wire(self, host: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{self._tools}:{os.environ['PATH']}"}
        command = [*self.networks.under(host), str(self.place(host) / "psfleet-wireguard"), *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def run(self, host: str, *words: str, text: str = "") -> str:
        command = [*self.networks.under(host), *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

    # What the tests ask

    def open_inside(self, source: str, target: str, ports: Sequence[int]) -> set[int]:
        """Which of a member's ports a host can open through the tunnel."""
        address = self.inside(target)
        found = self.knock(source, [(address, port) for port in ports], seconds=3)
        return {port for (_, port), how in found.items() if how == "open"}

    @contextmanager
    def talk_inside(self, source: str, target: str, port: int) -> Iterator[Talk]:
        with self.talk(source, target, port, address=self.inside(target)) as talk:
            yield talk

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record what passes the bridge."""
        path = self._directory / "capture"
        command = [*self.networks.under("switch"), "tcpdump", "-i", "bridge", "-s", "0", "-U", "--immediate-mode"]
        with subprocess.Popen([*command, "-Z", "root", "-w", path], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr
            for line in process.stderr:
                if "listening on" in line:
                    break
            capture = Capture()
            try:
                yield capture
            finally:
                time.sleep(0.5)
                process.terminate()
                process.wait()
                capture.packets = path.read_bytes()

    @contextmanager
    def asking(self, source: str, target: str) -> Iterator[Gap]:
        """Ask a member through the tunnel all the time, and find the longest time without an answer."""
        python = [sys.executable, "-c"]
        echo = [*self.networks.under(target), *python, ECHO, str(ECHO_PORT)]
        ask = [*self.networks.under(source), *python, ASK, self.inside(target), str(ECHO_PORT)]
        with (
            subprocess.Popen(echo, stdout=subprocess.PIPE, text=True) as answering,
            subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking,
        ):
            gap = Gap()
            try:
                assert answering.stdout
                assert asking.stdout
                assert answering.stdout.readline() == "listening\n"
                assert asking.stdout.readline() == "answered\n"
                yield gap
                output, _ = asking.communicate("")
                gap.seconds = float(output)
            finally:
                asking.kill()
                answering.kill()

    def process(self, host: str) -> int:
        """The process that is the host's tunnel; 0 where the kernel is."""
        listed = subprocess.run(["ip", "netns", "pids", self.networks.namespace(host)], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wireguard-go":
                    return int(pid)
        return 0

    def received(self, host: str, key: str) -> int:
        """How many bytes of WireGuard a host got from a peer."""
        lines = [line.split() for line in self.run(host, "wg", "show", INTERFACE, "transfer").splitlines()]
        return next(int(got) for peer, got, _ in lines if peer == key)

    def dropped(self, host: str, chain: str) -> int:
        """How many packets the rules of a chain that ask for the interface dropped."""
        listing = json.loads(self.run(host, "nft", "--json", "list", "chain", "inet", "psfleet", chain))["nftables"]
        rules = [each["rule"]["expr"] for each in listing if "rule" in each]
        ours = [rule for rule in rules if INTERFACE in json.dumps(rule)]
        return sum(part["counter"]["packets"] for rule in ours for part in rule if "counter" in part)


class Capture:
    """What passed the bridge, once the capture has ended."""

    packets = b""


class Gap:
    """The longest time without an answer, in seconds, once the asking has ended."""

    seconds = 0.0

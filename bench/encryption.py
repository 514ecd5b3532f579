"""What cluster_encryption costs: processor time a GB, and throughput, with WireGuard and without, in turn.

Two hosts are network namespaces that a bridge joins. One sends to the other over one TCP connection. Counted are the
processor seconds of both programs and of the tunnel: of wireguard-go's processes, or of the kernel's threads where the
kernel has WireGuard. Needs root, `ip`, `wg`, and `wireguard-go` with /dev/net/tun for a kernel without it.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import networks
from bench.networks import Networks
from bench.options import parser_of
from bench.tables import print_row
from bench.tasks import processor_seconds

ENDS = ("one", "two")
PORT = 51820
SEND = """
import resource, socket, sys, time
address, mebibytes = sys.argv[1], int(sys.argv[2])
chunk = bytes(range(256)) * 4096
began = time.monotonic()
with socket.create_connection((address, 9000)) as sending:
    for _ in range(mebibytes):
        sending.sendall(chunk)
    sending.shutdown(socket.SHUT_WR)
    sending.recv(1)
spent = resource.getrusage(resource.RUSAGE_SELF)
print(time.monotonic() - began, spent.ru_utime + spent.ru_stime)
"""
RECEIVE = """
import resource, socket
with socket.create_server(("", 9000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("ready", flush=True)
    receiving = server.accept()[0]
    before = resource.getrusage(resource.RUSAGE_SELF)
    room = bytearray(1 << 20)
    while receiving.recv_into(room):
        pass
    receiving.sendall(b".")
spent = resource.getrusage(resource.RUSAGE_SELF)
print(spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime)
"""


@dataclass(frozen=True)
class TransferCost:
    """Of one transfer."""

    seconds: float
    processor: float  # seconds


class Tunnel:
    """WireGuard between two namespaces."""

    def __init__(self, rooms: Networks) -> None:
        self._rooms = rooms
        keys = {end: output("wg", "genkey") for end in ENDS}
        self.processes: list[int] = []
        self.kernel = True
        for number, end in enumerate(ENDS, 1):
            link, other = f"psfleet-{end}", ENDS[number % 2]
            under = rooms.under(end)
            if subprocess.run([*under, "ip", "link", "add", link, "type", "wireguard"], capture_output=True).returncode:
                self.kernel = False
                subprocess.run([*under, "wireguard-go", link], check=True, capture_output=True)
            peer = output("wg", "pubkey", text=keys[other])
            config = (
                f"[Interface]\nPrivateKey = {keys[end]}\nListenPort = {PORT}\n[Peer]\nPublicKey = {peer}\n"
                f"AllowedIPs = {self.address(other)}/32\nEndpoint = {rooms.address(other)}:{PORT}\n"
            )
            networks.run(*under, "wg", "setconf", link, "/dev/stdin", text=config)
            networks.run(*under, "ip", "address", "add", f"{self.address(end)}/24", "dev", link)
            networks.run(*under, "ip", "link", "set", link, "mtu", "1420", "up")
        listed = [output("ip", "netns", "pids", rooms.namespace(end)).split() for end in ENDS]
        for pid in (int(pid) for pids in listed for pid in pids):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wireguard-go":
                    self.processes.append(pid)

    def address(self, end: str) -> str:
        return f"10.98.0.{ENDS.index(end) + 1}"

    def processor(self) -> float:
        """Processor seconds of the tunnel until now."""
        return sum(map(processor_seconds, kernel_threads() if self.kernel else self.processes))

    def end(self) -> None:
        for end in ENDS:
            subprocess.run([*self._rooms.under(end), "ip", "link", "delete", f"psfleet-{end}"], capture_output=True)


def output(*command: str, text: str = "") -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.strip()


def kernel_threads() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == "2":
                found.append(int(path.parent.name))
    return found


def transfer(rooms: Networks, address: str, mebibytes: int, tunnel: Tunnel | None) -> TransferCost:
    """Send so much from the first namespace to an address of the second."""
    receive = [*rooms.under("two"), sys.executable, "-c", RECEIVE]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiving:
        assert receiving.stdout
        assert receiving.stdout.readline() == "ready\n"
        before = tunnel.processor() if tunnel else 0.0
        sent = output(*rooms.under("one"), sys.executable, "-c", SEND, address, str(mebibytes)).split()
        received = float(receiving.stdout.readline())
    spent = tunnel.processor() - before if tunnel else 0.0
    return TransferCost(float(sent[0]), float(sent[1]) + received + spent)


def main(arguments: list[str]) -> None:
    parser = parser_of("encryption", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="transfers of each kind, in turn (%(default)s)")
    parser.add_argument("--mebibytes", type=int, default=256, help="of each transfer (%(default)s)")
    options = parser.parse_args(arguments)
    if why := networks.missing():
        sys.exit(f"bench/encryption: no network namespaces here: {why}")
    rooms = Networks(["switch", *ENDS])
    tunnel = Tunnel(rooms)
    costs: dict[bool, list[TransferCost]] = {False: [], True: []}
    try:
        for _ in range(options.rounds + 1):
            costs[False].append(transfer(rooms, rooms.address("two"), options.mebibytes, None))
            costs[True].append(transfer(rooms, tunnel.address("two"), options.mebibytes, tunnel))
    finally:
        tunnel.end()
        rooms.end()
    report({kind: found[1:] for kind, found in costs.items()}, options.mebibytes, tunnel.kernel)


def report(costs: dict[bool, list[TransferCost]], mebibytes: int, kernel: bool) -> None:
    """Print medians, the ranges, and the ratios of on to off."""
    gigabytes = mebibytes * 2**20 / 1e9
    print_row("encryption", "processor s/GB", "from - to", "MB/s", "from - to", head=True)
    medians = {}
    for encrypted, found in costs.items():
        processor = sorted(cost.processor / gigabytes for cost in found)
        speed = sorted(1000 * gigabytes / cost.seconds for cost in found)
        medians[encrypted] = statistics.median(processor), statistics.median(speed)
        name = ("on, the kernel's WireGuard" if kernel else "on, wireguard-go") if encrypted else "off"
        print_row(
            name,
            f"{medians[encrypted][0]:.2f}",
            f"{processor[0]:.2f} - {processor[-1]:.2f}",
            f"{medians[encrypted][1]:.0f}",
            f"{speed[0]:.0f} - {speed[-1]:.0f}",
        )
    ratios = [on / off for on, off in zip(medians[True], medians[False], strict=True)]
    print_row("on / off", f"{ratios[0]:.1f}", "", f"{ratios[1]:.2f}", "")


if __name__ == "__main__":
    main(sys.argv[1:])

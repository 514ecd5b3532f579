"""Lay out below a directory what the kernel of a recorded machine shows."""

import re
from pathlib import Path

import yaml

RECORDS = Path(__file__).parent / "records"
MACHINES = yaml.safe_load((RECORDS / "machines.yml").read_text())
_LINE = re.compile(r"(\S+) [^\[]+\[([0-9a-f]{4})\]: .*\[([0-9a-f]{4}):([0-9a-f]{4})\]")


def lay_out(root: Path, machine: str) -> Path:
    """Make /sys/bus/pci/devices of a recorded machine below `root`; returns `root`."""
    for line in MACHINES[machine]["lspci"].splitlines():
        address, kind, vendor, device = _LINE.match(line).groups()
        directory = root / "sys/bus/pci/devices" / address
        directory.mkdir(parents=True)
        for name, value in (("class", f"0x{kind}00"), ("vendor", f"0x{vendor}"), ("device", f"0x{device}")):
            (directory / name).write_text(value + "\n")
    return root


def load(root: Path, version: str) -> None:
    """Have a module of this version loaded below `root`."""
    write(root / "sys/module/nvidia/version", version + "\n")


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

#!/usr/bin/python
"""Find a machine's NVIDIA GPUs, and the driver that is installed and the one that is loaded.

Reads the kernel's own files, so that nothing needs to be installed for it. Changes nothing.

Returns:
    gpus: PCI address and device number of each GPU, in the order of their addresses.
    nvswitches: PCI address and device number of each NVSwitch.
    kernel: The kernel's release.
    loaded: Version of the kernel module that is loaded. Null where none is.
    loaded_open: Whether the module that is loaded is NVIDIA's open one. Null where that is unknown.
    installed: Version of the module on disk for this kernel, which the next boot loads. Null where there is
        none.
    open: Whether the module on disk is NVIDIA's open one. Null where there is none.
    dkms: DKMS's states of NVIDIA's modules for this kernel, such as `installed`, by `module/version`.
    nouveau: Whether the kernel's own driver nouveau is loaded.
    secure_boot: Whether the firmware lets the kernel load signed modules only. Null where it has no such state.
    key_enrolled: Whether the firmware trusts the key that DKMS signs with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

NVIDIA = "0x10de"
# The first four digits of a PCI class. A card's sound and USB functions have the same vendor and are no GPUs.
GPU_CLASSES = ("0x0300", "0x0302")  # VGA, and 3D: what has no plug for a screen
BRIDGE_CLASS = "0x0680"
# The network interfaces of old boards with NVIDIA's chips have that class too, with lower numbers.
FIRST_NVSWITCH = 0x1000
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Debian renames the file after the package; what the kernel has loaded is called nvidia all the same.
MODULES = ("nvidia", "nvidia-current", "nvidia-current-open")
DKMS_KEY = "/var/lib/dkms/mok.pub"
UBUNTUS_DKMS_KEY = "/var/lib/shim-signed/mok/MOK.der"  # which its dkms signs with instead

Run = Callable[[list[str]], tuple[int, str]]


def pci_devices(root: Path, classes: tuple[str, ...]) -> list[dict[str, str]]:
    """List NVIDIA's PCI functions of some classes, as `{"address", "device"}`."""
    found = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(path / "vendor") == NVIDIA and (_read(path / "class") or "")[:6] in classes:
            found.append({"address": path.name, "device": (_read(path / "device") or "").removeprefix("0x")})
    return found


def loaded_version(root: Path) -> str | None:
    """Tell the version of the module that the kernel runs."""
    version = _read(root / "sys/module/nvidia/version")
    if version is None:
        text = _read(root / "proc/driver/nvidia/version") or ""
        match = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)
        version = match[1] if match else None
    return version


def loaded_open(root: Path) -> bool | None:
    """Tell whether the module that the kernel runs is NVIDIA's open one."""
    text = _read(root / "proc/driver/nvidia/version")
    return None if text is None else "Open Kernel Module" in text


def dkms_key(root: Path) -> str:
    """Name the key that DKMS signs with here."""
    ubuntu = re.search(r"^ID=ubuntu$", _read(root / "etc/os-release") or "", re.MULTILINE)
    return UBUNTUS_DKMS_KEY if ubuntu else DKMS_KEY


def secure_boot(root: Path) -> bool | None:
    """Read the firmware's variable: four bytes of attributes, then the state."""
    try:
        return (root / SECURE_BOOT).read_bytes()[4:] == b"\x01"
    except OSError:
        return None


def dkms_states(listing: str) -> dict[str, str]:
    """Read `dkms status`: `nvidia-current-open/535.261.03, 6.1.0-56-cloud-amd64, x86_64: installed`.

    Before version 3 a comma stood between module and version.
    """
    states = {}
    for line in listing.splitlines():
        match = re.match(r"(nvidia[\w-]*)(?:/|, )([\w.]+)(?:, [^:]*)?: (\w+)", line)
        if match:
            states[f"{match[1]}/{match[2]}"] = match[3]
    return states


def collect_facts(root: Path, run: Run, kernel: str) -> dict[str, Any]:
    """Put everything together; `run` gives a command's exit code and output."""

    def modinfo(field: str) -> str | None:
        for name in MODULES:
            code, out = run(["modinfo", "-k", kernel, "-F", field, name])
            if code == 0 and out.strip():
                return out.strip()
        return None

    license_name = modinfo("license")
    return {
        "gpus": pci_devices(root, GPU_CLASSES),
        "nvswitches": [
            bridge for bridge in pci_devices(root, (BRIDGE_CLASS,)) if int(bridge["device"], 16) >= FIRST_NVSWITCH
        ],
        "kernel": kernel,
        "loaded": loaded_version(root),
        "loaded_open": loaded_open(root),
        "installed": modinfo("version"),
        "open": None if license_name is None else "GPL" in license_name,
        "dkms": dkms_states(run(["dkms", "status", "-k", kernel])[1]),
        "nouveau": (root / "sys/module/nouveau").exists(),
        "secure_boot": secure_boot(root),
        "key_enrolled": "already enrolled" in run(["mokutil", "--test-key", dkms_key(root)])[1],
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def main() -> None:
    # Release of the kernel whose modules are looked at. Empty for the one that runs.
    module = AnsibleModule(argument_spec={"kernel": {"type": "str", "default": ""}}, supports_check_mode=True)

    def run(command: list[str]) -> tuple[int, str]:
        path = module.get_bin_path(command[0])  # sbin too
        if path is None:
            return 127, ""
        code, out, _error = module.run_command([path, *command[1:]])
        return code, out

    module.exit_json(changed=False, **collect_facts(Path("/"), run, module.params["kernel"] or os.uname().release))


if __name__ == "__main__":
    main()

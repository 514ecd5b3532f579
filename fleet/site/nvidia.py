"""Which driver a machine's GPUs need for the TensorFlow wheel, and what stands against it: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from fleet.places import KIT

TABLE = KIT / "ansible" / "nvidia_compatibility.yml"
NO_GPU = (
    "is in the group gpu and has no NVIDIA GPU: no PCI device of vendor 10de and class 0300 or 0302. "
    "Take it out of the group, or look at `lspci -d 10de:`, the slot and the virtual machine's pass-through"
)


@cache
def read_table() -> dict[str, Any]:
    """Read ansible/nvidia_compatibility.yml."""
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text())
    return table


def nvidia_driver(
    seen: Mapping[str, Any], source: str, branch: str, flavour: str, machine: Mapping[str, str], capability: str = ""
) -> dict[str, Any]:
    """Choose a machine's driver and say what is wrong, before anything is installed.

    Args:
        seen: what the module nvidia_facts found.
        source: `distribution`, `nvidia`, `ubuntu` or `none`.
        branch: the driver's major version, such as "580"; empty for the source's own on this machine.
        flavour: of the kernel modules: `open`, `proprietary`, or `auto`: open where every GPU allows it and NVIDIA
            makes it the default of the branch.
        machine: `{"name": ..., "system": "Debian 12", "python": "3.11.2"}`.
        capability: compute capability of GPUs that the table doesn't know.

    Returns:
        `{"branch", "open", "capabilities": [...], "problems": [...]}`; a problem names the value and the fix.
    """
    branch, capability = str(branch), str(capability)  # YAML takes 580 and 8.6 for numbers
    host = f"host '{machine['name']}'"
    if not seen["gpus"]:
        return {"branch": branch, "open": False, "capabilities": [], "problems": [f"{host} {NO_GPU}"]}
    kinds = [find_gpu(gpu["device"]) for gpu in seen["gpus"]]
    capabilities = [kind["capability"] if kind else capability for kind in kinds]
    wanted, branch = branch, _branch_of(seen, source, branch, machine["system"])
    problems = [
        *_python_problems(host, machine["python"]),
        *_gpu_problems(host, seen["gpus"], kinds, capabilities, flavour, branch),
        *_source_problems(host, seen, source, branch, machine["system"]),
    ]
    if wanted and wanted != branch:
        problems.append(
            f"{host} came with driver {seen['loaded']}, and nvidia_driver_branch is {wanted}; nvidia_driver_source: "
            "none installs nothing. Name the installed branch, or none"
        )
    return {
        "branch": branch,
        "open": flavour == "open" or (flavour == "auto" and _open_by_default(kinds, branch)),
        "capabilities": sorted({value for value in capabilities if value}),
        "problems": problems,
    }


def _branch_of(seen: Mapping[str, Any], source: str, branch: str, system: str) -> str:
    """Return the driver's major version: the installed one, the one that is wanted, or the source's own."""
    if source == "none":
        return (seen["loaded"] or "").partition(".")[0] or branch
    return branch or str(read_table()["branches"].get(source, {}).get(system, ""))


def find_gpu(device: str) -> dict[str, Any] | None:
    """Find a device number's line in the table."""
    number = int(device, 16)
    for kind in read_table()["gpus"]:
        if any(int(first, 16) <= number <= int(last, 16) for first, last in kind["devices"]):
            found: dict[str, Any] = kind
            return found
    return None


def runs_on(capability: str) -> str | None:
    """How the wheel runs on a compute capability: its `binary`, its `ptx`, or None: not at all."""
    wheel = read_table()["tensorflow"]
    wanted = _version(capability)
    if wanted > _version(wheel["newest_capability"]):
        return None
    if any(_version(each)[0] == wanted[0] and _version(each) <= wanted for each in wheel["binaries"]):
        return "binary"
    return "ptx" if any(_version(each) <= wanted for each in wheel["ptx"]) else None


def branch_problem(branch: str) -> str | None:
    """What is wrong with a branch whatever the GPU is."""
    table = read_table()
    if not branch.isdecimal():
        return f"nvidia_driver_branch is {branch!r}; expected a driver's major version such as '580'"
    if int(branch) < table["driver"]["oldest_branch"]:
        return (
            f"driver {branch} is too old: TensorFlow {table['tensorflow']['version']} is built for CUDA "
            f"{table['tensorflow']['cuda']}, which needs {table['driver']['oldest_branch']} or newer"
        )
    return None


def capability_problem(capability: str) -> str | None:
    """What is wrong with how a compute capability is written."""
    if capability and not re.fullmatch(r"\d+\.\d+", capability):
        return f"nvidia_driver_capability is {capability!r}; expected a compute capability such as '8.6'"
    return None


def _open_by_default(kinds: Sequence[Mapping[str, Any] | None], branch: str) -> bool:
    new_enough = branch.isdecimal() and int(branch) >= read_table()["driver"]["open_by_default_from"]
    return new_enough and all(kind is None or kind["open"] for kind in kinds)


def _python_problems(host: str, python: str) -> Iterator[str]:
    wheel = read_table()["tensorflow"]
    if not _version(wheel["python_oldest"]) <= _version(python)[:2] <= _version(wheel["python_newest"]):
        yield (
            f"{host} has Python {python}; TensorFlow {wheel['version']} has wheels for {wheel['python_oldest']} to "
            f"{wheel['python_newest']}. Name another with ansible_python_interpreter"
        )


def _gpu_problems(
    host: str,
    gpus: Sequence[Mapping[str, str]],
    kinds: Sequence[Mapping[str, Any] | None],
    capabilities: Sequence[str],
    flavour: str,
    branch: str,
) -> Iterator[str]:
    number = int(branch) if branch.isdecimal() else None
    for gpu, kind, capability in dict.fromkeys(
        (gpu["device"], kind["name"] if kind else "", capability)
        for gpu, kind, capability in zip(gpus, kinds, capabilities, strict=True)
    ):
        if capability and (mistyped := capability_problem(capability)):
            yield f"{host}: {mistyped}"
        elif problem := _capability_problem(capability, number):
            what = f"{host} has the GPU 10de:{gpu} ({kind or 'unknown'}, compute capability {capability or 'unknown'})"
            yield what + problem
    for named in {kind["name"]: kind for kind in kinds if kind}.values():
        if flavour == "open" and not named["open"]:
            yield (
                f"{host} has a GPU of the kind {named['name']}, which NVIDIA's open kernel modules don't know. Leave "
                "nvidia_driver_flavour at auto, or set it to proprietary"
            )
        last = named.get("last_branch")
        if last and number is not None and number > last:
            yield (
                f"{host} has a GPU of the kind {named['name']}; the last driver for it is {last}, and "
                f"nvidia_driver_branch is {branch}"
            )


def _capability_problem(capability: str, branch: int | None) -> str:
    """Say why TensorFlow can't use a GPU of this compute capability with this driver, and what fixes it."""
    table = read_table()
    wheel, driver, cudnn = table["tensorflow"], table["driver"], table["cudnn"]
    if not capability:
        return (
            ", which ansible/nvidia_compatibility.yml doesn't know. Say its compute capability "
            "(developer.nvidia.com/cuda-gpus) as nvidia_driver_capability: '8.6', or add it to the table"
        )
    how = runs_on(capability)
    if how is None:
        return (
            f"; the wheel of TensorFlow {wheel['version']} runs on {wheel['binaries'][0]} to "
            f"{wheel['newest_capability']}. Take the host out of the group gpu (it trains on its processor), or "
            "use a TensorFlow that knows the GPU, and say so in ansible/nvidia_compatibility.yml"
        )
    if _version(capability) < _version(cudnn["oldest_capability"]):
        return (
            f"; cuDNN {cudnn['version']} of locks/cuda has no code for it (from {cudnn['oldest_capability']} "
            "on): a convolution would fail. Take the host out of the group gpu (it trains on its processor), or "
            "make a lock with nvidia-cudnn-cu12<9.11, and say so as cudnn in ansible/nvidia_compatibility.yml"
        )
    if how == "ptx" and branch is not None and branch < driver["oldest_branch_for_ptx"]:
        return (
            f"; the wheel has only PTX of CUDA {wheel['cuda']} for it, which driver {branch} can't "
            f"translate: it needs {driver['oldest_branch_for_ptx']} or newer, such as what nvidia_driver_source: "
            "nvidia has by default"
        )
    return ""


def _source_problems(host: str, seen: Mapping[str, Any], source: str, branch: str, system: str) -> Iterator[str]:
    table = read_table()
    if source == "none":
        if seen["loaded"] is None:
            yield (
                f"{host} has nvidia_driver_source: none and no NVIDIA module is loaded. Take an image that comes with "
                f"a driver, or let psfleet install one: nvidia_driver_source: {_offered(system)}"
            )
            return
    elif system not in table["branches"][source]:
        yield (
            f"{host} runs {system}; nvidia_driver_source: {source} is made for "
            f"{', '.join(table['branches'][source])}. Here: {_offered(system)}"
        )
        return
    problem = branch_problem(branch)
    if problem:
        yield f"{host}: {problem}"
    if source == "distribution" and seen["nvswitches"]:
        yield (
            f"{host} has {len(seen['nvswitches'])} NVSwitches, which need NVIDIA's fabric manager; {system} has no "
            "package of it. Use nvidia_driver_source: nvidia"
        )
    if source in ("distribution", "nvidia") and seen["secure_boot"] and not seen["key_enrolled"]:
        ubuntu = system.startswith("Ubuntu")
        enroll = (
            "apt-get install dkms mokutil shim-signed; update-secureboot-policy --new-key; mokutil --import "
            "/var/lib/shim-signed/mok/MOK.der"
            if ubuntu
            else "apt-get install dkms mokutil; dkms generate_mok; mokutil --import /var/lib/dkms/mok.pub"
        )
        signed = " Or use Ubuntu's signed modules: nvidia_driver_source: ubuntu." if ubuntu else ""
        yield (
            f"{host} has Secure Boot on: its kernel loads no module that was built on the machine, unless the "
            f"firmware trusts DKMS's key. Enroll it once: {enroll}; reboot, and confirm at the console.{signed} Or "
            "turn Secure Boot off"
        )


def _offered(system: str) -> str:
    offered = [source for source, systems in read_table()["branches"].items() if system in systems]
    return " or ".join(offered) or "none (with a driver that you install)"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())

#!/usr/bin/python
"""Choose the one version in which a driver's packages are to be had, and say which of them are missing.

The kernel module and the libraries must have the same version, and an archive may offer them in different ones.
Debian's security archive has newer libraries than the open module, for one. Asks apt's own lists and dpkg. Changes
nothing, and needs no network.

Returns:
    version: The version, without what the distribution adds to it. Null where there is none.
    install: What apt should install, such as `nvidia-smi=535.261.03*`. Empty where nothing is missing.
    problems: Why there is no such version, or which packages the archive doesn't have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def upstream(version: str) -> str:
    """Take the distribution's part away: 535.309.01 of `535.309.01-0+deb12u1`."""
    return version.rpartition(":")[2].partition("-")[0]


def offered_versions(madison: str) -> dict[str, set[str]]:
    """Read `apt-cache madison PACKAGE...`."""
    offered: dict[str, set[str]] = {}
    for line in madison.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 3:
            offered.setdefault(fields[0], set()).add(fields[1])
    return offered


def installed_versions(listing: str) -> dict[str, str]:
    """Read `dpkg-query --show` with the state before each package's name and version."""
    rows = (line.split() for line in listing.splitlines())
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}


def choose(
    branch: str, version: str, together: Sequence[str], offered: dict[str, set[str]], installed: dict[str, str]
) -> tuple[str | None, str]:
    """Return the version that all packages can have, or None and why."""
    sets = []
    for package in together:
        there = {installed[package]} if package in installed else set()
        sets.append({upstream(each) for each in offered.get(package, set()) | there})
    common = {each for each in set.intersection(*sets) if each.split(".")[0] == branch}
    kept = upstream(installed.get(together[0], ""))
    if version:
        return (version, "") if version in common else (None, _explain(branch, together, sets, version))
    if kept in common:
        return kept, ""
    return (max(common, key=_sortable), "") if common else (None, _explain(branch, together, sets))


def demanded_version(depends: str) -> str:
    """Take the driver's version out of a module package's dependencies; empty where it names none.

    As Ubuntu's have it: `nvidia-kernel-common-595 (>= 595.84), nvidia-kernel-common-595 (<= 595.84-1)`.
    """
    found = re.search(r"nvidia-kernel-common-[\w-]+ \(>= (\d+(?:\.\d+)+)", depends)
    return found[1] if found else ""


def missing(
    version: str | None, together: Iterable[str], others: Iterable[str], installed: dict[str, str]
) -> list[str]:
    """List what apt should install."""
    exact = [f"{package}={version}*" for package in together if upstream(installed.get(package, "")) != version]
    return exact + [package for package in others if package not in installed]


def _explain(branch: str, together: Sequence[str], sets: Sequence[set[str]], version: str = "") -> str:
    lines = [f"{package}: {', '.join(sorted(each)) or 'none'}" for package, each in zip(together, sets, strict=True)]
    wanted = f"version {version} of branch {branch}" if version else f"version of branch {branch}"
    return (
        f"no {wanted} is offered for all of the driver's packages. Offered are: {'; '.join(lines)}. Choose another "
        "nvidia_driver_branch, nvidia_driver_version, nvidia_driver_flavour or nvidia_driver_source"
    )


def _sortable(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The driver's major version.
            "branch": {"type": "str", "required": True},
            # The exact version. Empty for the one that is installed, else the newest of the branch.
            "version": {"type": "str", "default": ""},
            # Packages that must have the same version.
            "together": {"type": "list", "elements": "str", "required": True},
            # Packages that are wanted besides, in whatever version.
            "others": {"type": "list", "elements": "str", "default": []},
            # Packages that are wanted where another one is installed, by its name. The headers of later
            # kernels are, on a machine that gets later kernels.
            "following": {"type": "dict", "default": {}},
            # Package of modules that were built elsewhere. Where `version` is empty, the version is the
            # one that it depends on, since a kernel that came later has modules of a later driver only.
            "leader": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )

    def output(*command: str) -> str:
        return str(module.run_command(list(command))[1])  # of unknown packages both say nothing, and fail

    module.exit_json(changed=False, **answer(output, **module.params))


def answer(
    output: Callable[..., str],
    branch: str,
    version: str,
    together: list[str],
    others: list[str],
    following: dict[str, str],
    leader: str = "",
) -> dict[str, Any]:
    """Ask apt and dpkg, and put the module's answer together."""
    packages = [*together, *others, *following.keys(), *following.values()]
    offered = offered_versions(output("apt-cache", "madison", *packages))
    shown = "--showformat=${db:Status-Status} ${Package} ${Version}\n"
    installed = installed_versions(output("dpkg-query", "--show", shown, *packages))
    if leader and not version:
        installed_one = ("dpkg-query", "--show", "--showformat=${Depends}", leader)
        newest = ("apt-cache", "show", "--no-all-versions", leader)
        version = demanded_version(output(*(installed_one if leader in installed else newest)))
    chosen, why = choose(branch, version, together, offered, installed)
    problems = [why] if why else []
    problems += [
        f"there is no package {package} here, and apt's lists offer none"
        + (
            ". The machine runs a kernel that its archive has no headers of any more: upgrade the kernel and reboot"
            if package.startswith("linux-headers-")
            else ""
        )
        for package in others
        if package not in installed and package not in offered
    ]
    others = others + [package for leader, package in following.items() if leader in installed and package in offered]
    return {"version": chosen, "install": missing(chosen, together, others, installed), "problems": problems}


if __name__ == "__main__":
    main()

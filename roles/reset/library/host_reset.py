#!/usr/bin/python
"""Take from a machine all that psfleet's roles have put there, and leave it as it was.

Stops and disables the kit's units, and removes their files, settings, programs, releases and environments. Removes the
users that psfleet made, and the packages, where that was noted at the first run. The NVIDIA driver, the journal's and
apt's files and the time that the clock has now stay.

Returns:
    removed: Paths, users and packages that were removed.
    notes: What stays, and why.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

UNITS = "etc/systemd/system"
# Below the root. What stands first goes first: the note of what was there before is the last.
OWN = (
    f"{UNITS}/*.target.wants/trainer@*.service",
    f"{UNITS}/*.target.wants/psfleet-*",
    f"{UNITS}/*.target.wants/tensorboard.service",
    f"{UNITS}/trainer@*",
    f"{UNITS}/psfleet-*",
    f"{UNITS}/tensorboard.service",
    f"{UNITS}/tensorboard.service.d",
    f"{UNITS}/*.service.d/psfleet*.conf",
    "etc/systemd/journald.conf.d/60-psfleet.conf",
    "etc/sysctl.d/60-psfleet.conf",
    "etc/sysctl.d/99-psfleet-ports.conf",
    "etc/needrestart/conf.d/60-psfleet.conf",
    "etc/chrony/conf.d/psfleet.conf",
    "etc/chrony.d/psfleet.conf",
    "etc/prometheus/psfleet*.yml",
    "var/lib/prometheus/node-exporter/psfleet-*",
    "etc/exports.d/psfleet.exports",
    "etc/nfs.conf.d/psfleet.conf",
    "usr/local/sbin/psfleet-*",
    "usr/local/bin/psfleet-*",
    "etc/trainer",
    "etc/psfleet",
    "opt/trainer",
    "run/psfleet*",
)
# The driver stays, with the files that keep it as it is.
OF_THE_DRIVER = ("nvidia-persistenced.service.d", "psfleet-nvidia-devices.service")
HOME, NOTED = "var/lib/trainer", "var/lib/psfleet"
LEFT_HOME = f"{HOME}/.psfleet-left"  # with runs that stay: without it, a later home of that name is another's
OURS_OF_PORTS = "# Of psfleet's tasks: "
# What of them was there before has read files that are gone: psfleet's exports and settings end with a restart.
READERS = (
    *("systemd-journald", "chrony", "nfs-server"),
    *("prometheus", "prometheus-alertmanager", "prometheus-node-exporter"),
)
# What Debian's packages leave when they are purged: a user, a directory, and a unit that systemd has in memory.
LEFT = {
    "rpcbind": ("_rpc", "", "rpcbind.target"),
    "nfs-common": ("statd", "var/lib/nfs", "run-rpc_pipefs.mount"),
}
MASKED = ("rpcbind.service", "rpcbind.socket", "rpc-statd.service", "nfs-mountd.service")


class Reset:
    """One machine, and what is removed of it."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self._does = not module.check_mode
        self._root = Path(module.params["root"])
        self._real = self._root == Path("/")
        self.removed: list[str] = []
        self.notes: list[str] = []
        noted = self._root / NOTED / "before.json"
        self._before: dict[str, Any] = json.loads(noted.read_text()) if noted.is_file() else {}
        # Comes first and goes last: a reset that was broken off, maybe before services reloaded, has left it, too.
        self._is_ours = noted.parent.is_dir()

    def run(self) -> None:
        """Do all of it, in the order in which each may be broken off and done again."""
        if self._is_ours:
            self._stop_units()
            self._give_ports_back()
            self._remove_files()
            self._reload()
            self._remove_packages()
            self._remove_what_packages_left()
            self._remove_users()  # after the services of a package that run as one
            if self._does:
                self._call("systemctl", "try-restart", *READERS)
        else:
            self.notes.append("psfleet is not there: what has one of its names is others', and stays")
        may_go = (self._root / LEFT_HOME).exists() and not is_user("trainer")
        if self._is_ours or (may_go and not self._module.params["keep"]):  # runs that stayed must go now
            self._remove_home()
        for each in self._module.params["empty"]:
            if str(Path(each)) not in self._before.get("directories", [str(Path(each))]):
                self._remove_empty(self._root / each.lstrip("/"))
        self._remove(self._root / NOTED)

    def _call(self, *command: str) -> tuple[int, str]:
        if not self._real:
            return 0, ""
        code, out, errors = self._module.run_command(
            list(command), environ_update={"DEBIAN_FRONTEND": "noninteractive"}
        )
        return code, out or errors

    def _must(self, *command: str) -> None:
        """Run a command without which the note of what was there before must stay, for the next try."""
        code, output = self._call(*command)
        if code:
            why = (output.strip() or f"exit code {code}").splitlines()[-1]
            self._module.fail_json(msg=f"{' '.join(command)}: {why}. Fix it, and reset the host again")

    def _stop_units(self) -> None:
        found = [path.name for path in (self._root / UNITS).glob("*") if self._is_unit(path)]
        instances = [path.name for path in (self._root / UNITS).glob("*.wants/trainer@*.service")]
        mount = self._module.params["mount"]
        units = sorted({*found, *instances}) + ([mount] if mount and (self._root / UNITS / mount).exists() else [])
        if units and self._does:
            self._call("systemctl", "stop", "trainer@chief-*.service")  # which saves, before the others go
            self._call("systemctl", "stop", "trainer@*.service")
            for unit in units:
                if unit == mount:  # what still uses it would wait for ever once its server is gone
                    self._must("systemctl", "disable", "--now", unit)
                elif "@." not in unit:
                    self._call("systemctl", "disable", "--now", unit)
        if mount:
            for path in (UNITS + "/" + mount, f"{UNITS}/multi-user.target.wants/{mount}"):
                self._remove(self._root / path)
            self._remove_empty(self._root / UNITS / f"{mount}.d")

    def _is_unit(self, path: Path) -> bool:
        ours = path.name.startswith(("psfleet-", "trainer@")) or path.name == "tensorboard.service"
        return ours and path.suffix in (".service", ".timer") and path.name not in OF_THE_DRIVER

    def _give_ports_back(self) -> None:
        """Take the tasks' ports out of the kernel's list; what others have put there stays."""
        file = self._root / "etc/sysctl.d/99-psfleet-ports.conf"
        kernel = self._root / "proc/sys/net/ipv4/ip_local_reserved_ports"
        lines = file.read_text().splitlines() if file.is_file() else []
        ours = next((line.removeprefix(OURS_OF_PORTS) for line in lines if line.startswith(OURS_OF_PORTS)), "")
        if ours and self._does:
            left = read_ports(kernel.read_text()) - read_ports(ours)
            kernel.write_text(",".join(map(str, sorted(left))) + "\n")
        for name, value in self._before.get("sysctls", {}).items() if self._does else ():
            (self._root / "proc/sys" / name.replace(".", "/")).write_text(f"{value}\n")

    def _remove_files(self) -> None:
        for pattern in OWN:
            for path in sorted(self._root.glob(pattern)):
                if not any(part in OF_THE_DRIVER for part in path.parts):
                    self._remove(path)
        for path in sorted((self._root / UNITS).glob("*.d")):
            self._remove_empty(path)
        for name in ("etc/systemd/journald.conf.d", "etc/needrestart/conf.d", "etc/exports.d", "etc/nfs.conf.d"):
            if f"/{name}" not in self._before.get("directories", [f"/{name}"]):
                self._remove_empty(self._root / name)

    def _reload(self) -> None:
        if self._does:
            self._call("systemctl", "daemon-reload")
            self._call("systemctl", "reset-failed", "trainer@*", "psfleet-*", "tensorboard*")
            for unit in MASKED:
                if (self._root / UNITS / unit).is_symlink() and (self._root / UNITS / unit).readlink() == Path(
                    "/dev/null"
                ):
                    self._call("systemctl", "unmask", unit)

    def _remove_users(self) -> None:
        users = ("trainer", "prometheus", *(LEFT[name][0] for name in self._gone()))
        before = self._before.get("users", users)
        for user in users:
            if user in before or not self._real or not is_user(user):
                continue
            self.removed.append(f"user {user}")
            if self._does:
                self._must("userdel", user)
                self._call("groupdel", user)

    def _remove_packages(self) -> None:
        if "packages" not in self._before:
            self.notes.append("nobody noted what was there before psfleet: packages, users and directories stay")
            return
        if not self._real:
            return
        named = [name for name in self._module.params["packages"] if name in self._new_packages()]
        self._purge(named)
        # What these had brought along, and nothing else needs.
        _, output = self._call("apt-get", "--simulate", "autoremove")
        self._purge(sorted(set(re.findall(r"^Remv (\S+)", output, re.MULTILINE)) & self._new_packages()))

    def _remove_what_packages_left(self) -> None:
        for _, directory, unit in (LEFT[name] for name in self._gone()):
            if directory and f"/{directory}" not in self._before.get("directories", []):
                self._remove(self._root / directory)
            if self._does:
                self._call("systemctl", "stop", unit)
                self._call("systemctl", "reset-failed", unit)

    def _gone(self) -> list[str]:
        """Return which packages have left something: the host had them neither before psfleet nor now."""
        there = self._before.get("packages", list(LEFT))
        going = {name for name in LEFT if f"package {name}" in self.removed}  # in check mode they are there yet
        return [name for name in LEFT if name not in there and name not in self._new_packages() - going]

    def _new_packages(self) -> set[str]:
        _, output = self._call("dpkg-query", "--show", "--showformat", r"${db:Status-Status} ${Package}\n")
        there = {line.split()[1] for line in output.splitlines() if line.startswith("installed ")}
        return there - set(self._before["packages"])

    def _purge(self, names: list[str]) -> None:
        """Remove packages with their settings, unless others would go with them: at once, or else one by one."""
        if names and not self._others(names, names):
            self._purge_all(names)
            return
        for name in names:
            if others := self._others([name], names):
                self.notes.append(f"package {name} stays: {', '.join(others)} would go with it")
            else:
                self._purge_all([name])

    def _others(self, names: list[str], ours: list[str]) -> list[str]:
        """Return what apt would remove with packages, but for `ours`; a question that fails is another."""
        code, output = self._call("apt-get", "--simulate", "purge", *names)
        going = set(re.findall(r"^(?:Remv|Purg) (\S+)", output, re.MULTILINE))
        return sorted(going - set(ours)) or (["what apt-get refuses to say"] if code else [])

    def _purge_all(self, names: list[str]) -> None:
        self.removed += [f"package {name}" for name in names]
        if self._does:
            self._must("apt-get", "--yes", "--option", "DPkg::Lock::Timeout=60", "purge", *names)

    def _remove_home(self) -> None:
        home = self._root / HOME
        there = [
            Path(each) for each in self._module.params["keep"] if each and (self._root / each.lstrip("/")).exists()
        ]
        kept = [each for each in there if each.is_relative_to("/" + HOME)]
        self.notes += [f"{each} stays, with the runs: -e reset_runs=true removes it" for each in kept]
        for path in sorted(home.iterdir()) if kept else ():
            if not any(each.is_relative_to("/" + str(path.relative_to(self._root))) for each in kept):
                self._remove(path)
        if not kept:
            self._remove(home)
        elif self._does:
            (self._root / LEFT_HOME).touch()

    def _remove(self, path: Path) -> None:
        if not os.path.lexists(path):
            return
        self.removed.append("/" + str(path.relative_to(self._root)))
        if not self._does:
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def _remove_empty(self, path: Path) -> None:
        if path.is_dir() and not path.is_mount() and not any(path.iterdir()):
            self._remove(path)


def read_ports(text: str) -> set[int]:
    """Read a list of ports and ranges, such as 2222,2400-2402."""
    ports: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        ports |= set(range(int(first), int(last or first) + 1))
    return ports


def is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Below which directory all of it is, in a test.
            "root": {"type": "path", "default": "/"},
            # The unit that mounts the shared path, where psfleet wrote it; empty for none.
            "mount": {"type": "str", "default": ""},
            # The packages that psfleet's roles install.
            "packages": {"type": "list", "elements": "str", "default": []},
            # Directories that stay, also below the tasks' user's home, as with a host's own runs.
            "keep": {"type": "list", "elements": "path", "default": []},
            # Directories that go where nothing is left in them and none was before, as mount points.
            "empty": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    reset = Reset(module)
    reset.run()
    module.exit_json(changed=bool(reset.removed), removed=reset.removed, notes=reset.notes)


if __name__ == "__main__":
    main()

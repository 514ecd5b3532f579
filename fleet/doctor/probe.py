"""What `fab doctor` measures on a host: a module that fleet/hosts/agent.py runs as root. Seconds, and nothing is left.

It uses Python's standard library alone.
"""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

AS_TRAINER = ("setpriv", "--reuid=trainer", "--regid=trainer", "--init-groups", "--")
PROXY_SECONDS = 3.0
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
PSFLEET_UNITS = ("trainer@*", "psfleet-*", "tensorboard*")
CLOCK_UNITS = ("chrony", "systemd-timesyncd", "ntp", "ntpsec", "openntpd")


def run(*command: str, seconds: float = 10.0) -> tuple[int, str, str]:
    """Run a command; returns exit code, output and errors, 124 where it takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return 124, "", f"no end within {seconds:g} s"
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr


def room(path: str) -> dict[str, int] | None:
    """Return a file system's bytes and files, all of them and those that are free; None without the path.

    None also of one that hangs: its server may be away, and a look would never end.
    """
    code, printed, _ = run("stat", "--file-system", "--format=%S %b %a %c %d", path)
    if code:
        return None
    block, size, free, files, files_free = map(int, printed.split())
    return {"size": size * block, "free": free * block, "files": files, "files_free": files_free}


def memory() -> dict[str, int]:
    """Return the bytes of memory, and those that a process could have."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    return {"size": found.get("MemTotal", 0), "available": found.get("MemAvailable", 0)}


def units() -> dict[str, list[str]]:
    """Return the kit's units that have failed, and what keeps the time: services, or the machine of a container."""
    _, failed, _ = run("systemctl", "list-units", "--plain", "--no-legend", "--state=failed", *PSFLEET_UNITS)
    names = [f"{name}.service" for name in CLOCK_UNITS]
    _, active, _ = run("systemctl", "list-units", "--plain", "--no-legend", "--state=active", *names)
    is_container = run("systemd-detect-virt", "--quiet", "--container")[0] == 0
    clock = ["the container's machine"] if is_container else _first_words(active)
    return {"failed": _first_words(failed), "clock": clock}


def _first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def limits(names: list[str]) -> dict[str, int]:
    """Return by unit how many files its processes may open."""
    found = {}
    for name in names:
        printed = run("systemctl", "show", "--value", "--property=LimitNOFILE", name)[1].strip()
        if printed.isdecimal():
            found[name] = int(printed)
    return found


def unreadable(paths: list[str]) -> list[str]:
    """Return the files that exist and that the user of the tasks can't read."""
    there = [path for path in paths if Path(path).exists()]
    return [path for path in there if run(*AS_TRAINER, "test", "-r", path)[0] == 1]


def proxies() -> dict[str, str]:
    """Return by address the proxies of systemd's environment that take no connection, each with why."""
    printed = run("systemctl", "show-environment")[1]
    named = dict(line.partition("=")[::2] for line in printed.splitlines())
    wrong = {}
    for address in {named[name] for name in PROXIES if named.get(name)}:
        found = re.search(r"(?:^|[/@])\[?([^\[\]/@:]+|[0-9a-fA-F:]+)\]?:(\d+)/?$", address)
        try:
            if found is None:
                raise OSError(0, "it names no host with a port")
            socket.create_connection((found[1], int(found[2])), PROXY_SECONDS).close()
        except OSError as error:
            wrong[re.sub(r"//[^@/]*@", "//", address)] = error.strerror or str(error)
    return wrong


def check_path(script: str) -> dict[str, Any]:
    """Return what the installed check of the shared path says (roles/storage)."""
    if not Path(script).exists():
        return {"rc": None, "why": ""}
    code, _, errors = run(script, "--write", seconds=60)
    if code == 0:
        code, _, errors = run(script, seconds=60)
    return {"rc": code, "why": errors.strip()}


def probe(asked: dict[str, Any]) -> dict[str, Any]:
    """Look at everything, one after the other."""
    return {
        "room": {path: room(path) for path in ("/", "/opt/trainer", "/run", "/var", "/var/tmp", asked["shared_dir"])},
        "memory": memory(),
        "path": check_path(asked["path_check"]),
        "units": units(),
        "limits": limits(asked["units"]),
        "unreadable": unreadable(asked["readable"]),
        "proxies": proxies(),
    }


def main() -> None:
    module = AnsibleModule(argument_spec={"asked": {"type": "dict", "required": True}})
    module.exit_json(changed=False, **probe(module.params["asked"]))


if __name__ == "__main__":
    main()

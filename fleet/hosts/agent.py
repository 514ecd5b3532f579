"""What `fab` runs on a host as root: modules of the roles, looks at files, and commands, in one process.

It is sent there as text with what it is to do, and uses Python's standard library alone. It reads no arguments: what is
asked may hold secrets.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import grp
import hashlib
import json
import os
import platform
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

LOCK = "/run/psfleet-agent"
PORT_SECONDS = 5
ENVIRONMENT = "/opt/trainer/current/env"
# Directories of programs that some ways to become root leave out.
MORE_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


class Done(Exception):
    """A module has ended, with this result."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg"))
        self.result = result


class AnsibleModule:
    """As much of Ansible's class as the roles' modules use."""

    asked: ClassVar[dict[str, Any]] = {}
    check_mode = False

    def __init__(self, argument_spec: dict[str, Any], **_: Any) -> None:
        self.params = {name: self.asked.get(name, spec.get("default")) for name, spec in argument_spec.items()}
        self.warnings: list[str] = []
        unknown = self.asked.keys() - argument_spec.keys()
        if missing := [name for name, spec in argument_spec.items() if spec.get("required") and name not in self.asked]:
            self.fail_json(f"missing: {', '.join(missing)}")
        if unknown:
            self.fail_json(f"unknown: {', '.join(sorted(unknown))}")

    def exit_json(self, **result: Any) -> None:
        raise Done({"changed": False, "warnings": self.warnings, **result})

    def fail_json(self, msg: str, **result: Any) -> None:
        raise Done({**result, "failed": True, "msg": msg})

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def get_bin_path(self, name: str, required: bool = False) -> str | None:
        path = os.pathsep.join([os.environ.get("PATH", ""), *MORE_PATHS])
        found = shutil.which(name, path=path)
        if found is None and required:
            self.fail_json(f"{name} is not installed")
        return found

    def run_command(
        self, command: list[str], check_rc: bool = False, environ_update: dict[str, str] | None = None,
        data: str | None = None, cwd: str | None = None,
    ) -> tuple[int, str, str]:  # fmt: skip
        result = run(command, {**os.environ, **(environ_update or {})}, data or "", cwd)
        if result["rc"] and check_rc:
            self.fail_json(result["stderr"].strip() or f"{command[0]} ended with {result['rc']}", rc=result["rc"])
        return result["rc"], result["stdout"], result["stderr"]


def run(command: list[str], environment: dict[str, str], data: str, cwd: str | None = None) -> dict[str, Any]:
    """Run a command and return what Ansible registers of one."""
    try:
        done = subprocess.run(
            command, env=environment, input=data, cwd=cwd, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        return {"rc": 127, "stdout": "", "stderr": f"{command[0]}: {error.strerror}"}
    return {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def run_module(name: str, source: str, arguments: dict[str, Any], check: bool) -> dict[str, Any]:
    """Run one of the roles' modules, and return what it says."""
    AnsibleModule.asked, AnsibleModule.check_mode = arguments, check
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(source, name, "exec"), module.__dict__)
        module.main()
    except Done as done:
        return done.result
    except Exception as error:
        return {"failed": True, "msg": f"{name}: {type(error).__name__}: {error}"}
    return {"failed": True, "msg": f"{name} ended without a result"}


def describe_file(path: str) -> list[str] | None:
    """Return a file's mode, the hash of its content, and its owner and group, each by name and number; None for none.

    Instead of the hash a directory has `directory`, and whatever is no file `link`.
    """
    try:
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        else:
            content = "directory" if stat.S_ISDIR(found.st_mode) else "link"
    except OSError:
        return None
    return [f"{stat.S_IMODE(found.st_mode):04o}", content, *owners(found.st_uid, found.st_gid)]


def owners(uid: int, gid: int) -> list[str]:
    """Return owner and group, each by name and number."""
    found = []
    for number, name_of in ((uid, lambda: pwd.getpwuid(uid).pw_name), (gid, lambda: grp.getgrgid(gid).gr_name)):
        try:
            found.append(f"{name_of()} {number}")
        except KeyError:
            found.append(str(number))
    return found


def look_at_unit(name: str) -> dict[str, Any]:
    """Return what systemd says of a unit."""
    shown = run(["systemctl", "show", "--property=ActiveState,UnitFileState", name], dict(os.environ), "")["stdout"]
    return {"ActiveState": "", "UnitFileState": "", **dict(line.partition("=")[::2] for line in shown.splitlines())}


def look_at_user(name: str) -> dict[str, Any]:
    """Return an account, empty where there is none; of its password only whether it is locked."""
    try:
        found = pwd.getpwnam(name)
        group = grp.getgrgid(found.pw_gid).gr_name
    except KeyError:
        return {}
    shadow = dict(line.split(":")[:2] for line in (read("/etc/shadow") or "").splitlines() if ":" in line)
    password = "!" if shadow.get(name) == "!" else ""
    return {"uid": found.pw_uid, "group": group, "home": found.pw_dir, "shell": found.pw_shell, "password": password}


def look_at_group(name: str) -> dict[str, Any]:
    """Return a group, empty where there is none."""
    try:
        return {"gid": grp.getgrnam(name).gr_gid}
    except KeyError:
        return {}


def find(step: dict[str, str]) -> dict[str, Any]:
    """Return the files of a directory whose names fit a pattern."""
    return {"files": sorted(str(each) for each in Path(step["find"]).glob(step["pattern"]) if each.is_file())}


def list_files(directory: str) -> dict[str, Any]:
    """Return each file's size and time."""
    try:
        return {
            "files": {each.name: [each.stat().st_size, int(each.stat().st_mtime)] for each in os.scandir(directory)}
        }
    except OSError:
        return {"files": {}}


def is_open(host: str, port: int) -> bool:
    """Whether something takes connections there."""
    try:
        socket.create_connection((host, port), PORT_SECONDS).close()
    except OSError:
        return False
    return True


LOOKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "unit": lambda step: look_at_unit(step["unit"]),
    "user": lambda step: look_at_user(step["user"]),
    "group": lambda step: look_at_group(step["group"]),
    "mirror": lambda step: list_files(step["mirror"]),
    "port": lambda step: {"open": is_open(step["host"], step["port"])},
    "find": find,
}


def read(path: str) -> str | None:
    """Return a text file's content, of a link where it leads; None where there is none."""
    try:
        place = Path(path)
        return str(place.readlink()) if place.is_symlink() else place.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def do(step: dict[str, Any], sources: dict[str, str], places: dict[str, str]) -> dict[str, Any]:
    """Do one thing: look, `module`, `command`, or `write`. A module's arguments may name places that the host knows."""
    if named := LOOKS.keys() & step.keys():
        return LOOKS[named.pop()](step)
    if "module" in step:
        arguments = dict(step["arguments"])
        for key, value in arguments.items():
            for name, place in places.items() if isinstance(value, str) else ():
                arguments[key] = value = value.replace(name, place)
        return run_module(step["module"], sources[step["module"]], arguments, step.get("check", False))
    if "write" in step:
        path = Path(step["write"])
        partial = path.with_name(f".{path.name}.new")
        partial.write_text(step["text"], encoding="utf-8")
        partial.chmod(0o644)
        partial.replace(path)
        return {"changed": True}
    environment = {**os.environ, **step.get("environment", {})}
    return run(step["command"], environment, step.get("stdin", ""), step.get("directory"))


def warm(asked: dict[str, Any]) -> bool:
    """Have an idle task import TensorFlow, where the host has unit and kit for that; returns whether it does."""
    same = all((describe_file(path) or [])[:2] == state[:2] for path, state in asked["files"].items())
    lines = sorted(line for line in (read(asked["sums"]) or "").splitlines() if line[66:].startswith("trainer/"))
    if not same or hashlib.sha256("\n".join(lines).encode()).hexdigest() != asked["kit"]:
        return False
    return bool(run(asked["command"], dict(os.environ), "")["stdout"].strip())


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked, step by step, until a module fails; only looking goes on then."""
    found: dict[str, Any] = {"python": platform.python_version(), "steps": {}}
    found["warm"] = "warm" in asked and warm(asked["warm"])
    found["files"] = {path: describe_file(path) for path in asked.get("look", ())}
    found["texts"] = {path: read(path) for path in asked.get("read", ())}
    found["names"] = {path: sorted(each.name for each in Path(path).glob("*")) for path in asked.get("list", ())}
    environment = Path(ENVIRONMENT).resolve()
    # A disk that is full or read-only must not keep the host from being looked at.
    place = tempfile.TemporaryDirectory(prefix="psfleet-") if asked.get("blobs") else contextlib.nullcontext("")
    with place as directory:
        for name, blob in asked.get("blobs", {}).items():
            Path(directory, name).write_bytes(base64.b64decode(blob))
        places = {"@blobs": directory, "@environment": str(environment), "@lock": environment.name.rpartition("-")[0]}
        for step in asked.get("steps", ()):
            after = step.get("after")  # as in ["switch", "changed"]: what an earlier step must have found
            if after and not found["steps"].get(after[0], {}).get(after[1]):
                continue
            result = found["steps"][step["name"]] = do(step, asked.get("sources", {}), places)
            if result.get("failed") and not step.get("check"):
                break
    return found


def main() -> None:
    """Do what the global `asked` says; with `alone`, after any other such process on this host has ended."""
    os.umask(0o022)
    os.environ.update(LC_ALL="C", LANG="C")
    asked = globals()["asked"]
    if asked.get("alone"):
        fcntl.flock(os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)
    basic = types.ModuleType("ansible.module_utils.basic")
    basic.AnsibleModule = AnsibleModule  # type: ignore[attr-defined]
    for name in ("ansible", "ansible.module_utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["ansible.module_utils.basic"] = basic
    print(json.dumps(answer(asked)))


if __name__ == "psfleet_agent":
    main()

"""What each of the modules that the roles' tasks name would have on a host.

A reader adds to what is wanted, and returns what the task would register on a host that is so; None where the host has
yet to answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.hosts.agent_request import list_of, pack
from fleet.rollout.desired_state import SKIPPED, UNCHANGED, TaskCall, UnknownTask, expression
from fleet.site.reader import plain_value

Reader = Callable[[TaskCall], Any]
_RUNS = ("active", "activating", "reloading")
_DELIMITERS = ("variable_start_string", "variable_end_string")


def template_file(call: TaskCall) -> Any:
    content = ""
    if call.now.whole:
        from ansible.template import trust_as_template

        text = (call.place / "templates" / str(call.text("src"))).read_text(encoding="utf-8")
        overrides: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": False}
        overrides |= {name: call.arguments[name] for name in _DELIMITERS if name in call.arguments}
        content = str(call.template(trust_as_template(text), call.more, overrides=overrides))
    return _file_of(call, content)


def copy(call: TaskCall) -> Any:
    if "remote_src" in call.arguments:
        raise UnknownTask(call.place, call.task)
    if "src" in call.arguments:
        return _file_of(call, (call.place / "files" / str(call.text("src"))).read_text(encoding="utf-8"))
    return _file_of(call, str(call.text("content")) if call.now.whole else "")


def _file_of(call: TaskCall, content: str) -> Any:
    path, mode = (str(call.text(name)) for name in ("dest", "mode"))
    call.wanted.file(path, mode, content, call.text("owner"), call.text("group"))
    return UNCHANGED


def file(call: TaskCall) -> Any:
    path, state = str(call.text("path")), call.text("state")
    if state not in ("directory", "absent"):
        raise UnknownTask(call.place, call.task)
    owners = [call.text(name) for name in ("owner", "group") if name in call.arguments]
    made = [call.text("mode"), "directory", *owners]
    call.wanted.files[path] = made if state == "directory" else None
    return UNCHANGED


def write_files(call: TaskCall) -> Any:
    for each in call.value("directories") or ():
        wanted = each if isinstance(each, Mapping) else {"path": each}
        owners = [str(wanted[name]) for name in ("owner", "group") if name in wanted]
        call.wanted.files[str(wanted["path"])] = [wanted.get("mode", "0755"), "directory", *owners]
    for each in call.arguments.get("files", ()):
        read = template_file if str(each.get("src", "")).endswith(".j2") else copy
        read(replace(call, arguments=each, more={**call.more, **each.get("vars", {})}))
    return {**UNCHANGED, "paths": []}


def note_refusal(call: TaskCall) -> Any:
    conditions = call.arguments["that"]
    each_of = [conditions] if isinstance(conditions, str) else conditions
    if call.now.whole and not all(call.template(expression(each), call.more) for each in each_of):
        call.wanted.refusals.append(str(call.text("fail_msg")))
    return UNCHANGED


def check(module: str, **state: str) -> Reader:
    """Have a module look whether it would change anything."""

    def read(call: TaskCall) -> Any:
        given = {**plain_value(call.template(call.arguments, call.more)), **state}
        step = {"module": module, "arguments": given, "check": True}
        call.wanted.checks.append(step)
        return _ask(call, step)

    return read


def release(call: TaskCall) -> Any:
    """As host_release would unpack it: what the host has need not be sent, only the list of it."""
    given = plain_value(call.template(call.arguments, call.more))
    archive = Path(given["archive"]).read_bytes()
    call.wanted.blobs["archive"] = pack(archive, frozenset(list_of(archive)))
    step = {"module": "host_release", "arguments": {**given, "archive": "@blobs/archive"}, "check": True}
    return _ask(call, step)


def command(call: TaskCall) -> Any:
    """One that only looks, in check mode too, by its own words."""
    if call.task.get("changed_when") is not False or call.task.get("check_mode") is not False:
        raise UnknownTask(call.place, call.task)
    arguments = call.arguments if isinstance(call.arguments, Mapping) else {"cmd": call.arguments}
    if set(arguments) - {"cmd", "argv"} or {"environment", "become_user", "delegate_to"} & set(call.task):
        raise UnknownTask(call.place, call.task)
    given = plain_value(call.template(arguments.get("argv", arguments.get("cmd")), call.more))
    shell = "ansible.builtin.command" not in call.task
    return _ask(call, {"command": ["/bin/sh", "-c", given] if shell else _words(given)})


def _words(given: Any) -> list[str]:
    return shlex.split(given) if isinstance(given, str) else [str(each) for each in given]


def stat(call: TaskCall) -> Any:
    path = str(call.text("path"))
    call.wanted.looks.add(path)
    if call.now.answer is None:
        return None
    return {**UNCHANGED, "stat": {"exists": call.now.answer["files"].get(path) is not None}}


def first_state(call: TaskCall) -> Any:
    """As the module would find psfleet there: by the tasks' home alone, which this role makes."""
    home = "/var/lib/trainer"
    call.wanted.looks.add(home)
    answer = call.now.answer
    return answer and _differs(call, "what the machine had is not noted", answer["files"].get(home) is None)


def slurp(call: TaskCall) -> Any:
    path = str(call.text("src"))
    call.wanted.reads.add(path)
    if call.now.answer is None:
        return None
    text = call.now.answer["texts"].get(path)
    return SKIPPED if text is None else {**UNCHANGED, "content": base64.b64encode(text.encode()).decode()}


def find(call: TaskCall) -> Any:
    paths, pattern = str(call.text("paths")), str(call.text("patterns"))
    found = _ask(call, {"find": paths, "pattern": pattern})
    return found and {**UNCHANGED, "files": [{"path": path} for path in found["files"]]}


def unit(call: TaskCall) -> Any:
    name = str(call.text("name"))
    found = _ask(call, {"unit": name})
    if found is None:
        return None
    state, enabled = call.value("state"), call.value("enabled")
    runs, kept = found["ActiveState"] in _RUNS, found["UnitFileState"]
    wrong = [
        bool(call.value("daemon_reload")),
        state not in (None, "started", "stopped"),
        state == "started" and not runs,
        state == "stopped" and runs,
        enabled is True and kept != "enabled",
        enabled is False and kept == "enabled",
        bool(call.value("masked")) != (kept == "masked") and call.value("masked") is not None,
    ]
    return _differs(call, f"{name} does not run as it should", any(wrong))


def user(call: TaskCall) -> Any:
    name = str(call.text("name"))
    found = _ask(call, {"user": name})
    if found is None:
        return None
    wanted = {key: call.text(key) for key in ("uid", "group", "home", "shell", "password")}
    wrong = [key for key, value in wanted.items() if value is not None and str(found.get(key)) != value]
    return _differs(call, f"the user {name} differs", bool(wrong))


def group(call: TaskCall) -> Any:
    name = str(call.text("name"))
    found = _ask(call, {"group": name})
    return found and _differs(call, f"the group {name} differs", str(found.get("gid")) != call.text("gid"))


def sysctl(call: TaskCall) -> Any:
    name, value, place = (str(call.text(key)) for key in ("name", "value", "sysctl_file"))
    kernel = f"/proc/sys/{name.replace('.', '/')}"
    call.wanted.reads |= {kernel, place}
    if call.now.answer is None:
        return None
    texts = call.now.answer["texts"]
    lines = [line.replace(" ", "") for line in (texts.get(place) or "").splitlines()]
    last = [line for line in lines if line.startswith(f"{name}=")][-1:]  # the one that counts at the next boot
    wrong = (texts.get(kernel) or "").strip() != value or last != [f"{name}={value}"]
    return _differs(call, f"{name} differs", wrong)


def mirror(call: TaskCall) -> Any:
    """As rsync would compare: by size and time."""
    here, there = Path(str(call.text("src"))), str(call.text("dest"))
    found = _ask(call, {"mirror": there})
    if found is None:
        return None
    ours = {each.name: [each.stat().st_size, int(each.stat().st_mtime)] for each in here.glob("*")}
    return _differs(call, f"{there} differs", not ours or found["files"] != ours)


def wait(call: TaskCall) -> Any:
    """What is to be waited for exists already."""
    if set(call.arguments) - {"host", "port", "timeout", "msg"}:
        raise UnknownTask(call.place, call.task)
    host, port = call.text("host") or "127.0.0.1", int(str(call.text("port")))
    found = _ask(call, {"port": port, "host": host})
    return found and _differs(call, f"nothing answers at {host}, port {port}", not found["open"])


def _ask(call: TaskCall, step: dict[str, Any]) -> Any:
    """Ask the host, or say what it has answered: None before; a change and a failure are noted."""
    name = hashlib.sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()[:16]
    if call.now.answer is None:
        call.wanted.steps[name] = step
        return None
    result = call.now.answer["steps"].get(name)
    if result is None:
        _differs(call, f"{call.name!r} was not asked for", True)
        return None
    found = {**UNCHANGED, **result}
    for stream in {"stdout", "stderr"} & result.keys():
        found[stream] = str(result[stream]).rstrip("\r\n")  # as Ansible registers it
        found[f"{stream}_lines"] = found[stream].splitlines()
    if found["changed"]:
        _differs(call, f"{call.name!r} would change something", True)
    if (found.get("failed") or found.get("rc")) and "failed_when" not in call.task:
        _differs(call, str(found.get("msg") or f"{call.name!r} fails"), True)
    return found


def _differs(call: TaskCall, what: str, wrong: bool) -> Any:
    if wrong:
        call.wanted.refusals.append(what)
    return UNCHANGED


# The names of these files are known before a host has answered.
NAMING: dict[str, Reader] = {
    "ansible.builtin.template": template_file,
    "ansible.builtin.copy": copy,
    "ansible.builtin.file": file,
    "write_files": write_files,
}
# What `fab` reads before a start.
OF_A_START: dict[str, Reader] = {
    **NAMING,
    "ansible.builtin.assert": note_refusal,
    "reserved_ports": check("reserved_ports"),
    "task_secrets": check("task_secrets"),
    "try_firewall": check("firewall_table", state="tried"),
}
# What a role's own look reads besides.
AHEAD: dict[str, Reader] = {
    **OF_A_START,
    "ansible.builtin.command": command,
    "ansible.builtin.shell": command,
    "ansible.builtin.find": find,
    "ansible.builtin.group": group,
    "ansible.builtin.slurp": slurp,
    "ansible.builtin.stat": stat,
    "ansible.builtin.systemd_service": unit,
    "ansible.builtin.user": user,
    "ansible.builtin.wait_for": wait,
    "ansible.posix.synchronize": mirror,
    "ansible.posix.sysctl": sysctl,
    "cluster_note": check("cluster_note"),
    "first_state": first_state,
    "firewall_facts": check("firewall_facts"),
    "host_release": release,
    "python_environment": check("python_environment"),
    "release_prune": check("release_prune"),
    "stale_tasks": check("stale_tasks"),
}

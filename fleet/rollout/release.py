"""Ship the checkout's code and the inventory's run settings with the playbooks that `site.yml` runs too."""

from __future__ import annotations

import contextlib
import json
import locale
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake
from fleet.output.tables import ProgressLine, render_duration
from fleet.places import CODE, KIT, lock_file, role_module, site, site_file
from fleet.signals import undisturbed
from fleet.site.inventory import Inventory
from fleet.site.schema.control_files import program_problem
from fleet.site.schema.lock_files import lock_of
from fleet.site.vault import lend

# In one call, so that what preflight derives from the inventory is there for the others.
STAGE = ("preflight.yml", "release.yml")  # beside what runs
SWITCH = ("preflight.yml", "training.yml")  # what runs is touched
DEEP = ("deep_check.yml",)
# What a start changes on a host that is as it should be otherwise, by the names of Ansible's tasks.
CHANGES = ("Switch to the release", "Write the run settings")

# Fetching the wheels of a new lock is one task, and the longest; what is silent for longer hangs.
SILENT_SECONDS = 3600.0
LOOK_SECONDS = 1.0

# Bits of ansible-playbook's exit code.
_HOSTS_FAILED = 2
_HOSTS_UNREACHABLE = 4
# What Ansible prints is read here, however the operator's own environment wants it.
_PLAIN_OUTPUT = {
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_FORCE_COLOR": "0",
    "ANSIBLE_VERBOSITY": "0",
    "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
    "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
    "ANSIBLE_CALLBACK_FORMAT_PRETTY": "0",
}
# Tasks of roles/release: what goes on without a proof, and what the operator alone can fix.
_UNPROVEN = "Say what is not proven"
_OPERATORS = {"Refuse a program, a run or settings that are wrong", "Sign the release on the control machine"}

_RECAP = re.compile(
    r"^(?P<host>\S+)\s+: ok=\d+\s+changed=(?P<changed>\d+)\s+unreachable=(?P<unreachable>\d+)\s+failed=(?P<failed>\d+)",
    re.MULTILINE,
)
_TASK = re.compile(r"^(?:TASK|RUNNING HANDLER) \[(?:\S+ : )?(?P<name>.*)\] \**$")
_MESSAGE = re.compile(r'^ +"msg": (".*")$')
_RESULT = re.compile(r"^(?P<kind>changed|fatal|failed): \[(?P<host>[^\]\s]+)")


@dataclass(frozen=True)
class Recap:
    """One host's line at the end of a playbook's output."""

    changed: int
    unreachable: int
    failed: int


@dataclass(frozen=True)
class Shipment:
    """What is to be shipped: the release that is planned, the choice that it is proven with, and how far it goes."""

    inventory: Inventory
    playbooks: Sequence[str]
    release: str
    selection: Mapping[str, Any]
    untried: bool = False
    """Whether no run has trained with this choice: the model's building is proven also where the release is current."""
    without: Sequence[str] = ()
    """Hosts that are left out."""
    check: bool = False
    """Whether nothing is done (Ansible's check mode)."""

    @property
    def as_variable(self) -> dict[str, Any]:
        """What the playbooks know as fab_shipment."""
        return {"release": self.release, "selection": dict(self.selection), "untried": self.untried}

    @property
    def arguments(self) -> list[str]:
        """What ansible-playbook gets after the playbooks."""
        extra = {"fab_shipment": self.as_variable}
        arguments = ["--inventory", self.inventory.source, "--extra-vars", json.dumps(extra)]
        return [*arguments, *_limit(self.without), *(["--check"] if self.check else [])]


@dataclass(frozen=True)
class ShipmentResult:
    """What a shipment did: each host's recap, and by task the hosts that it changed."""

    recaps: Mapping[str, Recap]
    changes: Mapping[str, Sequence[str]]


def build_release(inventory: Inventory) -> str:
    """Return the id of the release that the checkout makes now; raises OperatorMistake where it can't be shipped."""
    return str(read_release(inventory)[0]["id"])


def read_release(inventory: Inventory) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the release that the checkout makes now, and its files, as the module release_archive gathers them.

    Raises OperatorMistake where it can't be shipped.
    """
    release_archive = role_module("release", "release_archive")
    variables = inventory.variables[inventory.chief.host]
    program = variables.get("release_program") or ""
    gpu = bool(inventory.groups.get("gpu"))
    try:
        made: tuple[dict[str, Any], dict[str, bytes]] = release_archive.gather(
            str(CODE / "trainer"),
            str(site_file(program)) if program else "",
            str(lock_file(site(), lock_of(variables, "release_lock"), gpu)),
            str(lock_file(site(), lock_of(variables, "release_lock_gpu"), gpu)) if gpu else None,
        )
    except release_archive.ReleaseError as error:
        raise OperatorMistake(str(error)) from error
    return made


def sign_release(
    files: Mapping[str, bytes], release: str, cache: Path, key: str, signers: Sequence[str]
) -> tuple[bytes, str, str]:
    """Pack a release; return its archive, its signature and who may sign, as the module release_signature has them.

    Raises OperatorMistake where it can't be signed.
    """
    release_archive = role_module("release", "release_archive")
    release_signature = role_module("release", "release_signature")
    archive: bytes = release_archive.pack(files)
    place = release_archive.keep(archive, release, cache / "releases")
    own = str(site_file(key)) if key else ""
    try:
        signature, allowed = release_signature.sign_with(place, own, cache / "release-key", signers)
    except release_signature.SigningError as error:
        raise OperatorMistake(str(error)) from error
    return archive, signature.read_text(), allowed


def find_program(inventory: Inventory, program: str, arguments: Sequence[str]) -> None:
    """Raise OperatorMistake where the checkout has no such program, or it takes no such arguments.

    It is read, not imported; the proof on the hosts has the last word.
    """
    gpu = bool(inventory.groups.get("gpu"))
    if problem := program_problem(inventory.variables[inventory.chief.host], program, arguments, site(), gpu):
        raise OperatorMistake(problem)


def ship(
    shipment: Shipment, display: ProgressLine, popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
) -> ShipmentResult:
    """Run the playbooks, and show what they do meanwhile.

    Raises with Ansible's output when a host is unreachable or failed, and when Ansible is silent for SILENT_SECONDS.
    """
    code, output = _play("shipping", shipment.inventory, shipment.playbooks, shipment.arguments, display, popen)
    recaps = parse_recap(output)
    if code:
        raise _failure(code, output, recaps, shipment.inventory)
    return ShipmentResult(recaps, parse_changes(output))


def check_deeply(
    inventory: Inventory,
    without: Sequence[str],
    display: ProgressLine,
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> dict[str, str]:
    """Have the hosts but those `without` compare their code and environment with what was installed.

    Returns by host what is wrong there. Raises HostsUnreachable, and ClusterTrouble where the comparison itself failed.
    """
    arguments = ["--inventory", inventory.source, *_limit(without)]
    code, output = _play("comparing", inventory, DEEP, arguments, display, popen)
    found = {}
    for line in output.splitlines():
        if (result := _RESULT.match(line)) and result["kind"] == "fatal" and "UNREACHABLE" not in line:
            with contextlib.suppress(ValueError):
                found[result["host"]] = str(json.loads(line.partition(" => ")[2])["msg"])
    recaps = parse_recap(output)
    unreachable = {host: "Ansible could not reach it" for host, recap in recaps.items() if recap.unreachable}
    if unreachable:
        raise HostsUnreachable(unreachable, "\n".join(f"{host}: {problem}" for host, problem in found.items()))
    if code and not found:
        raise ClusterTrouble(f"{output.rstrip()}\n\nnothing was compared: ansible-playbook ended with code {code}")
    return found


def _limit(without: Sequence[str]) -> list[str]:
    """Return the arguments that leave hosts out."""
    return ["--limit", ":".join(["all", *(f"!{host}" for host in without)])] if without else []


def _play(
    doing: str,
    inventory: Inventory,
    names: Sequence[str],
    arguments: Sequence[str],
    display: ProgressLine,
    popen: Callable[..., subprocess.Popen[str]],
) -> tuple[int, str]:
    """Run playbooks, and show what they do meanwhile; returns Ansible's exit code and its output."""
    playbooks = [KIT / "ansible" / name for name in names]
    for playbook in playbooks:
        if not playbook.is_file():
            raise OperatorMistake(f"{playbook} is missing: psfleet is incomplete here. Install it again")
    environment = {
        **os.environ,
        **utf8_locale(),
        **_PLAIN_OUTPUT,
        "ANSIBLE_CONFIG": str(site() / "ansible.cfg"),
        "PYTHONUNBUFFERED": "1",
        "ANSIBLE_ASK_VAULT_PASS": "0",  # fab has asked
    }
    with lend(inventory.vault_password) as (password, descriptors):
        process = popen(
            [find_ansible(), *map(str, playbooks), *arguments, *password],
            cwd=site(),
            env=environment,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output = "".join(_follow(process, display, doing))
            return process.wait(), output
        finally:
            _end(process)


def parse_recap(output: str) -> dict[str, Recap]:
    """Read the lines below PLAY RECAP."""
    return {
        found["host"]: Recap(int(found["changed"]), int(found["unreachable"]), int(found["failed"]))
        for found in _RECAP.finditer(output)
    }


def parse_changes(output: str, kind: str = "changed") -> dict[str, list[str]]:
    """Read by task the hosts of the results of a kind."""
    changes: dict[str, list[str]] = {}
    task = ""
    for line in output.splitlines():
        if header := _TASK.match(line):
            task = header["name"]
        elif (result := _RESULT.match(line)) and result["kind"] == kind:
            hosts = changes.setdefault(task, [])
            if result["host"] not in hosts:  # a loop has a line for each item
                hosts.append(result["host"])
    return changes


def _follow(process: subprocess.Popen[str], display: ProgressLine, doing: str) -> Iterator[str]:
    """Hand on Ansible's lines, and say each second which task is waited for."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    assert process.stdout is not None
    stdout = process.stdout

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True, name="ansible").start()
    task, begun, heard = "Ansible starts", time.monotonic(), time.monotonic()
    while True:
        now = time.monotonic()
        display.show(f"{doing}: {task}" + (f" ({render_duration(now - begun)})" if now - begun >= 2 else ""))
        try:
            line = lines.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            if time.monotonic() - heard > SILENT_SECONDS:
                raise ClusterTrouble(
                    f"{doing} was ended: nothing was heard for {render_duration(SILENT_SECONDS)} of the task "
                    f"{task!r}. See which host it waits for: ansible-playbook -v site.yml"
                ) from None
            continue
        if line is None:
            return
        heard = time.monotonic()
        if header := _TASK.match(line):
            task, begun = header["name"], heard
        elif task == _UNPROVEN and (found := _MESSAGE.match(line)):
            display.keep(json.loads(found[1]))
        elif (result := _RESULT.match(line)) and result["kind"] != "failed":
            if result["kind"] == "fatal":
                display.keep(f"{result['host']}: {task}: " + ("unreachable" if "UNREACHABLE" in line else "failed"))
            else:
                display.keep(f"{result['host']}: {task}")
        yield line


def _end(process: subprocess.Popen[str]) -> None:
    """Leave no Ansible behind, also after Ctrl-C, twice: it would go on beside what is put back."""
    if process.poll() is not None:
        return
    with undisturbed():
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(code: int, output: str, recaps: dict[str, Recap], inventory: Inventory) -> FleetError:
    message = f"{output.rstrip()}\n\nnot everything was shipped: ansible-playbook ended with code {code}, see above"
    unreachable = {host: "Ansible could not reach it" for host, recap in recaps.items() if recap.unreachable}
    if code & _HOSTS_UNREACHABLE and unreachable:
        return HostsUnreachable(unreachable, message)
    if _OPERATORS & parse_changes(output, "fatal").keys():
        # What it did before was right, and would only hide the value that is wrong.
        return OperatorMistake("\n".join(_messages(output)) or message)
    failed = {host for host, recap in recaps.items() if recap.failed}
    # What fails on the control machine, or before any host is asked, is in the checkout or in the inventory.
    if code & _HOSTS_FAILED and failed & set(inventory.hosts):
        return ClusterTrouble(message)
    return OperatorMistake(message)


def _messages(output: str) -> list[str]:
    """Read what the tasks that failed say, each message once."""
    found: dict[str, None] = {}
    for line in output.splitlines():
        if line.startswith("fatal: "):
            with contextlib.suppress(ValueError):
                found.setdefault(str(json.loads(line.partition(" => ")[2]).get("msg")))
    return list(found)


def find_ansible() -> str:
    """Return the ansible-playbook of this Python environment; raises OperatorMistake where there is none."""
    beside = Path(sys.executable).parent / "ansible-playbook"
    found = str(beside) if beside.is_file() else shutil.which("ansible-playbook")
    if not found:
        raise OperatorMistake(
            "ansible-playbook is not installed beside this program. Install psfleet again, in a checkout of it: pipx "
            "install . or uv pip install --require-hashes -r locks/control.txt"
        )
    return found


def utf8_locale() -> dict[str, str]:
    """Return what Ansible's environment needs: without a locale that exists, and is UTF-8, it does not begin."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "")
        encoding = locale.getlocale()[1] or ""
    except (locale.Error, ValueError):
        encoding = ""
    finally:
        locale.setlocale(locale.LC_ALL, before)
    return {} if encoding.lower() in ("utf-8", "utf8") else {"LC_ALL": "C.UTF-8"}

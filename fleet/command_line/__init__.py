"""What the command lines of all verbs have in common: their flags, their cluster, how they end."""

from __future__ import annotations

import inspect
import io
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import fabric
from fabric import task
from invoke import Argument, Config, Context, Exit, Task

from fleet.actions.console import Console
from fleet.errors import FleetError, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import SshHosts
from fleet.output.tables import lost
from fleet.output.terminal import printable
from fleet.site.inventory import load_inventory
from fleet.site.inventory_cache import recall_inventory
from fleet.site.schema.problems import show
from trainer.core.settings.parameters import parse_assignments

MEANWHILE = "print the outcome as JSON, and what is done meanwhile on standard error"
RUN = "whose (default: the chosen run's)"
PLAN = {"plan": "say what would be done, and do nothing"}
REASON = {"reason": "why, for the history"}
# What every verb takes, after its own flags.
_COMMON = {"json": False, "inventory": None, "ask_vault_pass": False}
_WHERE = {
    "inventory": "path of the inventory (else PSFLEET_INVENTORY, else ansible.cfg's)",
    "ask_vault_pass": "type the password of the inventory's vaults, as with ansible-playbook",
}

_VERBS: set[str] = set()
_COMMANDS = re.compile(r"\b(?:fab ([a-z]+(?:-[a-z]+)*)|ansible-playbook [a-z_/]+\.yml)\b(?! --inventory)")


@dataclass(frozen=True)
class VerbCall:
    """A verb as it was called."""

    context: Context
    json: bool
    inventory: str | None
    ask_vault_pass: bool

    @property
    def console(self) -> Console:
        """With `--json` standard output has that alone, so that another program can read it.

        How far a verb is goes to standard error either way.
        """
        console = Console(sys.stderr, json_out=sys.stdout) if self.json else Console(progress_out=sys.stderr)
        return replace(console, complete=self.complete)

    def complete(self, text: str) -> str:
        """Add this call's inventory to the commands that a text names: without it they are for another cluster.

        Ansible itself does not heed PSFLEET_INVENTORY.
        """
        other = os.environ.get("PSFLEET_INVENTORY")
        for_ansible = self.inventory or (other if other != os.environ.get("ANSIBLE_INVENTORY") else None)

        def add(found: re.Match[str]) -> str:
            inventory = self.inventory if found[1] in _VERBS else None if found[1] else for_ansible
            return f"{found[0]} --inventory {shlex.quote(inventory)}" if inventory else found[0]

        return _COMMANDS.sub(add, text)

    @contextmanager
    def cluster(self, check: bool = False) -> Iterator[Cluster]:
        """Give the inventory's cluster; what stops a verb becomes its message and exit code here.

        Starting asks for an inventory without fault (`check`); to look and to stop, knowing the tasks is enough.
        """
        try:
            with ending():
                if check or self.ask_vault_pass:
                    known = load_inventory(self.inventory, check=check, ask_vault_pass=self.ask_vault_pass)
                else:
                    known = recall_inventory(self.inventory)
                hosts = SshHosts(known.everyone, self.context.config)
                try:
                    yield Cluster(known, hosts)
                finally:
                    hosts.close()
        except Exit as end:
            raise Exit(end.message and self.complete(end.message), end.code) from end


class _Verb(fabric.Task):
    """A task that keeps its help texts: Invoke takes them away when it is asked for the flags."""

    help: dict[str, str]

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        kept = dict(self.help)
        try:
            found: list[Argument] = super().get_arguments(ignore_unknown_help)
            return found
        finally:
            self.help = kept


def verb(
    help: Mapping[str, str] | None = None,
    json: str = "print JSON instead of a table",
    flags_of: Callable[..., None] | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Task[Any]]:
    """Make a function a verb: it takes a Call, and its further parameters are its flags.

    A flag's text is in `help`, and that of --json in `json`. With `flags_of` the flags are another function's; its
    parameters after `*` are none. `options` are those of Invoke's task.
    """

    def decorate(body: Callable[..., None]) -> Task[Any]:
        signature = _with_common_flags(inspect.signature(flags_of or body))

        @wraps(body)
        def run(*words: Any, **flags: Any) -> None:
            bound = signature.bind(*words, **flags)
            bound.apply_defaults()
            given = dict(bound.arguments)
            if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack letters that a run has
                sys.stdout.reconfigure(errors="backslashreplace")
            _reject_as_key(given["context"].config)
            call = VerbCall(given.pop("context"), **{name: given.pop(name) for name in _COMMON})
            with leaving():  # also while the inventory is read
                body(call, **given)
            if lost:
                raise Exit(code=1)

        run.__signature__ = signature  # type: ignore[attr-defined]  # Invoke reads a verb's flags from it
        texts = {**(help or {}), "json": json, **_WHERE}
        _VERBS.add(body.__name__.replace("_", "-"))
        made: Task[Any] = task(klass=_Verb, auto_shortflags=False, help=texts, **_or_help(options))(run)
        return made

    return decorate


def _with_common_flags(signature: inspect.Signature) -> inspect.Signature:
    """Return a context for a Call, a verb's own parameters, and those of every verb: Invoke reads flags from them."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [*signature.parameters.values()][1:]
    return inspect.Signature(
        [inspect.Parameter("context", kind)]
        + [parameter for parameter in own if parameter.kind is kind]
        + [inspect.Parameter(name, kind, default=default) for name, default in _COMMON.items()]
    )


def _or_help(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out the arguments without flags where help is asked for: Invoke takes --help for the first of them."""
    return {**options, "positional": []} if {"-h", "--help"} & {*sys.argv} else options


def _reject_as_key(config: Config) -> None:
    """Refuse Fabric's -i, a file with an SSH key, where it names an inventory, as with ansible-playbook.

    The keys of a configuration file are no flag's: they may be a text, and of files that are missing.
    """
    for path in config._overrides.get("connect_kwargs", {}).get("key_filename", ()):
        if not os.path.isfile(path) or path.endswith((".yml", ".yaml", ".ini", ".json")):  # noqa: PTH113
            expected = "expected the file of an SSH key. For an inventory write it after the verb: --inventory"
            raise Exit(f"-i is {show(path)}: {expected} {shlex.quote(path)}", 2)


@contextmanager
def ending() -> Iterator[None]:
    """Turn what stops a verb into its message and exit code."""
    try:
        yield
    except FleetError as error:
        look = "\nfab doctor says what to try" if isinstance(error, HostsUnreachable) and not error.rest else ""
        raise Exit(printable(f"{error}{look}") or None, error.code) from error


@contextmanager
def leaving(message: str = "") -> Iterator[None]:
    """Let Ctrl-C end a verb with its own message, or with this one; 130 is the shell's own code for it.

    A terminal that is shut and `kill` are the same: what was begun must not stay half done. Only the first one counts:
    shell and kernel both tell of a terminal that is shut.
    """

    def leave(*_: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    heeded = [each for each in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(each) is signal.SIG_DFL]
    for each in heeded:
        signal.signal(each, leave)
    try:
        yield
    except KeyboardInterrupt as left:
        text = str(left) or message
        raise Exit(f"\n{text}" if text else None, 130) from None
    finally:
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)


# Invoke turns a number's text into one itself, and ends with a traceback where it can't: so flags are texts.
def whole_number(flag: str, text: str) -> int:
    """Return a flag's whole number, 1 or more."""
    if not text.isascii() or not text.isdecimal() or len(text) > 4000 or not int(text):
        raise Exit(f"--{flag} is {show(text)}: expected a whole number of 1 or more, as in --{flag} 20", 2)
    return int(text)


def number(flag: str, text: str) -> int:
    """Return a flag's whole number, which may be below 0."""
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 9:
        raise Exit(f"--{flag} is {show(text)}: expected a whole number, as in --{flag} 5 or --{flag}=-5", 2)
    return int(text)


def above_zero(flag: str, text: str) -> float:
    """Return a flag's number, which is greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise Exit(f"--{flag} is {show(text)}: expected a number greater than 0, as in --{flag} 1.5", 2)
    return number


def read_parameters(texts: list[str] | None, flag: str = "--set") -> dict[str, Any]:
    """Return the program's parameters that `--set` gave, or what another flag did."""
    try:
        return parse_assignments(texts or [])
    except ValueError as error:
        raise Exit(str(error).replace("--set", flag), 2) from error

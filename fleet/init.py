"""`psfleet init`: a site's own folder, with its inventory, its program and what leads to the installed package."""

from __future__ import annotations

import configparser
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fleet.errors import OperatorMistake
from fleet.places import CODE, KIT, is_site
from fleet.site.schema.problems import describe_problems, show

_TEMPLATES = Path(__file__).with_name("new_site")
_HOSTS = "inventory/hosts.yml"
# Playbooks find these beside themselves, and a path would be of one installation.
_PATHS = ("roles_path", "filter_plugins", "callback_plugins", "action_plugins", "library")
# The other groups, for the eye, and so that Ansible doesn't warn of them.
_EMPTY = ("data", "gpu", "nfs_server", "prometheus", "alertmanager")
_DEVELOPERS = ("lab", "vms")  # a checkout's
_HEAD = """---
# The machines by their jobs. A host may be in several groups; its place in a group is the task's index.
# ansible_host is the address that you reach it by. Add cluster_address where the others reach it by another one, and
# worker_tasks or ps_tasks where it is to run several. Many hosts: `w[01:40]:`, and in group_vars/all.yml
# ansible_host: '{{ inventory_hostname }}'.
"""


def make_site(directory: Path, hosts: Sequence[str], say: Callable[[str], None], example: str = "") -> None:
    """Make a site's folder of hosts, each NAME or NAME=ADDRESS, or with one of psfleet's example inventories.

    A file that is present stays as it is. Raises OperatorMistake for a wrong name or address, for no host, for an
    example that is none, and for a folder that can't be one.
    """
    _reject_folder(directory)
    _reject_hosts(directory, hosts, example)
    digits = CODE / "trainer/examples/digits.py"
    texts = {
        "ansible.cfg": _settings(),
        "site.yml": _template("site.yml"),
        "reset.yml": _template("reset.yml"),
        "fabfile.py": _template("fabfile.py"),
        "README.md": _template("README.md"),
        ".gitignore": _template("gitignore"),
        "programs/digits.py": digits.read_text(encoding="utf-8"),
    }
    data = digits.with_suffix(".npz")
    if example:
        texts |= _example(example)
    else:
        texts["inventory/group_vars/all.yml"] = _template("all.yml")
    if hosts:
        groups = yaml.safe_dump(_groups(hosts, yaml.safe_load(_template("all.yml"))), sort_keys=False)
        texts[_HOSTS] = _HEAD + groups.replace(": null\n", ":\n")
    try:
        for name, text in sorted(texts.items()):
            say(_write(directory, name, text.encode()))
        say(_write(directory, f"programs/{data.name}", data.read_bytes()))
    except OSError as error:
        why = f"can't be written: {error.strerror}; expected a folder of yours"
        raise OperatorMistake(f"{error.filename or directory} {why}") from error
    inventory = directory / _HOSTS
    if hosts and inventory.read_bytes() != texts[_HOSTS].encode():
        say(f"{', '.join(hosts)}: not written, since {inventory} stays as it is; add there what it lacks")
    _say_next(directory, say)


def _reject_hosts(directory: Path, hosts: Sequence[str], example: str) -> None:
    """Raise OperatorMistake for hosts beside an example, and where neither is named and no inventory is present."""
    if example and hosts:
        raise OperatorMistake(f"{hosts[0]} is named beside --example {example}, which has hosts; expected one of both")
    if not hosts and not example and not (directory / "inventory").exists():
        raise OperatorMistake(
            "no host is named; expected one or more, the coordinator's first: "
            f"psfleet init {shlex.quote(str(directory))} alpha=192.0.2.11 beta=192.0.2.12 gamma"
        )


def _say_next(directory: Path, say: Callable[[str], None]) -> None:
    """Say what to type, and what an ansible.cfg of the operator's lacks."""
    here = directory.resolve() == Path.cwd()
    place = shlex.quote(str(directory))
    say(f"next: {'type' if here else f'cd {place}, and type'} what README.md says {'here' if here else 'there'}")
    if missing := _missing_settings(directory / "ansible.cfg"):
        say(f"ansible.cfg lacks settings of psfleet's; add them: {'; '.join(missing)}")


def _example(name: str) -> dict[str, str]:
    """Return the files of an example inventory; raises OperatorMistake where there is none of this name."""
    known = sorted(path.name for path in (KIT / "inventory").iterdir() if path.name not in _DEVELOPERS)
    if name not in known:
        raise OperatorMistake(f"--example is {show(name)}; expected one of {', '.join(known)}")
    root = KIT / "inventory" / name
    files = (path for path in root.rglob("*") if path.suffix == ".yml")
    return {f"inventory/{path.relative_to(root)}": path.read_text(encoding="utf-8") for path in files}


def _reject_folder(directory: Path) -> None:
    """Raise OperatorMistake for a folder in psfleet's own tree, and for one whose ansible.cfg Ansible would ignore."""
    if "=" in directory.name:
        raise OperatorMistake(
            f"{directory} is a host's name and address; expected the folder first: psfleet init DIR {directory} ..."
        )
    whole = directory.resolve()
    if whole.is_relative_to(KIT) or whole == CODE:
        raise OperatorMistake(
            f"{directory} is in psfleet's own folder {KIT}, which an upgrade replaces; expected a folder of yours, "
            "such as ~/mysite"
        )
    if around := next(filter(is_site, whole.parents), None):
        raise OperatorMistake(
            f"{directory} is in the folder of the site {around}, whose commands would not know which one is meant; "
            f"expected a folder beside it, such as {around.with_name('second')}"
        )
    if directory.exists() and not directory.is_dir():
        raise OperatorMistake(f"{directory} is no directory; expected one, or a name that is free")
    if directory.is_dir() and directory.stat().st_mode & stat.S_IWOTH:
        raise OperatorMistake(
            f"everybody may write to {directory}, and Ansible ignores an ansible.cfg there: chmod o-w {directory}"
        )


def _groups(given: Sequence[str], site: Mapping[str, Any]) -> dict[str, Any]:
    """Give each host its jobs: the first one the coordinator, the first two parameter servers, the others workers.

    Raises OperatorMistake with everything that is wrong with their names and addresses.
    """
    from fleet.site.preflight import inventory_problems

    addresses: dict[str, str] = {}
    for word in given:
        _reject_word(word)
        name, equals, address = word.partition("=")
        if name in addresses:
            raise OperatorMistake(f"host {show(name)} is named twice; expected each once")
        if equals and not address:
            raise OperatorMistake(f"host {show(word)} has no address; expected NAME=ADDRESS, or the name alone")
        addresses[name] = address or name
    names = list(addresses)
    groups = {
        "chief": names[:1],
        "evaluator": names[:1],
        "tensorboard": names[:1],
        "ps": names[: 2 if len(names) > 2 else 1],
        "worker": names[1:] or names,
    }
    variables = {name: {**site, "ansible_host": address} for name, address in addresses.items()}
    if problems := inventory_problems({"all": names, "ungrouped": [], **groups}, variables):
        raise OperatorMistake(describe_problems(problems))
    known: set[str] = set()
    made: dict[str, Any] = {}
    for group, members in (groups | {group: [] for group in _EMPTY}).items():
        lines = {name: None if name in known else {"ansible_host": addresses[name]} for name in members}
        made[group] = {"hosts": lines or None}
        known |= set(members)
    return made


def _reject_word(word: str) -> None:
    """Raise OperatorMistake for what other commands take for hosts: a range, a list with commas, a login."""
    name = word.partition("=")[0]
    if "[" in name[1:]:  # an address may begin with one
        shell = name.translate({ord("["): "{", ord("]"): "}", ord(":"): ".."})
        raise OperatorMistake(
            f"host {show(name)} is a range; expected each host by itself, as the shell writes {shell}, or the range "
            f"in {_HOSTS} afterwards"
        )
    if "," in word:
        hosts = word.replace(",", " ")
        raise OperatorMistake(f"host {show(word)} has a comma; expected spaces between hosts: {hosts}")
    if "@" in word:
        where = "ansible_user in group_vars/all.yml, or User in ~/.ssh/config"
        raise OperatorMistake(f"host {show(word)} has a login; expected it as {where}")


def _write(directory: Path, name: str, content: bytes) -> str:
    """Write a file that is missing; returns what was done, for the operator."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        same = path.is_file() and path.read_bytes() == content
        return f"kept {path}" if same else f"kept {path} as it was: what `psfleet init` writes differs"
    return f"made {path}"


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _settings() -> str:
    """Return psfleet's ansible.cfg without its paths."""
    lines = (KIT / "ansible.cfg").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition(" = ")[0] not in _PATHS]
    return "\n".join("inventory = inventory" if line.startswith("inventory = ") else line for line in kept) + "\n"


def _missing_settings(path: Path) -> list[str]:
    """List psfleet's settings that an older ansible.cfg has no line for."""
    own, found = configparser.RawConfigParser(), configparser.RawConfigParser(strict=False)
    own.read_string(_settings())
    found.read(path, encoding="utf-8")
    return [
        f"[{section}] {name} = {value}"
        for section in own.sections()
        for name, value in own.items(section)
        if not found.has_option(section, name)
    ]

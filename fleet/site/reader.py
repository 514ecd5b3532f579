"""Reading an inventory as Ansible reads it, and with what can't be read as problems among others."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fleet.errors import OperatorMistake, first_line
from fleet.files import control_file
from fleet.places import KIT, site
from fleet.site.routes import Defaults
from fleet.site.schema.formats import control_path
from fleet.site.schema.inventory_files import (
    beside_problems,
    directories,
    empty_problems,
    range_problems,
    special_file_problems,
    variable_files,
)
from fleet.site.schema.inventory_reading import VAULT_FIX, plain
from fleet.site.schema.problems import Problem, describe_problems, show
from fleet.site.schema.yaml_structure import shape_problems
from fleet.site.vault import open_vaults

_YAML = (".yml", ".yaml", ".json")
# What Ansible says of a file before its name.
_UNPARSED = "Completely failed to parse inventory source "
_QUOTED = re.compile(r"^[^']*'([^']*)'.*", re.DOTALL)
_FOR_A_PLUGIN = "Plugin configuration YAML file"
# What the clouds' plugins say without their libraries, each in its own words.
_NO_LIBRARY = re.compile(r"Python library \(?(\w[\w-]*(?: and \w[\w-]*)*)")


class HostVariables(Mapping[str, Any]):
    """One host's variables, each rendered when it is read: one that only a playbook can render harms no other."""

    def __init__(self, host: str, raw: Mapping[str, Any], loader: Any) -> None:
        self._host = host
        self._raw = raw
        self._loader = loader
        self._templar: Any = None

    def __getitem__(self, key: str) -> Any:
        from ansible.errors import AnsibleError

        try:
            return plain_value(self.render(key))
        except (AnsibleError, ValueError) as error:
            raise OperatorMistake(
                f"host '{self._host}': variable '{key}' can't be rendered: {first_line(error)}"
            ) from error

    def render(self, key: str) -> Any:
        """Render one, with Ansible's tags, which know where it is written."""
        value = self._raw[key]
        if value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "{" not in value):
            return value  # most are, and a template takes a while
        if not isinstance(value, str):
            plain(value)  # a template would go through all that a few anchors stand for
        if self._templar is None:
            from ansible.template import Templar

            self._templar = Templar(loader=self._loader, variables=self._raw)
        return self._templar.template(value)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The same before anything is rendered."""
        return self._raw

    @property
    def tagged(self) -> Mapping[str, Any]:
        """The same with Ansible's tags, whatever reading one raises."""
        return _Tagged(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


class _Tagged(Mapping[str, Any]):
    def __init__(self, variables: HostVariables) -> None:
        self._variables = variables

    def __getitem__(self, key: str) -> Any:
        return self._variables.render(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


@dataclass(frozen=True)
class Source:
    """What Ansible reads of an inventory, before anything is made of it."""

    name: str
    groups: Mapping[str, Sequence[str]]  # the names as Ansible tags them, with the places where they are written
    variables: Mapping[str, Mapping[str, Any]]
    problems: Sequence[Problem] = ()  # files that can't be read, where the rest was
    vault_password: str | None = field(default=None, repr=False)
    defaults: Defaults | None = None  # None: as Ansible's settings have them


def read_source(
    given: str | None,
    environment: Mapping[str, str] = os.environ,
    lenient: bool = False,
    ask_vault_pass: bool | str = False,
) -> Source:
    """Read groups and variables. With `lenient` what can't be read is a problem among others, and the rest is read.

    Raises OperatorMistake when the path is missing, and without `lenient` for a file that can't be read.
    """
    os.environ.setdefault("ANSIBLE_CONFIG", str(site() / "ansible.cfg"))
    settings = _ansible_settings()
    # A source that Ansible can't parse is an error here, not a warning followed by an empty inventory.
    settings.INVENTORY_ANY_UNPARSED_IS_FAILED = True
    source = find_source(given, environment, settings.DEFAULT_HOST_LIST)
    beside = beside_problems([source], site()) if lenient else ()  # a running cluster can be stopped all the same
    if absurd := [*special_file_problems([source]), *empty_problems(source), *range_problems(source), *beside]:
        if lenient:
            return Source(source, {"all": []}, {}, absurd)
        raise OperatorMistake(describe_problems(absurd))
    _load_ansible_plugins()
    broken: list[Problem] = []
    loader = _make_loader(broken if lenient else None)
    password = open_vaults(loader, ask_vault_pass)
    if shapes := list(shape_problems([source])):
        if lenient:
            return Source(source, {"all": []}, _variables_of_files(source, loader), [*shapes, *broken], password)
        raise OperatorMistake(describe_problems(shapes))
    groups, variables = _read_hosts(source, loader, broken, lenient)
    if lenient and not variables:
        variables = _variables_of_files(source, loader)
    return Source(source, groups, variables, broken, password)


def _ansible_settings() -> Any:
    """Return Ansible's settings; raises OperatorMistake where a variable of the environment has a wrong one."""
    # Ansible reads them when it is imported, and half a second is too much for `fab --list`.
    try:
        import ansible.constants as settings
    except Exception as error:  # Ansible's own class can't be had without its settings
        raise OperatorMistake(
            f"Ansible's settings can't be read: {first_line(error).rstrip('.:')}. Fix or unset the variable that sets "
            "it: env | grep ^ANSIBLE_"
        ) from error
    return settings


def _make_loader(broken: list[Problem] | None) -> Any:
    """Return Ansible's loader of files; with `broken` a file that can't be read is empty, and why stands there."""
    from ansible.parsing.dataloader import DataLoader

    class Lenient(DataLoader):
        def load_from_file(self, file_name: str, *args: Any, **kwargs: Any) -> Any:
            assert broken is not None
            try:
                return super().load_from_file(file_name, *args, **kwargs)
            except Exception as error:  # what a broken file makes YAML's reader or Ansible's vault raise
                problem = _unreadable(str(file_name), error)
                if problem not in broken:
                    broken.append(problem)
                return {}

    loader = DataLoader() if broken is None else Lenient()
    loader.set_basedir(str(site()))
    return loader


def _read_hosts(
    source: str, loader: Any, broken: list[Problem], lenient: bool
) -> tuple[dict[str, list[str]], dict[str, HostVariables]]:
    """Have Ansible read groups and variables; what is `broken` afterwards is no inventory in any other language."""
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import display
    from ansible.vars.manager import VariableManager

    # Why it can't parse a file, Ansible tells in its warnings alone, at length and once for each plugin that tried.
    reasons: dict[str, str] = {}
    display.error_as_warning = lambda msg, exception, **more: reasons.update(
        {_QUOTED.sub(r"\1", str(msg)): _words(exception)}
    )
    try:
        manager, unparsed = _make_manager(source, loader, broken, lenient, reasons)
        # What is no YAML may be an INI file, as Ansible found when it read on.
        broken[:] = [*unparsed, *(each for each in broken if Path(str(each.file)).suffix in _YAML)]
        variables = VariableManager(loader=loader, inventory=manager)
        found = {
            str(host.name): HostVariables(str(host.name), variables.get_vars(host=host, include_hostvars=False), loader)
            for host in manager.hosts.values()  # get_hosts() takes a host that is called all for the pattern
        }
    except AnsibleError as error:
        reason = str(error) if not reasons else f"{first_line(error)}: {_reason(source, reasons, error)}"
        raise OperatorMistake(f"{source} can't be read: {reason}") from error
    finally:
        del display.error_as_warning
    return {group: [str(host) for host in hosts] for group, hosts in manager.get_groups_dict().items()}, found


def _make_manager(
    source: str, loader: Any, broken: Sequence[Problem], lenient: bool, reasons: dict[str, str]
) -> tuple[Any, list[Problem]]:
    """Return Ansible's reading of an inventory, and with `lenient` the files that are none."""
    import ansible.constants as settings
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager

    try:
        return InventoryManager(loader=loader, sources=[source]), []
    except AnsibleError as error:
        if not lenient:
            raise
        unparsed = []
        if not any(Path(str(each.file)).suffix in _YAML for each in broken):
            file = str(error).partition(_UNPARSED)[2].strip() or source
            if broken:
                reasons["yaml"] = str(broken[0])
            fix = "" if _missing_library(reasons) else ". Fix it; what is no inventory belongs elsewhere"
            unparsed.append(Problem(f"can't be read: {_reason(file, reasons, error)}{fix}", file=file))
    settings.INVENTORY_ANY_UNPARSED_IS_FAILED = False
    return InventoryManager(loader=loader, sources=[source]), unparsed


def _words(error: Any) -> str:
    """What a plugin says of a file; of a script that fails also the last line of what it says itself."""
    own = (getattr(error, "_help_text", None) or "").strip().splitlines()[1:]
    return first_line(error).rstrip(".") + (f": {own[-1].strip()[:300]}" if own else "")


def _reason(file: str, reasons: Mapping[str, str], error: Exception) -> str:
    """What the plugins said that a file may be for: YAML's where it has its name, else also the one for INI files."""
    if missing := _missing_library(reasons):
        return missing
    likely = ("yaml",) if Path(file).suffix in _YAML else ("ini", "yaml")
    if "script" in reasons and os.access(file, os.X_OK):
        likely = ("script",)
    elif reasons.get("yaml", "").startswith(_FOR_A_PLUGIN):
        likely = ("auto",)  # which asks the plugin that the file names
    return "; ".join(f"{reasons[each]} (as {each})" for each in likely if each in reasons) or first_line(error)


def _missing_library(reasons: Mapping[str, str]) -> str | None:
    """Say which library a cloud's plugin lacks, and how to install it."""
    found = _NO_LIBRARY.search(reasons.get("auto", ""))
    command = f"{sys.executable} -m uv pip install --require-hashes -r {KIT / 'locks/cloud.txt'}"
    needs = "its plugin needs the Python package"
    return f"{needs} {found[1]}. Install what the clouds' plugins need: {command}" if found else None


def _unreadable(file: str, error: Exception) -> Problem:
    """Say which file can't be read, and at which line."""
    place = getattr(getattr(error, "_orig_exc", None) or error.__cause__, "problem_mark", None)
    line = place.line + 1 if place is not None else None
    if line is None and (found := re.search(r":(\d+):\d+\b", str(error))):
        line = int(found[1])
    reason = first_line(error).rstrip(".")
    if "surrogates not allowed" in reason:  # what Ansible makes of bytes that are no UTF-8
        reason, fix = "it is not UTF-8", "Save it as UTF-8, as with: iconv -f latin1 -t utf8"
    elif "tag requires" in reason:
        fix = "Write !vault | and below it what ansible-vault encrypt_string printed"
    elif "vault" in str(error).lower() or "decrypt" in reason.lower():
        fix = VAULT_FIX
    else:
        fix = "Fix it: the rest is looked at without what stands there"
    return Problem(f"can't be read: {reason}. {fix}", file=file, line=line)


def _variables_of_files(source: str, loader: Any) -> dict[str, HostVariables]:
    """Where no host could be read, the variables of each file as if they were one host's."""
    files = [
        path
        for directory in directories([source])
        for kind in ("group_vars", "host_vars")
        for path in variable_files(directory / kind)
        if path.is_file()
    ]
    contents = {str(path): loader.load_from_file(str(path)) for path in files}
    return {
        file: HostVariables(file, content, loader) for file, content in contents.items() if isinstance(content, Mapping)
    }


@cache
def _load_ansible_plugins() -> None:
    from ansible.plugins.loader import filter_loader, init_plugin_loader

    init_plugin_loader()
    # Beside the playbooks, where Ansible itself finds them without a setting.
    filter_loader.add_directory(str(KIT / "ansible" / "filter_plugins"))


def find_source(given: str | None, environment: Mapping[str, str], default: Sequence[str]) -> str:
    """Return the inventory's path; raises OperatorMistake where there is none."""
    if given is not None and not given.strip():
        raise OperatorMistake("--inventory is empty; expected the path of an inventory, such as inventory/lab")
    if given:
        name, origin = given, "--inventory"
    elif environment.get("PSFLEET_INVENTORY"):
        name, origin = environment["PSFLEET_INVENTORY"], "PSFLEET_INVENTORY"
    else:
        name = default[0]
        origin = "ANSIBLE_INVENTORY" if environment.get("ANSIBLE_INVENTORY") else "the default in ansible.cfg"
    try:
        control_path(name)
    except ValueError as error:
        raise OperatorMistake(
            f"{origin} is {show(name)}: {error}; expected the path of an inventory, such as inventory/lab"
        ) from error
    for base in (Path.cwd(), site()):
        path = control_file(base, name)
        if path.is_file() or path.is_dir():
            return str(path)
        if path.exists():
            raise OperatorMistake(f"{origin}: {path} is no regular file; expected the path of an inventory")
    known = ", ".join(_inventories()) or "none in inventory/"
    raise OperatorMistake(f"{origin}: there is no inventory {show(name)}. {site()} has: {known}")


def _inventories() -> list[str]:
    """List the inventories of the site's folder: one in `inventory/`, or several in directories below."""
    directory = site() / "inventory"
    if (directory / "group_vars").is_dir() or any(directory.glob("*.yml")):
        return ["inventory"]
    return sorted(f"inventory/{path.name}" for path in directory.glob("*") if path.is_dir())


def plain_value(value: Any) -> Any:
    """Strip Ansible's tags, which paramiko, json and `is` comparisons don't expect."""
    if isinstance(value, bool) or value is None:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return value

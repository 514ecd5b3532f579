"""The hosts, their tasks and how SSH reaches them, read from the inventory that Ansible reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fleet.errors import OperatorMistake, first_line
from fleet.places import KIT, site, site_file
from fleet.site.schema.check import loose_problems
from fleet.site.schema.formats import ROUTE_OPTIONS, control_file, control_path, ssh_options
from fleet.site.schema.problems import Problem, show, tell
from fleet.site.schema.reading import VAULT_MEND, plain
from fleet.site.schema.shapes import shape_problems
from fleet.site.schema.sources import (
    beside_problems,
    directories,
    empty_problems,
    file_problems,
    range_problems,
    special_file_problems,
    variable_files,
)
from fleet.site.schema.texts import text_problems
from fleet.site.topology import ClusterSpecError, cluster_spec, storage_of
from fleet.vault import open_vaults
from trainer.core.config import Config

_YAML = (".yml", ".yaml", ".json")
# What Ansible says of a file before its name.
_UNPARSED = "Completely failed to parse inventory source "
_FOR_A_PLUGIN = "Plugin configuration YAML file"


@dataclass(frozen=True)
class Task:
    """One task of the cluster: a systemd unit on a host."""

    job: str
    index: int
    host: str
    address: str
    port: int | None
    server: bool  # it waits for the coordinator's orders; the others train or evaluate, and end with the run

    @property
    def trains(self) -> bool:
        """Whether it runs the training program: the coordinator, and without parameter servers each worker."""
        return not self.server and self.job != "evaluator"

    @property
    def name(self) -> str:
        return f"{self.job}-{self.index}"

    @property
    def unit(self) -> str:
        return f"trainer@{self.name}.service"


@dataclass(frozen=True)
class Host:
    """How SSH reaches one host. What is None is left to ~/.ssh/config and to SSH's own defaults."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    key_file: Path | None = None
    ssh_options: Mapping[str, str] = field(default_factory=dict)  # names in lower case, as in ~/.ssh/config


@dataclass(frozen=True)
class Defaults:
    """What Ansible's settings say of each host that says nothing else."""

    check_host_keys: bool
    key_file: str | None
    user: str | None


@dataclass(frozen=True)
class Inventory:
    source: str
    groups: Mapping[str, Sequence[str]]
    hosts: Mapping[str, Host]  # those that have a task
    tasks: Sequence[Task]
    variables: Mapping[str, Mapping[str, Any]]
    tensorboard_url: str | None = None
    vault_password: str | None = field(default=None, repr=False)  # as it was typed

    @property
    def chief(self) -> Task:
        return next(task for task in self.tasks if task.job == "chief")

    @property
    def evaluator(self) -> Task | None:
        return next((task for task in self.tasks if task.job == "evaluator"), None)

    @property
    def shared_dir(self) -> str:
        """Where the chief's host has the runs: the path that all hosts share, or its own directory."""
        shared = storage_of(self.variables[self.chief.host])["path"]
        if not isinstance(shared, str) or not shared.startswith("/"):
            raise OperatorMistake(
                f"cluster_shared_dir is {shared!r} in {self.source}; expected the absolute path that every host "
                "shares. Set it in group_vars/all.yml beside the inventory, such as cluster_shared_dir: /srv/trainer"
            )
        return shared

    @property
    def is_shared(self) -> bool:
        """Whether the hosts share a path at all."""
        return bool(storage_of(self.variables[self.chief.host])["shared"])

    @property
    def steps(self) -> int:
        """How many steps the run settings want."""
        steps: int = self.run_settings.get("steps", Config.steps)
        return steps

    @property
    def run_name(self) -> str:
        """The run that the run settings name, which counts until an operator chooses one."""
        name: str = self.run_settings.get("run", Config.run)
        return name

    @property
    def run_settings(self) -> Mapping[str, Any]:
        """The inventory's trainer_run."""
        settings = self.variables[self.chief.host].get("trainer_run")
        return settings if isinstance(settings, Mapping) else {}

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The cluster, as the filter of this name derives it for Ansible."""
        return cluster_spec(self.groups, self.variables)

    def tasks_on(self, host: str) -> list[Task]:
        return [task for task in self.tasks if task.host == host]

    def task(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        raise OperatorMistake(
            f"{self.source} has no task {name!r}. It has: {', '.join(task.name for task in self.tasks)}"
        )


class HostVariables(Mapping[str, Any]):
    """One host's variables, each rendered when it is read: one that only a playbook can render harms nobody else."""

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


def load_inventory(
    given: str | None = None,
    environment: Mapping[str, str] = os.environ,
    check: bool = False,
    ask_vault_pass: bool = False,
) -> Inventory:
    """Read an inventory: the one given, else PSFLEET_INVENTORY's, else ansible.cfg's.

    Raises OperatorMistake when the path is missing or the groups describe no cluster; with `check`, with everything
    that `fab validate` finds wrong. `ask_vault_pass` has the operator type the vault's password.
    """
    source = read_source(given, environment, check, ask_vault_pass)
    if check and (problems := find_problems(source)):
        raise OperatorMistake(tell([_with_source(source.name, problem) for problem in problems]))
    return describe(source)


def read_source(
    given: str | None = None,
    environment: Mapping[str, str] = os.environ,
    lenient: bool = False,
    ask_vault_pass: bool = False,
) -> Source:
    """Read groups and variables. With `lenient` what can't be read is a problem among others, and the rest is read.

    Raises OperatorMistake when the path is missing, and without `lenient` for a file that can't be read.
    """
    os.environ.setdefault("ANSIBLE_CONFIG", str(site() / "ansible.cfg"))
    # Ansible reads its settings when it is imported, and half a second is too much for `fab --list`.
    import ansible.constants as settings
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager, display
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.manager import VariableManager

    # A source that Ansible can't parse is an error here, not a warning followed by an empty inventory.
    settings.INVENTORY_ANY_UNPARSED_IS_FAILED = True
    source = find_source(given, environment, settings.DEFAULT_HOST_LIST)
    beside = beside_problems([source], site()) if lenient else ()  # a running cluster can be stopped all the same
    if absurd := [*special_file_problems([source]), *empty_problems(source), *range_problems(source), *beside]:
        if lenient:
            return Source(source, {"all": []}, {}, absurd)
        raise OperatorMistake(tell(absurd))
    _load_ansible_plugins()
    broken: list[Problem] = []
    unparsed: list[Problem] = []

    class Loader(DataLoader):
        """Take a file that can't be read for an empty one, and remember why."""

        def load_from_file(self, file_name: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().load_from_file(file_name, *args, **kwargs)
            except Exception as error:  # what a broken file makes YAML's reader or Ansible's vault raise
                problem = _unreadable(str(file_name), error)
                if problem not in broken:
                    broken.append(problem)
                return {}

    loader = Loader() if lenient else DataLoader()
    loader.set_basedir(str(site()))
    password = open_vaults(loader, ask_vault_pass)
    if shapes := list(shape_problems([source])):
        if lenient:
            return Source(source, {"all": []}, _variables_of_files(source, loader), [*shapes, *broken], password)
        raise OperatorMistake(tell(shapes))
    # Why it can't parse a file, Ansible tells in its warnings alone, at length and once for each plugin that tried.
    reasons: dict[str, str] = {}
    display.error_as_warning = lambda msg, exception, **more: reasons.update(
        {str(msg).split("'")[1]: first_line(exception).rstrip(".")}
    )
    try:
        try:
            manager = InventoryManager(loader=loader, sources=[source])
        except AnsibleError as error:
            if not lenient:
                raise
            if not any(Path(str(each.file)).suffix in _YAML for each in broken):
                file = str(error).partition(_UNPARSED)[2].strip() or source
                if broken:
                    reasons["yaml"] = str(broken[0])
                mend = "Mend it; what is no inventory belongs elsewhere"
                unparsed.append(Problem(f"can't be read: {_reason(file, reasons, error)}. {mend}", file=file))
            settings.INVENTORY_ANY_UNPARSED_IS_FAILED = False
            manager = InventoryManager(loader=loader, sources=[source])
        # What is no YAML may be an INI file, as whoever read it found.
        broken[:] = [*unparsed, *(each for each in broken if Path(str(each.file)).suffix in _YAML)]
        variable_manager = VariableManager(loader=loader, inventory=manager)
        variables = {
            str(host.name): HostVariables(
                str(host.name), variable_manager.get_vars(host=host, include_hostvars=False), loader
            )
            for host in manager.hosts.values()  # get_hosts() takes a host that is called all for the pattern
        }
    except AnsibleError as error:
        said = str(error) if not reasons else f"{first_line(error)}: {_reason(source, reasons, error)}"
        raise OperatorMistake(f"{source} can't be read: {said}") from error
    finally:
        del display.error_as_warning
    groups = {group: [str(host) for host in hosts] for group, hosts in manager.get_groups_dict().items()}
    if lenient and not variables:
        variables = _variables_of_files(source, loader)
    return Source(source, groups, variables, broken, password)


def find_problems(source: Source) -> list[Problem]:
    """List everything that `ansible/preflight.yml` would find wrong, and what keeps Ansible from reading."""
    from ansible.release import __version__

    from fleet.site.preflight import control_problems, inventory_problems

    tagged = {host: getattr(variables, "tagged", variables) for host, variables in source.variables.items()}
    found = [*source.problems, *map(Problem, control_problems(__version__))]
    if not source.groups.get("all"):
        if not source.problems:
            return [*found, *inventory_problems({}, {})]
        return [*found, *text_problems([source.name]), *loose_problems(tagged)]
    found += [
        *text_problems([source.name]),
        *file_problems([source.name], [str(group) for group in source.groups], source.variables),
        *inventory_problems(source.groups, tagged, site()),
    ]
    if any("all" in (path.stem, path.parent.name) for path in (Path(str(each.file)) for each in source.problems)):
        found = [each for each in found if not each.message.startswith(f"{each.variable} is missing")]  # it is there
    return found


def refuse_problems(inventory: Inventory) -> None:
    """Raise OperatorMistake with everything that `ansible/preflight.yml` would find wrong with the inventory."""
    load_inventory(inventory.source, check=True)


def list_notes(inventory: Inventory) -> list[str]:
    """List what `ansible/preflight.yml` says about a right inventory: which groups stand idle, and the like."""
    from fleet.site.preflight import preflight_notes

    return preflight_notes(inventory.groups, inventory.variables)


def describe(source: Source) -> Inventory:
    """Make tasks and hosts of what was read; raises OperatorMistake where the groups describe no cluster."""
    groups = {str(group): list(hosts) for group, hosts in source.groups.items()}
    variables = source.variables
    try:
        spec = cluster_spec(groups, variables)
    except ClusterSpecError as error:
        raise OperatorMistake(f"{source.name}: {error}") from error
    tasks = [
        Task(task["job"], task["index"], task["host"], task["address"], task["port"], task["server"])
        for task in spec["tasks"]
    ]
    # Every verb asks the chief's host for the run. What else a cluster needs is for preflight to say, before a start.
    if not any(task.job == "chief" for task in tasks):
        raise OperatorMistake(
            f"group 'chief' has no task in {source.name}; expected one host, which fab asks for the run. "
            "Put it under `chief:` there and run `ansible-playbook site.yml`"
        )
    boards = [f"http://{board['address']}:{board['port']}" for board in spec["tensorboard"].values()]
    hosts = {
        name: ssh_host(name, variables[name], source.defaults) for name in dict.fromkeys(task.host for task in tasks)
    }
    board = boards[0] if boards else None
    return Inventory(source.name, groups, hosts, tasks, variables, board, source.vault_password)


def _with_source(source: str, problem: Problem) -> str:
    return str(problem) if problem.file else f"{source}: {problem}"


def _reason(file: str, reasons: Mapping[str, str], error: Exception) -> str:
    """What the plugins said that a file may be for: YAML's where it has its name, else also the one for INI files."""
    likely = ("yaml",) if Path(file).suffix in _YAML else ("ini", "yaml")
    if "script" in reasons and os.access(file, os.X_OK):
        likely = ("script",)
    elif reasons.get("yaml", "").startswith(_FOR_A_PLUGIN):
        likely = ("auto",)  # which asks the plugin that the file names
    return "; ".join(f"{reasons[each]} (as {each})" for each in likely if each in reasons) or first_line(error)


def _unreadable(file: str, error: Exception) -> Problem:
    """Say which file can't be read, and at which line."""
    place = getattr(getattr(error, "_orig_exc", None) or error.__cause__, "problem_mark", None)
    line = place.line + 1 if place is not None else None
    if line is None and (found := re.search(r":(\d+):\d+\b", str(error))):
        line = int(found[1])
    said = first_line(error).rstrip(".")
    if "surrogates not allowed" in said:  # what Ansible makes of bytes that are no UTF-8
        said, mend = "it is not UTF-8", "Save it as UTF-8, as with: iconv -f latin1 -t utf8"
    elif "tag requires" in said:
        mend = "Write !vault | and below it what ansible-vault encrypt_string printed"
    elif "vault" in str(error).lower() or "decrypt" in said.lower():
        mend = VAULT_MEND
    else:
        mend = "Mend it: the rest is looked at without what stands there"
    return Problem(f"can't be read: {said}. {mend}", file=file, line=line)


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
        name, origin = default[0], "the default in ansible.cfg"
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


def read_defaults() -> Defaults:
    """Return what Ansible's settings say."""
    import ansible.constants as settings

    return Defaults(bool(settings.HOST_KEY_CHECKING), settings.DEFAULT_PRIVATE_KEY_FILE, settings.DEFAULT_REMOTE_USER)


def ssh_host(name: str, variables: Mapping[str, Any], defaults: Defaults | None = None) -> Host:
    """Say how Ansible reaches a host with these variables; raises OperatorMistake where `fab` can't."""
    defaults = defaults or read_defaults()
    verify_host_keys = defaults.check_host_keys
    connection = variables.get("ansible_connection", "ssh")
    if connection != "ssh":
        raise OperatorMistake(
            f"host '{name}' has ansible_connection: {connection}; expected ssh, which is how fab reaches every host. "
            "Leave the line out and let the control machine reach it by SSH"
        )
    options = _ssh_options(name, variables)
    for switch in ("ansible_ssh_host_key_checking", "ansible_host_key_checking"):
        verify_host_keys = variables.get(switch, verify_host_keys) not in (False, "false", "False", "no", "0", 0)
    if not verify_host_keys:
        options.setdefault("stricthostkeychecking", "no")
    port = variables.get("ansible_port")
    if port and not re.fullmatch("[0-9]{1,5}", str(port)):
        raise OperatorMistake(
            f"host '{name}' has ansible_port: {port!r}; expected a number from 1 to 65535, such as 22"
        )
    key = (
        variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file") or defaults.key_file
    )
    return Host(
        name=name,
        address=variables.get("ansible_host") or name,
        user=variables.get("ansible_user") or defaults.user,
        port=int(port) if port else None,
        key_file=_key_file(name, key) if key else None,
        ssh_options=options,
    )


def _key_file(host: str, value: str) -> Path:
    path = site_file(value)
    if not path.is_file():
        raise OperatorMistake(
            f"host '{host}' has ansible_ssh_private_key_file: {value}, or ansible.cfg has private_key_file, and "
            f"there is no file {path}. Name the key that opens the host, or make the lab, which has its own: make lab"
        )
    return path


def _ssh_options(host: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Read OpenSSH's `-o Name=value` from Ansible's variables."""
    options: dict[str, str] = {}
    for key in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        given = variables.get(key) or ""
        try:
            said = ssh_options(given)
        except (AttributeError, ValueError) as error:
            raise OperatorMistake(
                f"host '{host}' has {key}: {show(given)}; expected options of ssh in one text ({error})"
            ) from error
        for name in said:
            if name in ROUTE_OPTIONS:
                _refuse_route(host, key, f"{name} {said[name]}".strip())
        options = said | options
    return options


def _refuse_route(host: str, key: str, option: str) -> None:
    raise OperatorMistake(
        f"host '{host}' has {option!r} in {key}; expected no option there that changes the way to the host. "
        "Put it into ~/.ssh/config (ProxyJump, HostName, IdentityFile, ...), which Ansible and fab both follow"
    )


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

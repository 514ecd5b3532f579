"""The command `psfleet`: the verbs of fabfile.py, and `init`, `lock` and `playbook`."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

if sys.version_info < (3, 11):
    sys.exit(f"psfleet needs Python 3.11 or newer, not {sys.version.split()[0]}: pipx install --python python3.11 ...")

from fabric import Config, Executor, task
from fabric.main import Fab
from invoke import Collection, Context, Exit
from invoke.exceptions import ParseError

from fleet.command_line import ending
from fleet.errors import FleetError, OperatorMistake
from fleet.host_locks import write_locks
from fleet.init import make_site
from fleet.output.tables import give_up, lost, put
from fleet.output.terminal import printable, typing_psfleet
from fleet.places import KIT, site
from fleet.rollout.release import find_ansible, utf8_locale
from fleet.site.schema.formats import control_path
from fleet.site.schema.problems import show
from trainer.cluster.spec import JOBS
from trainer.core.settings.config import DECLARED

# Invoke's messages.
_UNKNOWN = re.compile(r"No idea what '(.*)' is!", re.DOTALL)
# What others call a verb, and a flag. By its letters alone, kill would be drill.
_SYNONYMS = {
    "help": "--help",
    "version": "--version",
    "reboot": "update-hosts --reboot only",
    "cordon": "drain",
    "uncordon": "undrain",
    "local": "`python -m trainer local`",
    "plan": "start-cluster --plan",
    "list": "runs",
    "delete": "delete-run, or remove-host",
    "ssh": "`ssh HOST`",
    **dict.fromkeys(("train", "run", "up", "resume", "launch", "submit"), "start-cluster"),
    **dict.fromkeys(("kill", "down", "pause", "cancel", "abort", "exit", "quit"), "stop-cluster"),
    **dict.fromkeys(("ps", "top", "info", "ls"), "status"),
    **dict.fromkeys(("check", "test", "ping", "debug"), "doctor"),
    **dict.fromkeys(("deploy", "install", "setup", "provision", "apply", "site", "site.yml"), "playbook site.yml"),
    **dict.fromkeys(("add-host", "add-hosts", "add-worker", "scale"), "a line of hosts.yml, and playbook site.yml"),
    **dict.fromkeys(("reset", "reset.yml", "uninstall", "destroy"), "playbook reset.yml"),
}
_FLAGS = {
    **dict.fromkeys(("--dry-run", "--check", "--diff"), "--plan"),
    **dict.fromkeys(("--force", "-y"), "--yes"),
    "--name": "--run",
}
# Run settings that verbs have flags for: one that a verb lacks is not meant for the inventory.
CHOSEN_BY_FLAGS = ("run", "program")
_TASK = re.compile(rf"({'|'.join(JOBS)})-\d+")
_LACKS = re.compile(r"'(.*)' did not receive required positional arguments: '(.*)'")
_NO_VALUE = re.compile(r"Flag <Argument: (\S+?)(?: \(.*\))?> needed value")


class Psfleet(Fab):
    """Fabric's own command line, where a mistake ends with 2, as every mistake of an operator does."""

    def print_help(self) -> None:
        """Show the verbs before the options that Fabric has for each of them."""
        print(f"Usage: {self.binary} VERB [--flags]\n")
        print("A new cluster: init, validate, playbook site.yml, start-cluster, stop-cluster.\n")
        self.list_tasks()
        print("Fabric's own options, before the verb:\n")
        self.print_columns(self.initial_context.help_tuples())
        print(f"`{self.binary} VERB --help` has a verb's flags, `{self.binary} --list` the verbs alone.")
        print(f"Pages that messages name, as docs/operations.md: {KIT / 'docs'}\n")

    def print_task_help(self, name: str) -> None:
        """Show a verb's flags, without Invoke's words on chains of tasks."""
        print(f"Usage: {self._usage(name)}\n\n{inspect.getdoc(self.collection[name])}\n\nFlags:")
        self.print_columns(self.parser.contexts[name].help_tuples())

    def _usage(self, verb: str) -> str:
        taken = inspect.signature(self.collection[verb].body).parameters.values()
        first = {each.name for each in self.parser.contexts[verb].positional_args}  # none where --help was typed
        needed = [each.name for each in taken if each.name in first or each.default is each.empty]
        words = [name.upper() for name in needed if name != "context"]
        hosts = ["[HOST...]"] if verb == "init" else []
        return " ".join([str(self.binary), verb, *words, *hosts, "[--flags]"])

    def task_list_opener(self, extra: str = "") -> str:
        return "Verbs"

    def print_columns(self, tuples: Sequence[tuple[str, str | None]]) -> None:
        try:
            super().print_columns(tuples)
        except ValueError:  # the window is narrower than a flag
            print("".join(f"  {name}\n    {text or ''}\n" for name, text in tuples))

    def execute(self) -> None:
        with typing_psfleet(self.namespace.task_names):
            try:
                super().execute()
            except Exit as left:
                raise Exit(left.message and printable(left.message), left.code) from left

    def parse_core(self, argv: list[str] | None) -> None:
        before = sys.dont_write_bytecode
        try:
            with self._explained():
                super().parse_core(argv)
        except ValueError as error:  # of int(), for a flag of Fabric's own
            raise Exit(
                f"{str(error).rpartition(': ')[2]} is no number; expected a whole one, as in -t 10", 2
            ) from error
        finally:
            sys.dont_write_bytecode = before  # Invoke forbids it, and each call would compile psfleet again

    def update_config(self) -> None:
        with self._readable():
            super().update_config()

    def create_config(self) -> None:
        with self._readable():
            super().create_config()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of Python, YAML or JSON: what an own file has may be wrong in any way
            text = " ".join(str(error).split())[:300]
            raise Exit(f"a file of Fabric's settings or of ssh's can't be read: {text}", 2) from error

    def list_tasks(self) -> None:
        if self.list_format not in (formats := ("flat", "nested", "json")):
            raise Exit(f"-F is {self.list_format!r}; expected one of {', '.join(formats)}", 2)
        super().list_tasks()

    def parse_tasks(self) -> None:
        with self._explained():
            super().parse_tasks()

    def parse_cleanup(self) -> None:
        if isinstance(word := self.args.list.value, str):
            raise Exit(f"--list is for all verbs, and takes no {word!r}. `psfleet VERB --help` lists a verb's flags", 2)
        with self._explained():
            super().parse_cleanup()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ParseError as error:
            raise self._mistake(error) from error

    def _mistake(self, error: ParseError) -> Exit:
        context = error.context
        if no_value := _NO_VALUE.match(str(error)):
            dashes = "-" if len(no_value[1]) == 1 else "--"
            return Exit(f"{dashes}{no_value[1]} has no value; expected one after it", 2)
        if lacks := _LACKS.fullmatch(str(error)):
            what = lacks[2].replace("', '", " and ")
            expected = f"expected {self._usage(lacks[1])}, as `psfleet {lacks[1]} --help` explains"
            return Exit(f"psfleet {lacks[1]} lacks its {what}; {expected}", 2)
        unknown = _UNKNOWN.fullmatch(str(error))
        if unknown is None:
            return Exit(f"{str(error).rstrip('.')}. `psfleet VERB --help` lists a verb's arguments", 2)
        word = unknown[1]
        flag = word.startswith("-")
        known = list(context.flags) if flag and context else list(self.namespace.task_names)
        setting = word.lstrip("-").partition("=")[0].replace("-", "_")
        if flag and setting in DECLARED and setting not in CHOSEN_BY_FLAGS:
            where = "write it in trainer_run of the inventory (group_vars/all.yml)"
            return Exit(f"{setting} is a run setting, and no flag here: {where}", 2)
        name = word.partition("=")[0]
        if flag and context and not context.name and self._is_of_a_verb(name):
            return Exit(f"{name} is a flag of verbs; expected it after one: psfleet VERB {word}", 2)
        close = [each for each in known if each.startswith(f"{name}-")] or difflib.get_close_matches(name, known, n=1)
        meant = _FLAGS.get(name) if flag else _SYNONYMS.get(word)
        if meant and (meant in known or not flag):
            close = [meant]
        after = context.name if context and context.name else ""
        given_as = "--task" if _TASK.fullmatch(word) else "--run"
        if context and after and not flag and not close and given_as in context.flags:
            named = context.args[given_as.lstrip("-")].value
            fix = f"Did you mean {given_as} {shlex.quote(word)}?"
            fix = f"{given_as} is {named!r}; expected one name" if named else fix
            return Exit(f"psfleet {after} takes no word {word!r} here. {fix}", 2)
        if not flag and after and not close:
            where = f"`psfleet {after} --help` lists what it takes"
            return Exit(f"psfleet {after} takes no word {word!r} here, and no verb has this name. {where}", 2)
        verb = f"{after} " if flag and after else ""
        kind = "flag" if flag else "verb"
        fix = f"Did you mean {close[0]}?" if close else f"`psfleet {verb}--help` lists them"
        return Exit(f"psfleet {verb}has no {kind} {word!r}. {fix}", 2)

    def _is_of_a_verb(self, flag: str) -> bool:
        arguments = (each for verb in self.namespace.tasks.values() for each in verb.get_arguments())
        return any(flag == f"--{name}" for each in arguments for name in each.names)


@task(
    auto_shortflags=False,
    positional=["directory"],
    iterable=["host"],
    help={
        "directory": "the folder to make; files that it has stay as they are",
        "example": "begin with an inventory of psfleet's own instead of hosts, such as cloud-aws",
        "host": "NAME or NAME=ADDRESS, the coordinator's first; --host may be left out: psfleet init DIR HOST...",
    },
)
def init(context: Context, directory: str, host: list[str] | None = None, example: str = "") -> None:
    """Make a site's folder with an inventory and a program: psfleet init ~/mine alpha=192.0.2.11 beta=192.0.2.12."""
    if directory.startswith("-"):
        raise Exit(f"psfleet init has no flag {directory!r}. `psfleet init --help` lists them", 2)
    try:
        if not directory:
            raise ValueError("it is empty; expected a name, as in psfleet init ~/mine alpha=192.0.2.11")
        folder = Path(control_path(directory)).expanduser()
    except (ValueError, RuntimeError) as error:  # the second is of a home that can't be found
        raise Exit(f"{show(directory)} can't be a folder: {error}", 2) from error
    with ending():
        make_site(folder, host or [], _say, example)


@task(auto_shortflags=False, positional=["name"], help={"name": "path of the list without .in, such as locks/mine"})
def lock(context: Context, name: str) -> None:
    """Lock the hosts' Python packages: locks/mine.in becomes locks/mine-<python>.txt, mine-cuda- and mine-no-gpu-."""
    with ending():
        write_locks(name, _say)


@task(auto_shortflags=False)
def playbook(context: Context) -> None:
    """Run psfleet's own ansible-playbook in the site's folder: psfleet playbook site.yml --check."""
    raise Exit("name a playbook, as in psfleet playbook site.yml", 2)


def run_playbook(arguments: Sequence[str]) -> None:
    """Become ansible-playbook, whose flags Invoke doesn't know; raises FleetError outside of a site's folder."""
    command = find_ansible()
    os.chdir(site())
    os.environ.update(utf8_locale())
    os.execv(command, [command, *arguments])


def as_invoke_reads(argv: Sequence[str]) -> list[str]:
    """Return the command line with each host of `init` as a flag, and a verb's --help before the verb.

    Invoke takes no argument several times, and --help after a verb for the verb's first argument.
    """
    if argv[1:] and {"-h", "--help"} & {*argv[2:]}:
        return [argv[0], "--help", argv[1]]
    if argv[1:2] != ["init"]:
        return [*argv]
    command, words = [*argv[:3]], [*argv[3:]]
    while words:
        word = words.pop(0)
        if word in ("--host", "--hosts", "-H", "--example"):  # Fabric's own flag names hosts too
            command += [word if word == "--example" else "--host", *words[:1]]
            del words[:1]
        else:
            command += [word] if word.startswith("-") else ["--host", word]
    return command


def main() -> None:
    """Run the command line; ends with the verb's exit code."""
    for name in ("stdout", "stderr"):  # one that is shut, as with >&-, is None
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.exit(_report(OperatorMistake("the working directory was removed; expected one that exists: cd ~")))
    if sys.argv[1:2] == ["playbook"] and len(sys.argv) > 2:
        try:
            run_playbook(sys.argv[2:])
        except FleetError as error:
            sys.exit(_report(error))
    for verb in (init, lock, playbook):
        namespace.add_task(verb)
    program = Psfleet(
        version=_version(), name="psfleet", binary="psfleet", namespace=namespace, executor_class=Executor,
        config_class=Config,
    )  # fmt: skip
    try:
        try:
            program.run(as_invoke_reads(sys.argv))
        finally:
            sys.stdout.flush()
    except OSError as error:  # of `psfleet --help | head`; verbs print by themselves
        give_up(sys.stdout, error)
        sys.exit(1 if lost else 0)


def _say(text: str) -> None:
    put(sys.stdout, text)


def _report(error: FleetError) -> int:
    print(error, file=sys.stderr)
    return error.code


def _version() -> str:
    try:
        return importlib.metadata.version("psfleet")
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout"


def _fabfile() -> ModuleType:
    """Load psfleet's fabfile.py by its place: a site has one too."""
    spec = importlib.util.spec_from_file_location("psfleet_verbs", KIT / "fabfile.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


namespace = Collection.from_module(_fabfile())
"""The verbs, for the fabfile.py of a site."""

if __name__ == "__main__":
    main()

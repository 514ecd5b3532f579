"""What the deployment takes from the control machine: the program, the locks and the keys, looked at before any host.

The program is read, never imported: its libraries may be missing here. So a name that only running would make (by
`setattr`, `__getattr__` or `from x import *`) counts as being there; the proof on the hosts has the last word.
"""

from __future__ import annotations

import ast
import difflib
import functools
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.files import control_file
from fleet.places import CODE, role_module
from fleet.site.schema.checks import our_hosts, reference_host
from fleet.site.schema.inventory_reading import InventoryReading
from fleet.site.schema.lock_files import LOCKS, lock_of, lock_problems
from fleet.site.schema.problems import Problem, name_hosts, show
from trainer.core.program import REQUIRED, required_methods
from trainer.core.settings.formats import PROGRAM_NAME

_KEY_SECONDS = 10


def control_file_problems(reading: InventoryReading, root: Path) -> Iterator[Problem]:
    """Refuse files that are missing or not what they must be; `root` is the project's, which paths start from."""
    chief = reference_host(reading.groups)
    if chief is None:
        return
    site = reading.values[chief]
    locks: set[str] = set()
    gpu = bool(reading.groups.get("gpu"))
    for variable in LOCKS if gpu else LOCKS[:1]:
        for text in lock_problems(lock_of(site, variable), root, gpu, locks):
            yield reading.problem(text, [chief], variable)
    yield from _signing_problems(site, root, chief, reading)
    yield from _cache_problems(site, root, chief, reading)
    run = site.get("trainer_run")
    name = run.get("program") if isinstance(run, dict) else None
    # Where the one or the other was refused already, nothing more can be said.
    known = "release_program" in site or "release_program" not in reading.places[chief]
    if known and isinstance(name, str) and PROGRAM_NAME.fullmatch(name):
        parameters = run.get("program_args") if isinstance(run, dict) else None
        names = [str(each) for each in parameters] if isinstance(parameters, Mapping) else []
        given = str(site.get("release_program", ""))
        for variable, text in _program_problems(name, names, given, root, locks, _evaluates(site)):
            place = reading.place(chief, variable) if variable == "release_program" else reading.parts.get("program")
            message = f"trainer_run: {text}" if variable == "trainer_run" else text
            yield Problem(message, (chief,), variable, show(name), *(place or (None, None)))
    yield from _ssh_problems(reading)
    keys: dict[str, list[str]] = {}
    for host in our_hosts(reading.groups):
        values = reading.values[host]
        if key := values.get("ansible_ssh_private_key_file") or values.get("ansible_private_key_file"):
            keys.setdefault(key, []).append(host)
    for key, hosts in keys.items():
        if (problem := key_problem(control_file(root, key))) is not None:
            variable = "ansible_ssh_private_key_file"
            message = f"{name_hosts(hosts)}: {variable} is {show(key)}, and {problem}"
            yield reading.problem(message, hosts, variable, show(key))


def _ssh_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Ask ssh itself about its options; it makes no connection, and reads no other file (`-F none`)."""
    given: dict[tuple[str, str], list[str]] = {}
    for host in our_hosts(reading.groups):
        for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
            if text := reading.values[host].get(name):
                given.setdefault((name, text), []).append(host)
    for (name, text), hosts in given.items():
        ended = _run(["ssh", "-F", "none", "-G", *shlex.split(text), "192.0.2.1"])
        if ended is not None and ended.returncode:
            reason = (ended.stderr.strip().splitlines() or ["it gives no reason"])[0][:200]
            message = (
                f"{name_hosts(hosts)}: {name} is {show(text)}, and ssh refuses it: {reason}; expected options of "
                "ssh_config(5), such as -o StrictHostKeyChecking=accept-new"
            )
            yield reading.problem(message, hosts, name, show(text))


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command of OpenSSH's; None where there is none here, which is said by itself."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_KEY_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def program_problem(site: Mapping[str, Any], name: str, arguments: Sequence[str], root: Path, gpu: bool) -> str | None:
    """What is wrong with a program that a command names instead of the inventory's; None where nothing is known."""
    locked: set[str] = set()
    for _ in lock_problems(lock_of(site, "release_lock"), root, gpu, locked):
        return None  # the inventory's own problems are said by themselves
    given = str(site.get("release_program") or "")
    return next((text for _, text in _program_problems(name, arguments, given, root, locked, _evaluates(site))), None)


def _evaluates(site: Mapping[str, Any]) -> bool:
    run = site.get("trainer_run")
    return not isinstance(run, Mapping) or run.get("evaluation") != "none"


def _fix_of_a_missing_module(base: Path, close: Sequence[str]) -> str:
    """Say what to do about a module that no file has; `base` is its path without an ending, `close` what it may be."""
    if base.with_name(f"{base.name}.ipynb").is_file():
        return f"{base.name}.ipynb is a notebook: write its class into {base.name}.py"
    if close:
        return f"Did you mean {close[0]}?"
    return "Name the directory of your package in release_program, relative to the site's folder"


def _program_problems(
    name: str, arguments: Sequence[str], given: str, root: Path, locked: set[str], evaluates: bool
) -> Iterator[tuple[str, str]]:
    """What is wrong with the program and where it comes from: (variable, text)."""
    try:
        sources = _sources(control_file(root, given)) if given else {}
    except OSError as error:
        yield "release_program", f"release_program is {show(given)}, and {error}; expected files that you may read"
        return
    except ValueError as error:
        yield "release_program", str(error)
        return
    module, _, attribute = name.partition(":")
    top = module.partition(".")[0]
    files: Mapping[str, Path | bytes] = _kit() if top == "trainer" else sources
    base = module.replace(".", "/")
    file = next((each for each in (f"{base}.py", f"{base}/__init__.py") if each in files), None)
    where = "the kit" if top == "trainer" else f"release_program ({given})" if given else "the kit's examples"
    if file is None:
        if top not in {each.partition("/")[0].removesuffix(".py") for each in files} and top.lower() in locked:
            return  # installed with the lock: the hosts' proof looks into it
        modules = [each.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for each in files]
        close = difflib.get_close_matches(module, modules, n=1, cutoff=0.6)
        fix = _fix_of_a_missing_module(control_file(root, given) / base, close)
        if top == "trainer" and not module.startswith("trainer.examples"):
            fix = "A package trainer is psfleet's own: give yours another name"
        yield "trainer_run", f"program is {show(name)}, and {where} has no module {module}. {fix}"
        return
    source = files[file]
    try:
        tree = ast.parse(source.read_bytes() if isinstance(source, Path) else source)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        place = f"{file}:{line}" if (line := getattr(error, "lineno", None)) else file
        yield "trainer_run", f"program is {show(name)}, and {place} is no Python: {getattr(error, 'msg', error)}"
        return
    yield from (("trainer_run", text) for text in _object_problems(name, arguments, attribute, file, tree, evaluates))


@functools.cache
def _kit() -> dict[str, Path]:
    """The Python files of psfleet's own part of a release."""
    return {path.relative_to(CODE).as_posix(): path for path in (CODE / "trainer").rglob("*.py")}


def _sources(program: Path) -> dict[str, bytes]:
    """The Python files of the user's program: {path in the release: content}.

    Raises what the release's own reader does, so that nothing is refused only after other phases changed the hosts.
    """
    release_archive = role_module("release", "release_archive")  # only here: Ansible's part of it takes a while
    return {
        name: content for name, content in release_archive.read_program(str(program)).items() if name.endswith(".py")
    }


def _signing_problems(site: Mapping[str, Any], root: Path, chief: str, reading: InventoryReading) -> Iterator[Problem]:
    """Whether the key that signs releases exists, and is one whose releases the hosts take."""
    named, signers = site.get("release_key", ""), site.get("release_signers", [])
    if not named and not signers:
        return  # the control machine's own key, which site.yml gives to the hosts
    release_signature = role_module("release", "release_signature")
    key = control_file(root, named) if named else _cache_of(site, root) / "release-key"
    variable = "release_key" if named else "release_signers"
    try:
        if named or key.exists():
            release_signature.pick_signers(key, release_signature.read_public(key), signers)
            return
        message = (
            f"{variable} names others' keys, and this machine's own, {key}, is not made yet; expected a key of this "
            "machine among them. Name yours in release_key, or leave release_signers out"
        )
    except (release_signature.SigningError, OSError) as error:
        message = str(error)
    yield reading.problem(message, [chief], variable)


def _cache_of(site: Mapping[str, Any], root: Path) -> Path:
    return control_file(root, str(site.get("release_cache", ".cache")))


def _cache_problems(site: Mapping[str, Any], root: Path, chief: str, reading: InventoryReading) -> Iterator[Problem]:
    """Whether there is a directory for wheels and releases, or one can be made."""
    cache = _cache_of(site, root)
    there = next(each for each in (cache, *cache.parents) if each.exists())
    what = "is no directory" if not there.is_dir() else "" if os.access(there, os.W_OK | os.X_OK) else "is not yours"
    if what:
        message = f"release_cache is {show(str(site.get('release_cache', '.cache')))}, and {there} {what}"
        text = f"{message}; expected a directory of this machine that you may write to"
        yield reading.problem(text, [chief], "release_cache", show(str(cache)))


def _object_problems(
    name: str, arguments: Sequence[str], attribute: str, file: str, tree: ast.Module, evaluates: bool
) -> Iterator[str]:
    """Whether a module binds the object, and a class without bases has the methods and takes the arguments."""
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in attribute.split("."):
        bound = dict(_bindings(body))
        if part not in bound:
            if "*" in bound or "__getattr__" in bound:
                return
            close = difflib.get_close_matches(part, [each for each in bound if not each.startswith("_")], n=1)
            fix = f"Did you mean {close[0]}?" if close else "Name an object of it: package.module:Name"
            yield f"program is {show(name)}, and {file} has no {part}. {fix}"
            return
        found = bound[part]
        if (what := _no_object(found)) is not None:
            right = f"expected a class or an object with {', '.join(REQUIRED)}"
            yield f"program is {show(name)}, and {part} in {file}:{found.lineno} is {what}; {right}"
        if not isinstance(found, ast.ClassDef):
            return
        body = found.body
    if not isinstance(found, ast.ClassDef) or found.bases or found.keywords or found.decorator_list:
        return
    methods = dict(_bindings(found.body))
    for method in REQUIRED:
        made, given = methods.get(method), ("self",) if method == "build_model" else ("self", "context")
        if isinstance(made, ast.FunctionDef) and not made.decorator_list and not _takes(made, len(given)):
            right = f"{method}({', '.join(given)})"
            yield f"program is {show(name)}; expected {right} in {file}:{made.lineno}"
    missing = [each for each in required_methods(evaluates) if each not in methods]
    if missing and "__getattr__" not in methods:
        where = f"{file}:{found.lineno}"
        expected = f"expected {', '.join(REQUIRED)}, as docs/programs.md has them"
        yield f"program is {show(name)}, and its class in {where} has no {', '.join(missing)}; {expected}"
    taken = _parameters_of(methods)
    for argument in arguments if taken is not None else ():
        if argument not in (taken or []):
            takes = f"takes {', '.join(taken)}" if taken else "takes none"
            yield f"program_args has {show(argument)}, and the constructor of {name} {takes}"


def _parameters_of(methods: Mapping[str, ast.stmt]) -> list[str] | None:
    """The names that a class without bases can be built with; None where the source does not tell."""
    if "__new__" in methods:
        return None
    constructor = methods.get("__init__")
    if constructor is None:
        return []
    if not isinstance(constructor, ast.FunctionDef) or constructor.decorator_list or constructor.args.kwarg:
        return None
    own = 0 if constructor.args.posonlyargs else 1  # `self`
    return [each.arg for each in [*constructor.args.args[own:], *constructor.args.kwonlyargs]]


def _no_object(found: ast.stmt) -> str | None:
    """What a statement binds that has no methods of a program's; None where only running it would tell."""
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) and not found.decorator_list:
        return "a function"
    if isinstance(found, (ast.Assign, ast.AnnAssign)) and isinstance(
        found.value, (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set, ast.Lambda)
    ):
        return "a plain value"
    return None


def _takes(method: ast.FunctionDef, number: int) -> bool:
    """Whether a method can be called with so many arguments, self with them, none of them by name."""
    positional = len(method.args.posonlyargs) + len(method.args.args)
    least = positional - len(method.args.defaults)
    return least <= number and (number <= positional or method.args.vararg is not None)


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that statements bind, in the branches of `if`, `try` and `with` too."""
    for each in body:
        if isinstance(each, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield each.name, each
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            for alias in each.names:
                yield (alias.asname or alias.name.partition(".")[0]), each
        else:
            for node in ast.walk(each) if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else ():
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, each
            for inner in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(each, inner, []))
            for handler in getattr(each, "handlers", []):
                yield from _bindings(handler.body)


def key_problem(path: Path) -> str | None:
    """Why a private key opens nothing; None for one that does, or that asks for a passphrase, which an agent knows."""
    if not path.is_file():
        return f"there is no file {path}. Name the key that opens the host; a lab's is made by `make lab`"
    try:
        text = path.read_bytes()[:100]
        mode = path.stat().st_mode
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    if text.startswith((b"ssh-", b"ecdsa-")):
        return "that is a public key; name the file without .pub"
    if mode & 0o077:
        return f"others may read it (mode {mode & 0o777:04o}), so ssh refuses it: chmod 600 {path}"
    done = _run(["ssh-keygen", "-y", "-P", "", "-f", str(path)])
    if done is None or done.returncode == 0 or "passphrase" in done.stderr:
        return None
    return f"ssh-keygen can't open it: {(done.stderr.strip().splitlines() or ['it is no private key'])[-1][:200]}"

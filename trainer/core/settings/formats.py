"""How names, addresses and commands are written in the run settings, and what is wrong with others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SOURCE = re.compile(rf"(?P<run>{RUN_NAME.pattern})@(?P<step>\d{{1,15}})")
SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
NO_PROGRAM_NAME = "must look like package.module:Name, the object that builds the model and the datasets"
PROGRAM_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
NO_URL = (
    "the run directory lies in a file system, since its records are renamed into place and its lease is a file that "
    "one process creates. Give an absolute path; docs/storage.md has the choices"
)


def program_name_problem(name: str) -> str:
    """Say why a text can't name a program; nothing where it can."""
    module, colon, attribute = name.partition(":")
    if "/" in module or module.endswith(".py"):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        place, _, file = dotted.rpartition(".")
        name = attribute or "Name"
        alone = f"; where release_program is the folder {place}, as {file}:{name}" if place else ""
        return f"is a path: write the module with dots and without .py, as {dotted}:{name}{alone}"
    if PROGRAM_NAME.fullmatch(name):
        return ""
    parts = [*module.split("."), *attribute.split(".")] if colon and module and attribute else []
    wrong = next((part for part in parts if part and not re.fullmatch(r"[A-Za-z_]\w*", part)), None)
    if wrong is None:
        return NO_PROGRAM_NAME
    fix = re.sub(r"\W", "_", wrong)
    fix = f"_{fix}" if fix[0].isdigit() else fix
    what = f"the module {wrong} (its file or directory)" if wrong in module.split(".") else wrong
    return (
        f"has {wrong!r}, which Python can't import by name: names have letters, digits and _, and begin with no digit. "
        f"Rename {what} to {fix}"
    )


def url_problem(name: str, path: str) -> str | None:
    """Say why a directory, which the setting `name` names, can't be a URL; None where it is none."""
    return f"{name} is {path!r}: {NO_URL}" if URL.fullmatch(path) else None


def is_command(text: str) -> bool:
    """Return whether a text is a command with the absolute path of its program."""
    try:
        return Path(shlex.split(text)[0]).is_absolute() and "\0" not in text
    except (IndexError, ValueError):
        return False


def webhook_problem(url: str) -> str | None:
    """Say why a text is no address of a webhook that may stand in the settings; None where it is one."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_one = False
    if not is_one or re.search(r"[^\x21-\x7e]", url):
        return "it is no http:// or https:// address"
    return "it has a user or a password in it" if "@" in parts.netloc else None

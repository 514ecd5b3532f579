"""Texts for configuration files: values of an environment file as systemd reads it, and words of any other."""

from __future__ import annotations

import re

# What neither systemd nor a shell takes for anything but itself.
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@+=\[\]-]+")
_LIMIT = re.compile(r"[0-9]+[%MGT]?|infinity")
_SPECIAL = re.compile(r'["\\`$]')


def environment_value(value: object) -> str:
    """Write a value so that systemd's EnvironmentFile= gives exactly it to the process; raises ValueError for a NUL."""
    text = str(value)
    if "\0" in text:
        raise ValueError(f"an environment variable can't have a NUL: {text[:80]!r}")
    if _PLAIN.fullmatch(text):
        return text
    if "'" not in text:
        return f"'{text}'"
    escaped = _SPECIAL.sub(r"\\\g<0>", text)
    return f'"{escaped}"'


def config_word(value: object) -> str:
    """Return a value that is one word in a unit or a configuration file; raises ValueError for any other."""
    text = str(value)
    if not _PLAIN.fullmatch(text):
        raise ValueError(
            f"{text[:80]!r} would stand in a configuration file; expected letters, digits and _./:,@+=-[] alone. "
            "`fab validate` says where it comes from"
        )
    return text


def limit_word(value: object) -> str:
    """Return a limit of systemd's control groups, which may be a percentage; raises ValueError for anything else."""
    text = str(value)
    if not _LIMIT.fullmatch(text):
        raise ValueError(
            f"{text[:80]!r} is no limit; expected a number with %, M, G or T, or infinity (trainer_limits)"
        )
    return text

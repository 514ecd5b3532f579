"""Text from hosts and runs, as it may be printed: nothing in it steers the operator's terminal."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

# What honest programs write to a log: colours, and the backspaces of a progress bar.
_DECORATION = re.compile("\x1b\\[[0-9;:]*m|\x08+")
# Every control character but tab and line feed; the marks that turn the direction of text, which reorder what is read;
# and halves of characters, which no terminal's encoding can write.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Commands that messages name, and what is typed for them.
_TYPED: dict[re.Pattern[str], str] = {}


@contextmanager
def typing_psfleet(verbs: Iterable[str]) -> Iterator[None]:
    """Have messages say `psfleet VERB` and `psfleet playbook FILE`: fab and ansible-playbook may not be on the path."""
    known = "|".join(map(re.escape, verbs))
    _TYPED[re.compile(rf"(?<![\w./-])fab (?=(?:{known})(?![\w-]))")] = "psfleet "
    _TYPED[re.compile(r"(?<![\w./-])ansible-playbook (?=[\w/-]+\.yml)")] = "psfleet playbook "
    try:
        yield
    finally:
        _TYPED.clear()


def printable(text: str) -> str:
    """Leave out colours, and show every other control character as `\\u001b`, which JSON may hold too."""
    for command, typed in _TYPED.items():
        text = command.sub(typed, text)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", _DECORATION.sub("", text))


def one_line(text: str) -> str:
    """The same in one line, for a place where another line would pass for the verb's own."""
    return printable(text.replace("\n", " "))


def set_off(text: str) -> str:
    """Indent all lines but the first, so that none of them passes for the verb's own."""
    return text.replace("\n", "\n  ")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream takes colours and a rewritten screen: a terminal that is not dumb."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def is_read(stream: TextIO) -> bool:
    """Whether a reader is left of what is written to a pipe."""
    try:
        poll = select.poll()
        poll.register(stream, 0)
        return not any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # it has no descriptor
        return True

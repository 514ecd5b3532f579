"""Find the lines of a program's error that are its own, and what they called at last.

Between them lie up to thirty of the trainer's and of TensorFlow's, which say nothing to the program's author.
"""

from __future__ import annotations

import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)
CALLED = 3  # so many of a library's frames below the program's last one
TRAINER = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(
    Path(path).resolve()
    for path in {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    if Path(path).resolve() != Path(sys.prefix).resolve()
)
LINE_IN_MESSAGE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def cause(error: Error) -> Error:
    """Return the error that TensorFlow's coordinator has wrapped in one of its own, or the error itself."""
    wrapped: Error | None = getattr(error, "original_exception", None)
    return wrapped or error


def exception_info(
    error: BaseException, program_file: Path | None
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return what logging takes as `exc_info`: an error without the frames between the program's own.

    All frames stay where none is the program's: the error is the trainer's or TensorFlow's then.
    """
    error = cause(error)
    own, called = own_frames(error, program_file)
    in_message = lines_in_message(error, program_file)
    if not own and not in_message:
        return type(error), error, error.__traceback__
    return type(error), error, chained(own if in_message else [*own, *called])


def user_line(error: BaseException, program_file: Path | None) -> str:
    """Return "file:line" of the user's code deepest in the error, or nothing."""
    own, _ = own_frames(error, program_file)
    found = [f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" for frame in own]
    return ["", *found, *lines_in_message(error, program_file)][-1]


def own_lines(error: BaseException, program_file: Path | None) -> list[str]:
    """Return the part of the traceback that is the user's."""
    own, _ = own_frames(error, program_file)
    return "".join(traceback.format_tb(chained(own))).splitlines()


def own_frames(error: BaseException, program_file: Path | None) -> tuple[list[TracebackType], list[TracebackType]]:
    """Return the frames of an error that are the user's, and what the last of them called."""
    own: list[TracebackType] = []
    called: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        if is_user_file(Path(frame.tb_frame.f_code.co_filename), program_file):
            own.append(frame)
            called = []
        elif own:
            called.append(frame)
        frame = frame.tb_next
    return own, called[-CALLED:]


def lines_in_message(error: BaseException, program_file: Path | None) -> list[str]:
    """Return "file:line" of the user's code in the message: AutoGraph runs a file of its own, and writes it there."""
    found = LINE_IN_MESSAGE.finditer(str(error))
    return [f"{line['file']}:{line['line']}" for line in found if is_user_file(Path(line["file"]), program_file)]


def chained(frames: Sequence[TracebackType]) -> TracebackType | None:
    """Return frames as one traceback."""
    shown: TracebackType | None = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def is_user_file(path: Path, program_file: Path | None) -> bool:
    """Return whether a source file is the user's: not Python's, not a library's, not the trainer's."""
    if path.name.startswith(("__autograph_generated", "<")) or not path.is_absolute():
        return False
    path = path.resolve()
    if program_file is not None and (path == program_file or program_file.parent == path.parent):
        return True
    return not any(path.is_relative_to(library) for library in (*LIBRARIES, TRAINER))

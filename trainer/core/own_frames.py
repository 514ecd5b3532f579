"""Show of a program's error the lines that are its own, and what they called at last.

Between them lie up to thirty of the trainer's and of TensorFlow's, which say nothing to the program's author.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from trainer.core.failures import LINE_IN_MESSAGE, is_user_file

CALLED = 3  # so many of a library's frames below the program's last one


def exception_info(
    error: BaseException, program_file: Path | None
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return what logging takes as `exc_info`: an error without the frames between the program's own.

    All frames stay where none is the program's: the error is the trainer's or TensorFlow's then.
    """
    error = getattr(error, "original_exception", None) or error
    frames = []
    below = error.__traceback__
    while below is not None:
        frames.append(below)
        below = below.tb_next
    own = [n for n, frame in enumerate(frames) if is_user_file(Path(frame.tb_frame.f_code.co_filename), program_file)]
    # AutoGraph runs another file than the program's, and writes the program's lines into the message.
    in_message = any(is_user_file(Path(match["file"]), program_file) for match in LINE_IN_MESSAGE.finditer(str(error)))
    if not own and not in_message:
        return type(error), error, error.__traceback__
    called = [] if in_message or not own else range(len(frames))[own[-1] + 1 :][-CALLED:]
    shown: TracebackType | None = None
    for number in reversed([*own, *called]):
        frame = frames[number]
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return type(error), error, shown

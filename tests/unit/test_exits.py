"""How a coordinator ends after an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainer.core.failures import STOPPED, TRY_AGAIN, USER_ERROR, Infrastructure, StalePath, Stopped, UserError
from trainer.core.states import RunState
from trainer.tasks import exits
from trainer.tasks.exits import Exit, decide_exit


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


FULL, STALE = os_error(errno.ENOSPC), os_error(errno.ESTALE)
FULL_MESSAGE = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("error", "leads", "begun", "expected"),
    [
        (Stopped(), True, True, Exit(STOPPED, RunState.STOPPED)),
        (UserError("a setting is wrong"), True, True, Exit(USER_ERROR, RunState.FAILED, "a setting is wrong")),
        (ValueError("of the program"), True, True, Exit(USER_ERROR, RunState.FAILED, "ValueError: of the program")),
        (SystemExit(0), True, True, Exit(USER_ERROR, RunState.FAILED, "SystemExit: 0")),
        (Infrastructure("ps-0 is gone"), True, False, Exit(TRY_AGAIN, RunState.WAITING, "ps-0 is gone")),
        (StalePath("mount it"), True, False, Exit(TRY_AGAIN, RunState.WAITING, "mount it", restarts_unit=True)),
        (FULL, True, False, Exit(TRY_AGAIN, RunState.WAITING, FULL_MESSAGE, pauses=True)),
        (FULL, True, True, Exit(TRY_AGAIN, RunState.WAITING, FULL_MESSAGE)),
        (FULL, False, False, Exit(TRY_AGAIN, RunState.WAITING, FULL_MESSAGE)),
    ],
)
def test_each_error_has_its_exit(error: BaseException, leads: bool, begun: bool, expected: Exit) -> None:
    assert decide_exit(error, None, leads=leads, begun=begun) == expected


def test_a_stale_handle_restarts_the_unit_and_does_not_pause() -> None:
    found = decide_exit(STALE, None, leads=True, begun=False)
    assert (found.code, found.restarts_unit, found.pauses) == (TRY_AGAIN, True, False)


def test_a_broken_device_is_no_trouble_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "is_device", lambda error: True)
    broken = decide_exit(Infrastructure("a device"), None, leads=True, begun=True)
    assert (broken.code, broken.is_broken, broken.is_trouble) == (TRY_AGAIN, True, False)


def test_only_what_is_tried_again_is_trouble() -> None:
    found = {
        type(error): decide_exit(error, None, leads=True, begun=True).is_trouble
        for error in (Infrastructure("gone"), UserError("wrong"), Stopped())
    }
    assert found == {Infrastructure: True, UserError: False, Stopped: False}


def test_a_missing_file_of_the_programs_is_the_users(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text("def read():\n    open('/no/such/words.txt')\n")
    scope: dict[str, object] = {}
    exec(compile(program.read_text(), str(program), "exec"), scope)
    with pytest.raises(FileNotFoundError) as caught:
        scope["read"]()  # type: ignore[operator]
    assert decide_exit(caught.value, program, leads=True, begun=False).code == USER_ERROR

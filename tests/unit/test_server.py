"""What a server reads of the run's state, and when it ends for it."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.cluster.remote_commands import ASKED
from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.run.release import MissedRelease
from trainer.tasks import server
from trainer.tasks.server import (
    EXPORT_LOOKS,
    EXPORTING,
    LOOKS,
    MARGIN_SECONDS,
    STALE,
    LastRead,
    ending,
    follow,
    keep_limited,
)

TASK, ADDRESS = "ps-0", "localhost:1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(program="p:P", run="r", steps=10, shared_dir=str(tmp_path))


def test_a_finished_run_ends_its_servers_and_a_question_to_another_process_does_not(config: Config) -> None:
    directory = RunDirectory(config.shared_dir, config.run)
    assert ending(TASK, ADDRESS, lambda: config) == (None, "")
    directory.set_state(RunState.TRAINING, 5)
    directory.set_members(restart={TASK: "another process"})
    assert ending(TASK, ADDRESS, lambda: config) == (None, "")
    directory.set_state(RunState.FINISHED, 10, asked=10)
    assert ending(TASK, ADDRESS, lambda: config) == (0, "run r finished at step 10")


def test_servers_stay_until_the_model_is_exported(config: Config) -> None:
    directory = RunDirectory(config.shared_dir, config.run)
    directory.set_state(RunState.FINISHED, 10, asked=10)
    write_record(directory.export_record, {"step": 10, "tries": 1, "ended": False, "error": ""})
    assert ending(TASK, ADDRESS, lambda: config) == (0, f"run r finished at step 10{EXPORTING}")
    write_record(directory.export_record, {"step": 10, "tries": 1, "ended": True, "error": ""})
    assert ending(TASK, ADDRESS, lambda: config) == (0, "run r finished at step 10")


def test_a_server_whose_host_missed_a_release_ends(config: Config) -> None:
    def selected() -> Config:
        raise MissedRelease("this host has release a, and the cluster runs b")

    assert ending(TASK, ADDRESS, selected) == (75, "this host has release a, and the cluster runs b")


@pytest.mark.parametrize(("number", "expected"), [(errno.ESTALE, (75, STALE)), (errno.EIO, (None, ""))])
def test_a_stale_path_is_left_for_the_next_start_to_mount(
    config: Config, number: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one needs NFS: tests/vms has it."""

    def fail(*_: object, **__: object) -> str:
        raise OSError(number, "what the system says")

    monkeypatch.setattr(Path, "read_text", fail)
    assert ending(TASK, ADDRESS, lambda: config) == expected


@pytest.mark.parametrize(
    ("seen", "looks"),
    [
        ([(None, ""), (75, ASKED)], 2),
        ([(75, STALE), (None, ""), *LOOKS * [(75, STALE)]], LOOKS + 2),
        ([(0, "finished"), (75, STALE), *LOOKS * [(0, "finished")]], LOOKS + 2),
        ([*LOOKS * [(0, EXPORTING)], *LOOKS * [(0, "finished")]], 2 * LOOKS),
        (EXPORT_LOOKS * [(0, EXPORTING)], EXPORT_LOOKS),
    ],
)
def test_what_the_path_alone_says_is_seen_several_times(
    seen: list[tuple[int | None, str]], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[tuple[int | None, str]] = []

    def look() -> tuple[int | None, str]:
        answers.append(seen[len(answers)])
        return answers[-1]

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(server, "RUN_POLL_SECONDS", 0)
    monkeypatch.setattr("os._exit", leave)
    mounts, ends = list[bool](), list[int]()
    notifier = SimpleNamespace(
        status=lambda text: None,
        restart_unit=lambda: mounts.append(True),
        ends=lambda code: ends.append(code) or code,
    )
    with pytest.raises(SystemExit) as left:
        follow(notifier, look)  # type: ignore[arg-type]
    assert (left.value.code, len(answers)) == (seen[-1][0], looks)
    assert ends == [seen[-1][0]]  # else its supervisor would start the next process after 0
    assert mounts == ([True] if seen[-1][1] == STALE else [])


def test_connections_may_wait_a_little_longer_than_a_member_may_be_silent(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are made later, and where the settings can't be read any more."""
    longer = config.replace(heartbeat_timeout_seconds=60)
    settings: Iterator[Config | Exception] = iter([config, OSError("broken"), MissedRelease("an old one"), longer])
    limits: list[float] = []

    def read() -> Config:
        found = next(settings)
        if isinstance(found, Exception):
            raise found
        return found

    last = LastRead(read)

    def limit(seconds: float) -> None:
        limits.append(seconds)
        if len(limits) == 4:
            raise SystemExit
        ending(TASK, ADDRESS, last)

    ending(TASK, ADDRESS, last)
    monkeypatch.setattr(server, "RUN_POLL_SECONDS", 0)
    monkeypatch.setattr(server, "limit_waits", limit)
    with pytest.raises(SystemExit):
        keep_limited(last)
    assert limits == [*3 * [config.heartbeat_timeout_seconds + MARGIN_SECONDS], 60 + MARGIN_SECONDS]


def test_connections_are_kept_limited_while_the_path_hangs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that follows the run reads the shared path, once a look."""
    hangs, released = threading.Event(), threading.Event()
    reads: list[int] = []
    limited_while_hanging = 0

    def read() -> Config:
        reads.append(1)
        if len(reads) > 1:
            hangs.set()
            released.wait(60)
            raise SystemExit
        return config

    def limit(seconds: float) -> None:
        nonlocal limited_while_hanging
        limited_while_hanging += hangs.is_set()
        if limited_while_hanging == 3:
            raise SystemExit

    def follow_until_released() -> None:
        with contextlib.suppress(SystemExit):
            follow(None, partial(ending, TASK, ADDRESS, last))  # type: ignore[arg-type]

    monkeypatch.setattr(server, "RUN_POLL_SECONDS", 0.01)
    monkeypatch.setattr(server, "limit_waits", limit)
    last = LastRead(read)
    follower = threading.Thread(target=follow_until_released, daemon=True)
    follower.start()
    try:
        with pytest.raises(SystemExit):
            keep_limited(last)
        assert len(reads) == 2
    finally:
        released.set()
        follower.join(60)

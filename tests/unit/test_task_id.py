"""How a task is called."""

from __future__ import annotations

import pytest

from trainer.core.task_id import TaskId


def test_a_name_is_read_as_it_is_written() -> None:
    assert TaskId.parse("worker-12") == TaskId("worker", 12)
    assert str(TaskId("ps", 0)) == f"{TaskId('ps', 0)}" == "ps-0"


def test_tasks_sort_by_number() -> None:
    tasks = sorted(map(TaskId.parse, ("worker-10", "worker-9", "ps-1")))
    assert list(map(str, tasks)) == ["ps-1", "worker-9", "worker-10"]


@pytest.mark.parametrize("text", ["worker", "worker-", "-1", "worker-x", "worker-1-2", ""])
def test_what_names_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no task: expected a job and a number"):
        TaskId.parse(text)

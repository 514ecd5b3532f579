"""When a planned reboot goes on: who is seen to be gone, and who to be back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wait_for_members as module

TASKS = ["ps-1", "worker-1"]
BOTH = {"ps-1": "closed", "worker-1": "away"}


@pytest.mark.parametrize(
    ("state", "run", "expected"),
    [
        ("absent", {"state": "training", "without": BOTH}, True),
        ("absent", {"state": "waiting", "without": BOTH}, True),  # for the only ps there is
        ("absent", {"state": "training", "without": {"ps-1": "closed"}}, False),
        ("absent", {"state": "training"}, False),
        ("present", {"state": "training", "without": {}}, True),
        ("present", {"state": "training", "without": {"worker-0": "away"}}, True),
        ("present", {"state": "training", "without": {"worker-1": "serving"}}, False),
        ("present", {"state": "waiting", "without": {}}, False),
    ],
)
def test_what_a_living_coordinator_says_counts(state: str, run: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    unit = "trainer@chief-0.service"
    for pid, slice_of in ((41, f"system-trainer.slice/{unit}"), (43, "cron.service")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::/system.slice/{slice_of}\n")
    assert module.has_happened({**run, "pid": 41}, TASKS, state, unit, tmp_path) is expected
    for gone in (42, 43, None):
        assert not module.has_happened({**run, "pid": gone}, TASKS, state, unit, tmp_path)


class Host:
    """Ansible's module on a host whose coordinator's unit a test gives, one look after the other."""

    def __init__(self, *looks: str) -> None:
        self.looks = list(looks)
        self.params: dict[str, Any] = {"coordinator": "chief-0", "tasks": ["chief-0"], "state": "present", "timeout": 9}

    def run_command(self, command: list[str], cwd: str | None = None) -> tuple[int, str, str]:
        return (0, self.looks.pop(0), "") if command[0] == "systemctl" else (1, "", "no run yet")

    def exit_json(self, **result: Any) -> None:
        raise SystemExit("goes on")

    def fail_json(self, **result: Any) -> None:
        raise SystemExit(result["msg"])


DOWN = "ActiveState=inactive\n"
FAILED = "ActiveState=failed\n"


@pytest.mark.parametrize(
    ("looks", "tasks", "state", "message"),
    [
        ([DOWN], ["worker-1"], "present", "goes on"),
        ([DOWN], ["ps-1"], "absent", "goes on"),
        (["ActiveState=inactive\nJob=41\n", "ActiveState=activating\n", DOWN], ["chief-0"], "present", "goes on"),
        ([FAILED], ["worker-1"], "present", "goes on"),
        (["ActiveState=active\n", FAILED], ["chief-0"], "present", "chief-0 was started again and has failed"),
    ],
)
def test_a_coordinator_that_is_down_is_waited_for_only_while_it_is_to_start(
    monkeypatch: pytest.MonkeyPatch, looks: list[str], tasks: list[str], state: str, message: str
) -> None:
    host = Host(*looks)
    host.params |= {"tasks": tasks, "state": state}
    monkeypatch.setattr(module, "AnsibleModule", lambda **options: host)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    with pytest.raises(SystemExit, match=message):
        module.main()
    assert host.looks == []


def test_a_limit_says_what_was_seen_last() -> None:
    run = {"run": "digits", "state": "waiting", "message": "no answer from ps-0 (a:1)", "without": BOTH}
    assert module.describe(run, TASKS) == (
        "run digits is waiting: no answer from ps-0 (a:1); without ps-1 (closed), worker-1 (away)"
    )
    assert module.describe({"run": "digits", "state": "training"}, TASKS) == "run digits is training"

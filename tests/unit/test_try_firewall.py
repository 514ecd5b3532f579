"""The trial of a table, from the control machine: only a new connection keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import try_firewall
from ansible.errors import AnsibleConnectionFailure

SECONDS = 20


class Host:
    """A host whose connections, and whose answers to the module, a test says; its clock goes on with each pause."""

    def __init__(self, connections: list[str | None], changed: bool = True, transport: str = "ssh") -> None:
        self.connections = connections
        self.changed = changed
        self.asked: list[str] = []
        self.resets = 0
        self.now = 0.0
        self.connection = SimpleNamespace(transport=transport, reset=self.reset)

    def reset(self) -> None:
        self.resets += 1

    def see(self, *_: object, **__: object) -> dict[str, str]:
        seen = self.connections.pop(0) if len(self.connections) > 1 else self.connections[0]
        if seen is None:
            raise AnsibleConnectionFailure("timed out")
        return {"stdout": f"{seen}\n"}

    def execute(self, _name: str, module_args: dict[str, Any], task_vars: object) -> dict[str, Any]:
        assert module_args["wanted"] == "/etc/psfleet/firewall.nft"
        self.asked.append(module_args["state"])
        return {"changed": self.changed}

    def pause(self, seconds: float) -> None:
        self.now += seconds


def run(host: Host, monkeypatch: pytest.MonkeyPatch, check_mode: bool = False) -> dict[str, Any]:
    arguments = {"wanted": "/etc/psfleet/firewall.nft", "program": "/sbin/p", "seconds": SECONDS}
    action = try_firewall.ActionModule.__new__(try_firewall.ActionModule)
    monkeypatch.setattr(try_firewall.ActionBase, "run", lambda *_: {})
    action._task = SimpleNamespace(args=arguments, check_mode=check_mode)
    action._connection = host.connection
    action._low_level_execute_command = host.see
    action._execute_module = host.execute
    action.clock = lambda: host.now
    action.sleep = host.pause
    return action.run(None, {})


def test_a_new_connection_keeps_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(["192.0.2.1 50000 192.0.2.2 22", "192.0.2.1 50001 192.0.2.2 22"])
    assert run(host, monkeypatch) == {"changed": True}
    assert host.asked == ["tried", "confirmed"]
    assert host.resets == 1


def test_an_open_connection_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(["192.0.2.1 50000 192.0.2.2 22"])
    result = run(host, monkeypatch)
    assert result["failed"]
    assert "the same SSH connection" in result["msg"]
    assert "has loaded the one before again" in result["msg"]
    assert host.asked == ["tried"]
    assert host.now >= SECONDS


def test_who_cannot_say_which_connection_it_is_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host([""])
    assert "SSH_CONNECTION" in run(host, monkeypatch)["msg"]
    assert host.asked == ["tried"]


def test_a_host_that_is_slow_to_let_in_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(["1 50000 2 22", None, None, "1 50001 2 22"])
    assert run(host, monkeypatch) == {"changed": True}
    assert host.asked == ["tried", "confirmed"]


def test_nobody_who_comes_back_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [None] * SECONDS
    result = run(Host(["1 50000 2 22", *silent, "1 50001 2 22"]), monkeypatch)
    assert result["failed"]
    assert result["msg"].startswith("timed out. With the new table no new SSH connection came through")
    lost = run(Host(["1 50000 2 22", None]), monkeypatch)
    assert "look at its console" in lost["msg"]


@pytest.mark.parametrize("check_mode", [True, False])
def test_nothing_is_kept_where_nothing_was_loaded(monkeypatch: pytest.MonkeyPatch, check_mode: bool) -> None:
    host = Host(["1 50000 2 22"], changed=check_mode)
    assert run(host, monkeypatch, check_mode)["changed"] is check_mode
    assert host.asked == ["tried"]
    assert not host.resets


def test_the_machine_itself_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host([""], transport="local")
    assert run(host, monkeypatch) == {"changed": True}
    assert host.asked == ["tried", "confirmed"]
    assert not host.resets

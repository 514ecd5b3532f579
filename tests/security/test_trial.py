"""How a table is loaded on a host: on trial, kept, taken back, checked before a task starts, let in early."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import firewall_table
import pytest

from tests.rendered_firewall import FACTS, SSH
from tests.security.hosts import UNASKED, Hosts
from tests.waiting import until

HOST = "beta"
WRONG = FACTS | {"ssh_ports": [2022]}
# A busy machine needs some of them to look at all.
TRIAL_SECONDS = 8


@pytest.fixture
def kept(opened: Hosts) -> Hosts:
    """A host whose table was tried and confirmed."""
    good = opened.wanted(HOST, opened.table(HOST))
    assert opened.program(HOST, "try", good, "30").returncode == 0
    assert opened.program(HOST, "confirm").returncode == 0
    return opened


def can_log_in(hosts: Hosts) -> bool:
    endpoint = (hosts.address(HOST), SSH)
    return hosts.knock("stranger", [endpoint]) == {endpoint: "open"}


def test_what_is_confirmed_stays(kept: Hosts) -> None:
    time.sleep(0.2)
    assert kept.program(HOST, "is-kept", kept.wanted(HOST, kept.table(HOST))).returncode == 0
    assert kept.program(HOST, "check").returncode == 0
    assert not list(kept.running(HOST).glob("*.nft"))
    assert kept.seen("stranger", HOST) == {SSH}


@pytest.mark.parametrize("first", [True, False], ids=["the first table", "a later one"])
def test_a_wrong_table_is_taken_back_when_nobody_confirms(opened: Hosts, first: bool, request: Any) -> None:
    if not first:
        request.getfixturevalue("kept")
    before = opened.seen("stranger", HOST)
    wrong = opened.wanted(HOST, opened.table(HOST, facts=WRONG))
    with opened.talk("stranger", HOST, SSH) as open_already:
        assert opened.program(HOST, "try", wrong, str(TRIAL_SECONDS)).returncode == 0
        assert not can_log_in(opened)
        assert first or float(open_already.say()) < 1, "an open connection proves nothing"
        until(lambda: can_log_in(opened), "the table is taken back", TRIAL_SECONDS + 20)
    assert opened.seen("stranger", HOST) == before
    late = opened.program(HOST, "confirm")
    assert late.returncode == 1
    assert "no table is on trial any more" in late.stderr
    assert (opened.program(HOST, "check").returncode == 0) is not first


def test_a_table_that_cannot_be_loaded_leaves_the_one_before(kept: Hosts) -> None:
    broken = kept.wanted(HOST, kept.table(HOST).replace("@chief4", "@nobody4"))
    tried = kept.program(HOST, "try", broken, "30")
    assert tried.returncode == 1
    assert "nobody4" in tried.stderr
    assert kept.program(HOST, "check").returncode == 0


def test_a_start_is_refused_without_the_table(kept: Hosts) -> None:
    under = kept.networks.under(HOST)
    subprocess.run([*under, "nft", "flush", "ruleset"], check=True)
    refused = kept.program(HOST, "check")
    assert refused.returncode == 1
    assert "systemctl restart psfleet-firewall" in refused.stderr
    assert kept.program(HOST, "load").returncode == 0
    assert kept.program(HOST, "check").returncode == 0
    assert kept.seen("stranger", HOST) == {SSH}


@pytest.mark.parametrize(
    "change",
    [
        "flush table inet psfleet",
        "flush chain inet psfleet guard",
        "insert rule inet psfleet input accept",
        "add chain inet psfleet input { policy accept; }",
    ],
)
def test_a_start_is_refused_with_a_table_that_was_changed(kept: Hosts, change: str) -> None:
    subprocess.run([*kept.networks.under(HOST), "nft", *change.split()], check=True)
    assert kept.program(HOST, "check").returncode == 1


def test_a_table_without_a_timer_is_not_tried(kept: Hosts) -> None:
    timer = kept.tool("systemd-run")
    text = timer.read_text()
    timer.write_text("#!/bin/sh\nexit 1\n")
    try:
        tried = kept.program(HOST, "try", kept.wanted(HOST, kept.table(HOST, facts=WRONG)), "30")
    finally:
        timer.write_text(text)
    assert tried.returncode == 1
    assert "systemd-run" in tried.stderr
    assert not list(kept.running(HOST).glob("*.nft"))
    assert kept.program(HOST, "load").returncode == 0
    assert can_log_in(kept)


def test_a_confirmation_may_be_said_again(opened: Hosts) -> None:
    good = opened.wanted(HOST, opened.table(HOST))
    assert opened.program(HOST, "try", good, "30").returncode == 0
    # Broken off after it has decided.
    (opened.running(HOST) / "tried.nft").rename(opened.running(HOST) / "confirmed.nft")
    for _ in range(2):
        assert opened.program(HOST, "confirm", good).returncode == 0
        assert opened.program(HOST, "is-kept", good).returncode == 0
    other = opened.running(HOST) / "other"
    other.write_text(opened.table(HOST, facts=WRONG))
    assert opened.program(HOST, "confirm", other).returncode == 1


def test_a_confirmation_that_was_broken_off_keeps_no_later_table(kept: Hosts) -> None:
    (kept.running(HOST) / "confirmed.nft").write_text("broken off")
    wrong = kept.wanted(HOST, kept.table(HOST, facts=WRONG))
    assert kept.program(HOST, "try", wrong, "30").returncode == 0
    kept.stop_timer(HOST)
    assert kept.program(HOST, "take-back").returncode == 0
    assert kept.program(HOST, "confirm", wrong).returncode == 1
    assert can_log_in(kept)


def test_another_nft_may_list_the_table_in_other_words(kept: Hosts) -> None:
    """A newer one does so after an upgrade."""
    newer = kept.tool("nft")
    newer.write_text(
        '#!/bin/sh\n[ "$1" != --version ] || { echo nftables v9; exit; }\n'
        f'{shutil.which("nft")} "$@" || exit\n[ "$1" != --stateless ] || echo "# other words"\n'
    )
    newer.chmod(0o755)
    try:
        assert kept.program(HOST, "check").returncode == 0
        subprocess.run([*kept.networks.under(HOST), "nft", "flush", "chain", "inet", "psfleet", "guard"], check=True)
        assert kept.program(HOST, "check").returncode == 1
    finally:
        newer.unlink()
    assert kept.program(HOST, "check").returncode == 0
    assert kept.seen("stranger", HOST) == {SSH}


def test_nft_is_found_where_the_path_lacks_it(kept: Hosts) -> None:
    assert kept.program(HOST, "check", path="/usr/bin:/bin").returncode == 0


def test_counters_are_no_change(kept: Hosts) -> None:
    kept.seen("stranger", HOST)
    assert kept.program(HOST, "check").returncode == 0


def test_other_tables_are_left_alone(kept: Hosts) -> None:
    under = kept.networks.under(HOST)
    subprocess.run([*under, "nft", "add table inet theirs"], check=True)
    kept.program(HOST, "load")
    kept.program(HOST, "remove")
    output = subprocess.run([*under, "nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[0] == "table inet theirs"
    assert "psfleet" not in output
    assert kept.seen("stranger", HOST) >= {SSH, UNASKED, 2300}


class Ended(Exception):
    """What Ansible's module does at its end."""


def run_module(hosts: Hosts, state: str, check_mode: bool = False, **given: Any) -> dict[str, Any]:
    """Run firewall_table on a host."""
    result: dict[str, Any] = {}

    def run_command(command: list[str], check_rc: bool = False, data: str | None = None) -> tuple[int, str, str]:
        if command[0] == "program":
            done = hosts.program(HOST, *command[1:])
        else:
            under = hosts.networks.under(HOST)
            done = subprocess.run([*under, *command], input=data, capture_output=True, text=True)
        assert not (check_rc and done.returncode), done.stderr
        return done.returncode, done.stdout, done.stderr

    def end(**answer: Any) -> None:
        result.update(answer)
        raise Ended

    params = {"program": "program", "wanted": "", "track_seconds": 0, "seconds": 30, "addresses": [], **given}
    module = SimpleNamespace(
        params=params,
        check_mode=check_mode,
        run_command=run_command,
        exit_json=end,
        fail_json=lambda **answer: end(failed=True, **answer),
        get_bin_path=lambda name, required=False: name,
    )
    with pytest.raises(Ended):
        {"tried": firewall_table.try_table, "confirmed": firewall_table.keep_table, "admitted": firewall_table.admit}[
            state
        ](module)
    return result


@pytest.fixture
def _program_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall_table.Path, "exists", lambda _: True)


@pytest.mark.usefixtures("_program_is_there")
def test_a_second_run_tries_nothing(opened: Hosts) -> None:
    wanted = str(opened.wanted(HOST, opened.table(HOST)))
    assert run_module(opened, "tried", wanted=wanted, check_mode=True)["changed"]
    assert opened.seen("stranger", HOST) >= {UNASKED}
    assert run_module(opened, "tried", wanted=wanted)["changed"]
    assert run_module(opened, "confirmed")["changed"]
    assert not run_module(opened, "tried", wanted=wanted)["changed"]
    subprocess.run([*opened.networks.under(HOST), "nft", "flush", "ruleset"], check=True)
    assert run_module(opened, "tried", wanted=wanted)["changed"]
    opened.stop_timer(HOST)


@pytest.mark.usefixtures("_program_is_there")
@pytest.mark.parametrize("talks", [False, True])
def test_connections_are_watched_before_a_first_table_where_there_are_any(
    opened: Hosts, monkeypatch: pytest.MonkeyPatch, talks: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(firewall_table, "time", SimpleNamespace(sleep=slept.append))
    wanted = str(opened.wanted(HOST, opened.table(HOST)))
    with opened.talk("gamma", HOST, 2300, seconds=5) if talks else contextlib.nullcontext() as talk:
        assert talk is None or float(talk.say()) < 1
        assert run_module(opened, "tried", wanted=wanted, track_seconds=7)["changed"]
    assert slept == [7] * talks
    opened.stop_timer(HOST)


LISTENING = "LISTEN 0 128 0.0.0.0:22 0.0.0.0:*\nLISTEN 0 9 [::]:2300 [::]:*\n"


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ('tcp 0 0 10.0.0.1:22 10.0.0.9:50000 users:(("sshd",pid=1,fd=4),("sshd",pid=2,fd=4))', False),
        ('tcp 0 0 [fd00::1]:22 [fd00::9]:50000 users:(("sshd-session",pid=1,fd=4))', False),
        ('tcp 0 0 127.0.0.1:2300 127.0.0.1:50000 users:(("python",pid=1,fd=4))', False),
        ('tcp 0 0 [::1]:50000 [::1]:2300 users:(("python",pid=1,fd=4))', False),
        ('tcp 0 0 10.0.0.1:50000 10.0.0.9:5432 users:(("sshd",pid=1,fd=4))', True),  # forwarded by a login
        ('tcp 0 0 10.0.0.1:22 10.0.0.9:50000 users:(("mine",pid=1,fd=4))', True),
        ("tcp 0 0 10.0.0.1:900 10.0.0.9:2049", True),  # the kernel's, as of a shared path
        ('udp 0 0 10.0.0.1:50000 10.0.0.9:123 users:(("chronyd",pid=1,fd=4))', True),
    ],
)
def test_a_login_is_let_in_whatever_is_known_of_it(line: str, counts: bool) -> None:
    assert firewall_table.others_are_open(LISTENING, f"{line}\n") is counts


def test_members_are_let_in_before_the_table_names_them(opened: Hosts) -> None:
    assert run_module(opened, "admitted", addresses=["10.99.0.99"]) == {"changed": False, "admitted": []}
    host, groups = "store", {"chief": ["alpha"], "ps": ["alpha"], "worker": ["alpha"], "nfs_server": ["beta"]}
    good = opened.wanted(HOST, opened.table(HOST, groups=groups))
    assert opened.program(HOST, "try", good, "30").returncode == 0
    assert opened.program(HOST, "confirm").returncode == 0
    address = opened.address(host)
    listing = subprocess.run(
        [*opened.networks.under(HOST), "nft", "--json", "list", "set", "inet", "psfleet", f"member{opened.family}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert address not in json.dumps(listing)
    assert run_module(opened, "admitted", addresses=[address], check_mode=True)["admitted"] == [address]
    assert run_module(opened, "admitted", addresses=[address]) == {"changed": True, "admitted": [address]}
    assert run_module(opened, "admitted", addresses=[address]) == {"changed": False, "admitted": []}
    assert opened.program(HOST, "check").returncode == 0
    assert opened.program(HOST, "is-kept", good).returncode == 1, "who is in no file is let in no longer"
    assert opened.program(HOST, "load").returncode == 0
    assert opened.program(HOST, "is-kept", good).returncode == 0


def test_nobody_is_admitted_to_a_table_that_was_changed(kept: Hosts) -> None:
    change = "insert rule inet psfleet input accept"
    subprocess.run([*kept.networks.under(HOST), "nft", *change.split()], check=True)
    result = run_module(kept, "admitted", addresses=["10.99.0.99", "fd99::99"])
    assert result["failed"]
    assert "systemctl restart psfleet-firewall" in result["msg"]
    assert kept.program(HOST, "check").returncode == 1

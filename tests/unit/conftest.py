"""Pretended hosts and their console, as many tests of the verbs take them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fleet.actions.console import Console
from tests.unit.fake_hosts import FakeHosts, console_of, make_inventory, status


@pytest.fixture
def hosts() -> FakeHosts:
    return FakeHosts(make_inventory(), run_status=status("new", None))


@pytest.fixture
def console(hosts: FakeHosts) -> Console:
    return console_of(hosts)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[object]:
    """Ctrl-C and SIGTERM as Python has them: in the background, or after other tests, they may not be."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield signal.default_int_handler
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)

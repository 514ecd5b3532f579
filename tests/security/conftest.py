"""Hosts as network namespaces, joined by a bridge: members of a cluster, and a stranger on the same network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import networks
from tests.security.hosts import FAMILIES, Hosts


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: one of those that `make test` has, over IPv6")


@pytest.fixture(scope="session")
def _namespaces() -> None:
    if why := networks.missing():
        pytest.fail(f"no network namespaces here: {why}")


@pytest.fixture(params=FAMILIES, ids=["IPv4", "IPv6"], scope="module")
def hosts(
    request: pytest.FixtureRequest, _namespaces: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """Hosts on which everything listens, and nothing is closed."""
    made = Hosts(request.param, tmp_path_factory.mktemp("hosts"))
    try:
        made.listen()
        yield made
    finally:
        made.end()


@pytest.fixture
def opened(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts, open again afterwards."""
    yield hosts
    hosts.open()

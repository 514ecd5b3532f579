"""Members reach each other directly, whatever proxies the environment names; the rest is as the site has it."""

from __future__ import annotations

import os
import urllib.request

import pytest

from trainer.cluster.spec import ClusterConfig
from trainer.core.proxies import bypass_proxies, without_proxies

MEMBERS = ["10.0.3.21", "fd00::1", "ps-0.train.svc"]
OURS = "localhost,127.0.0.1,::1,10.0.3.21,fd00::1,ps-0.train.svc"


@pytest.mark.parametrize(
    ("environment", "merged", "of_grpc"),
    [
        ({}, OURS, OURS),
        ({"no_proxy": "a.example, .b.example"}, f"a.example,.b.example,{OURS}", f"a.example,.b.example,{OURS}"),
        ({"NO_PROXY": "a.example"}, f"a.example,{OURS}", f"a.example,{OURS}"),
        ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, f"a.example,b.example,{OURS}", None),
        ({"no_proxy": "", "NO_PROXY": ""}, OURS, OURS),
        # Python and curl take a star only where it stands alone.
        ({"no_proxy": "*"}, "*", f"*,{OURS}"),
        ({"no_proxy": "a.example", "no_grpc_proxy": "b.example"}, f"a.example,{OURS}", f"b.example,{OURS}"),
        ({"no_grpc_proxy": ""}, OURS, OURS),
    ],
)
def test_members_are_added_to_what_is_reached_directly(
    environment: dict[str, str], merged: str, of_grpc: str | None
) -> None:
    added = without_proxies(environment, MEMBERS)
    assert added["no_proxy"] == added["NO_PROXY"] == merged
    assert added["no_grpc_proxy"] == (of_grpc or merged)
    assert without_proxies({**environment, **added}, MEMBERS) == added


def test_downloads_go_through_the_proxy_and_members_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "intranet.example")  # so that it is put back
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    jobs = {"chief": ["10.0.3.11:2300"], "ps": ["ps-0.train.svc:2300"], "worker": ["[fd00::1]:2300"]}
    cluster = ClusterConfig(jobs, "chief", 0, {"dispatcher": ["10.0.3.11:2400"], "data": ["10.0.3.41:2401"]})
    bypass_proxies(cluster.addresses)
    assert urllib.request.getproxies()["https"] == "http://proxy.example:3128"
    for host in ("10.0.3.11", "10.0.3.41", "ps-0.train.svc", "fd00::1", "127.0.0.1", "localhost", "intranet.example"):
        assert urllib.request.proxy_bypass(host), host
    assert not urllib.request.proxy_bypass("pypi.example")

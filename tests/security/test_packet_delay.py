"""The delay of `fab drill way-late`: of one host's packets to one address, behind the hosts' tables."""

from __future__ import annotations

import subprocess

import pytest

from tests.security.delay import late, milliseconds
from tests.security.hosts import Hosts

# Longer than the drill's: a busy machine may take 0.2 s over a connection.
DELAY_MS = 800
# As a host's table has it with `cluster_encryption`: what doesn't leave by the tunnel is dropped.
TUNNEL = """
table inet tunnel {
  chain output {
    type filter hook output priority filter - 10
    oif != lo oifname != eth0 counter drop
  }
}
"""
SHOWN = "nft list tables; ip rule; ip -6 rule; ip link"


@pytest.mark.quick
def test_packets_to_one_address_are_late_and_nothing_is_left_of_it(opened: Hosts) -> None:
    opened.close()
    opened.load("gamma", TUNNEL)
    under = opened.networks.under("gamma")

    def takes(target: str) -> float:
        return milliseconds(under, opened.address(target), 2300)

    def shown() -> str:
        return subprocess.check_output([*under, "sh", "-c", SHOWN], text=True)

    before = shown()
    assert takes("beta") < DELAY_MS
    with late(under, opened.address("beta"), DELAY_MS) as process:
        assert takes("beta") >= DELAY_MS
        assert takes("alpha") < DELAY_MS
        with opened.talk("gamma", "beta", 2300, 5) as talk:
            assert float(talk.say()) >= DELAY_MS / 1000
            # With its process alone, too, the delay is over.
            process.kill()
            process.wait()
            assert float(talk.say()) < DELAY_MS / 1000
        assert takes("beta") < DELAY_MS
    with late(under, opened.address("beta"), DELAY_MS):
        assert takes("beta") >= DELAY_MS
    assert shown() == before
    assert takes("beta") < DELAY_MS

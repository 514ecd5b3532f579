"""A proxy in the environment, which can not be reached: members are reached all the same, and none asks it for them."""

from __future__ import annotations

import socket

import pytest
from processes import MINUTE, Runs

pytestmark = pytest.mark.timeout(400)
# Not GRPC_PROXY, which is not read: the tests' fork server would leave such a process to a new import.
NAMES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy")


def test_no_traffic_between_members_goes_to_a_proxy(runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        given = dict.fromkeys(NAMES, address)
        given |= {"NO_PROXY": "intranet.example", "no_grpc_proxy": "intranet.example"}
        process = runs.local("outside:Called", "proxied", 20, "--workers", "2", "--evaluation", "none", **given)
        assert process.wait(3 * MINUTE) == 0, process.output
        with pytest.raises(BlockingIOError):  # it was asked for nothing
            proxy.accept()
    assert runs.status("proxied")["step"] == 20

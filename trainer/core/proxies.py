"""Keep what members say to each other away from proxies, wherever the environment has them from.

TensorFlow's channels obey `http_proxy`, `https_proxy` and `grpc_proxy` for every address, loopback too, and would wait
for ever. Downloads and webhooks still go through the proxy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ALL = "*"  # for Python, curl and Go; to gRPC it is a name like any other


def bypass_proxies(addresses: Iterable[str] = ()) -> None:
    """Have this process and what it starts reach loopback and these addresses (host:port) directly."""
    os.environ.update(without_proxies(os.environ, [address.rpartition(":")[0].strip("[]") for address in addresses]))


def without_proxies(environment: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return the variables that add loopback and these hosts to those that no proxy is used for.

    Python and curl look at `no_proxy` before `NO_PROXY`, so that both get what either has. gRPC looks at
    `no_grpc_proxy`, and at `no_proxy` only where that is missing.
    """
    ours = [*LOOPBACK, *hosts]
    given = [*entries(environment.get("no_proxy", "")), *entries(environment.get("NO_PROXY", ""))]
    merged = ALL if ALL in given else joined([*given, *ours])
    of_grpc = environment.get("no_grpc_proxy")
    direct = joined([*(given if of_grpc is None else entries(of_grpc)), *ours])
    return {"no_proxy": merged, "NO_PROXY": merged, "no_grpc_proxy": direct}


def entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def joined(names: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(names))

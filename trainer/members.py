"""Ask a TensorFlow server whether it lives, with or without a strategy.

The question is the server's own gRPC method /tensorflow.WorkerService/GetStatus with an empty request: milliseconds
when it lives, UNAVAILABLE when the port is closed, DEADLINE_EXCEEDED when the process or its host is frozen.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

DEADLINE_SECONDS = 2.0
METHOD = "/tensorflow.WorkerService/GetStatus"


def answers(address: str, deadline: float = DEADLINE_SECONDS) -> bool:
    """Return whether the server at host:port answers within the deadline (seconds)."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(METHOD)(b"", timeout=deadline)
        except grpc.RpcError:
            return False
    return True


def silent(servers: dict[str, str]) -> dict[str, str]:
    """Return the members (task name to address) that do not answer."""
    if not servers:
        return {}
    with ThreadPoolExecutor(max_workers=min(64, len(servers))) as pool:
        alive = dict(zip(servers, pool.map(answers, servers.values()), strict=True))
    return {task: address for task, address in servers.items() if not alive[task]}

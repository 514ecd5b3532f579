"""Ask a TensorFlow server whether it lives, with or without a strategy.

The question is the server's own gRPC method /tensorflow.WorkerService/GetStatus with an empty request: milliseconds
when it lives, UNAVAILABLE when the port is closed, DEADLINE_EXCEEDED when the process or its host is frozen.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import grpc

DEADLINE_SECONDS = 2.0
METHOD = "/tensorflow.WorkerService/GetStatus"
# A question that fills several packets, also of 9,000 bytes: field 15, which no server knows, of 16,384 bytes.
PADDING = b"\x7a\x80\x80\x01" + bytes(1 << 14)
# What gRPC says of a closed port; a name server may refuse as well.
REFUSED = "Connection refused"
# The data service's servers, which are no members of TensorFlow's cluster, answer these.
SERVICE_METHODS = {
    "dispatcher": "/tensorflow.data.DispatcherService/GetVersion",
    "data": "/tensorflow.data.WorkerService/GetWorkerTasks",
}


def answers(address: str, deadline: float = DEADLINE_SECONDS, method: str = METHOD) -> bool:
    """Return whether the server at host:port answers within the deadline (seconds)."""
    return ask(address, deadline, method) is not None


def incarnation(address: str, deadline: float = DEADLINE_SECONDS) -> str | None:
    """Return what tells the server's process from the one after its restart, or None when it does not answer.

    The answer holds the incarnation of each of its devices, drawn at random when the server starts.
    """
    answer = ask(address, deadline)
    return None if answer is None else digest(answer)


def digest(answer: bytes) -> str:
    return hashlib.sha256(answer).hexdigest()


def ask(address: str, deadline: float, method: str = METHOD) -> bytes | None:
    """Return the server's answer, or None when there is none within the deadline (seconds)."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer: bytes = channel.unary_unary(method)(b"", timeout=deadline)
        except grpc.RpcError:
            return None
    return answer


def silent(servers: dict[str, str], method: str = METHOD) -> dict[str, str]:
    """Return the members (task name to address) that do not answer; all are asked at once."""
    if not servers:
        return {}
    with ThreadPoolExecutor(max_workers=min(64, len(servers))) as pool:
        found = pool.map(lambda address: answers(address, method=method), servers.values())
        alive = dict(zip(servers, found, strict=True))
    return {task: address for task, address in servers.items() if not alive[task]}

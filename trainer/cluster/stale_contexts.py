"""Close what a coordinator that is gone has left on TensorFlow's servers.

A coordinator has a context on each server: its variables and functions on a ps, its iterators on a worker. The context
outlives the coordinator, unless someone closes it: the server's own gRPC method
/tensorflow.eager.EagerService/CloseContext does that for each client that knows its number.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Collection

import grpc

log = logging.getLogger(__name__)
DEADLINE_SECONDS = 120.0  # a worker may take a minute to free an iterator
METHOD = "/tensorflow.eager.EagerService/CloseContext"
ANY_VIEW = 2**63 - 1  # a server refuses the view that is older than its own


def close_contexts(contexts: Collection[int], addresses: Collection[str]) -> threading.Thread | None:
    """Have a thread close these contexts on the servers (host:port); one that is not there is closed already.

    It is not waited for: a server answers when what was in flight there has ended. One that does not answer in time
    keeps its context until TensorFlow frees it, in ten minutes.
    """
    if not contexts or not addresses:
        return None

    def close() -> None:
        with contextlib.ExitStack() as stack:
            calls = []
            for address in addresses:
                channel = stack.enter_context(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]))
                ask = channel.unary_unary(METHOD)
                calls += [(address, ask.future(request(number), timeout=DEADLINE_SECONDS)) for number in contexts]
            for address, call in calls:
                if error := call.exception():
                    log.warning("%s has not closed an earlier coordinator's context: %s", address, error)

    thread = threading.Thread(target=close, name="closing", daemon=True)
    thread.start()
    return thread


def request(context: int) -> bytes:
    """Return tensorflow.eager.CloseContextRequest: two numbers of 64 bits, context_id (1) and context_view_id (2)."""
    return struct.pack("<BQBQ", 0x09, context, 0x11, ANY_VIEW)

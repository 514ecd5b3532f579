"""Where a task is scraped: a socket that its supervisor keeps, and a thread of the process that lives."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from trainer.telemetry.metrics import MetricsCollector

log = logging.getLogger(__name__)
ADDRESS = "TRAINER_METRICS"  # the environment's name for address:port
LISTENER = "TRAINER_METRICS_LISTENER"  # the same for the descriptor of a socket that listens there already
WAITING = 16  # scrapers that may wait while no process of the task lives
PATIENCE_SECONDS = 5.0  # with a client that has connected and says nothing


def listen(environment: Mapping[str, str]) -> socket.socket | None:
    """Return a socket that listens where the environment says, or None; what goes wrong must end no training.

    The supervisor keeps it: the port is taken from before its first child until its own end. Prometheus, which may
    scrape between two children, waits.
    """
    if descriptor := environment.get(LISTENER):
        return socket.socket(fileno=int(descriptor))
    address, _, port = environment.get(ADDRESS, "").rpartition(":")
    if not address:
        return None
    try:
        importlib.import_module("prometheus_client")  # before the fork, so that children share it
        found = socket.getaddrinfo(address.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the process before may linger
        listener.bind(where)
        listener.listen(WAITING)
    except (ImportError, OSError, ValueError) as error:
        log.error("this task can not be scraped at %s:%s: %s", address, port, error)
        return None
    log.info("metrics are at http://%s:%s/metrics", address, port)
    return listener


def serve(listener: socket.socket, collector: MetricsCollector) -> None:
    """Answer from a thread: the collector's numbers, the client library's of the process, and the user's program's."""
    from prometheus_client import REGISTRY, make_wsgi_app

    REGISTRY.register(collector)
    threading.Thread(target=answer, args=(listener, make_wsgi_app()), name="metrics", daemon=True).start()


def answer(listener: socket.socket, app: Any) -> None:
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    class ScrapeHandler(WSGIRequestHandler):
        timeout = PATIENCE_SECONDS

        def log_message(self, format: str, *args: object) -> None:
            """A scrape each 15 s is no news."""

    class ScrapeServer(ThreadingMixIn, WSGIServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that says nothing, or goes away, is its own trouble."""
            log.debug("a scrape by %s failed", client_address, exc_info=True)

    server = ScrapeServer(listener.getsockname()[:2], ScrapeHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    server.set_app(app)
    server.serve_forever()


def inherit_listener(listener: socket.socket | None) -> dict[str, str]:
    """Return the environment's part for a process that is started instead of forked, and inherits the socket."""
    if listener is None:
        return {}
    os.set_inheritable(listener.fileno(), True)
    return {LISTENER: str(listener.fileno())}

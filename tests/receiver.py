"""A receiver of Alertmanager's webhook, for tests of alerts."""

from __future__ import annotations

import http.server
import json
from typing import Any


def receiver(heard: list[tuple[str, str]]) -> type[http.server.BaseHTTPRequestHandler]:
    """Return what handles requests and adds each alert that comes to `heard`, as (status, alert)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.extend((alert["status"], alert["labels"]["alertname"]) for alert in message["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """What was heard is seen by the tests."""

    return Handler

"""The clouds' list calls on the loopback interface, answered from answers/, for Ansible's own inventory plugins."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote_plus

ANSWERS = Path(__file__).parent / "answers"
FILES = {"aws": "aws.xml", "gcp": "gcp.json", "openstack": "openstack.json"}


class Cloud(ThreadingHTTPServer):
    """One cloud, from its recorded answer."""

    daemon_threads = True

    def __init__(self, name: str, scratch: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = name
        self.answer = (ANSWERS / FILES[name]).read_text()
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._scratch = scratch
        self.certificate = scratch / "certificate.pem"
        if name == "gcp":
            self._make_certificate()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """What lets the plugin find this cloud in place of the real one. The inventory's file stays as it is."""
        if self.name == "aws":
            return {
                "AWS_ENDPOINT_URL": self.url,
                "AWS_ACCESS_KEY_ID": "nobody",
                "AWS_SECRET_ACCESS_KEY": "nothing",
                "AWS_CONFIG_FILE": "/dev/null",
                "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            }
        if self.name == "gcp":
            login = {"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"}
            (self._scratch / "login.json").write_text(json.dumps(login))
            return {
                "HTTPS_PROXY": self.url,
                "https_proxy": self.url,
                "NO_PROXY": "",
                "no_proxy": "",
                "REQUESTS_CA_BUNDLE": str(self.certificate),
                "GOOGLE_APPLICATION_CREDENTIALS": str(self._scratch / "login.json"),
            }
        clouds = {"mycloud": {"auth_type": "none", "compute_endpoint_override": f"{self.url}/v2.1"}}
        (self._scratch / "clouds.yaml").write_text(json.dumps({"clouds": clouds}))
        return {"OS_CLIENT_CONFIG_FILE": str(self._scratch / "clouds.yaml")}

    def drop(self, machine: str) -> None:
        """Take a machine away, as the cloud does when it is terminated."""
        if self.name == "aws":
            self.answer, count = re.subn(rf"<item><reservationId>.*>{machine}<.*\n", "", self.answer)
            assert count == 1
            return
        answer = json.loads(self.answer)
        machines = self._machines(answer)
        machines[:] = [each for each in machines if each["name"] != machine]
        self.answer = json.dumps(answer)

    def tag(self, machine: str, name: str, value: str | None) -> None:
        """Give a machine another tag, or take the tag away."""
        if self.name == "aws":
            new = "" if value is None else f"<item><key>{name}</key><value>{value}</value></item>"
            lines = self.answer.splitlines(keepends=True)
            tag = rf"<item><key>{name}</key><value>[^<]*</value></item>"
            self.answer = "".join(re.sub(tag, new, line) if f">{machine}<" in line else line for line in lines)
            return
        answer = json.loads(self.answer)
        for each in self._machines(answer):
            if each["name"] == machine:
                tags = each["labels" if self.name == "gcp" else "metadata"]
                tags.pop(name, None)
                tags.update({} if value is None else {name: value})
        self.answer = json.dumps(answer)

    def _machines(self, answer: dict) -> list[dict]:
        return answer["items"]["zones/europe-west3-b"]["instances"] if self.name == "gcp" else answer["servers"]

    def _make_certificate(self) -> None:
        names = "subjectAltName=DNS:www.googleapis.com,DNS:oauth2.googleapis.com"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=cloud"]
        command += ["-addext", names, "-keyout", str(self._scratch / "key.pem"), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(self.certificate, self._scratch / "key.pem")


class Handler(BaseHTTPRequestHandler):
    server: Cloud

    def do_CONNECT(self) -> None:
        """Be the proxy and the site behind it."""
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")
        self.handle_one_request()
        self.wfile.flush()
        self.close_connection = True

    def do_GET(self) -> None:
        self.server.asked.append(unquote_plus(self.path))
        if (
            self.path.startswith("/compute/v1/projects/my-project/aggregated/instances")
            or "/servers/detail" in self.path
        ):
            self._say(self.server.answer)
        elif self.path.rstrip("/") == "/v2.1":
            links = [{"rel": "self", "href": f"{self.server.url}/v2.1/"}]
            version = {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1", "links": links}
            self._say(json.dumps({"version": version}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = unquote_plus(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.asked.append(body)
        if self.path == "/token":
            self._say(json.dumps({"access_token": "x", "expires_in": 3600, "token_type": "Bearer"}))
        elif "Action=DescribeInstances" in body:
            self._say(self.server.answer)
        else:
            self.send_error(400)

    def _say(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/xml" if text.startswith("<") else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass

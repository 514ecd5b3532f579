"""Advisories in OSV's format: fetched once, and then answered from a file, as OSV's own service would.

The archive is OSV's export of the Python packages' advisories. `python -m supply.advisories` fetches it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from supply.locks import Pin

SOURCE = "https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip"
FILE = Path(".cache/advisories.zip")
# OSV's export has many thousands. Fewer are half a file, or another one.
FEWEST = 1000


class NoAdvisories(Exception):
    """There are none to compare with: nothing can be said of any package."""


class Advisories:
    """What an archive says, and which packages it was asked for."""

    def __init__(self, archive: Path, fewest: int = FEWEST) -> None:
        self.asked: set[Pin] = set()
        self._by_name: dict[str, list[Mapping[str, Any]]] = {}
        count, self.newest = 0, ""
        try:
            self.fetched = archive.stat().st_mtime
            with zipfile.ZipFile(archive) as entries:
                for name in entries.namelist():
                    advisory = json.loads(entries.read(name))
                    count += 1
                    self.newest = max(self.newest, advisory["modified"])
                    self._add(advisory)
        except FileNotFoundError as error:
            raise NoAdvisories(f"there is no {archive}: `make advisories` fetches it") from error
        except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
            raise NoAdvisories(f"{archive} is no archive of advisories ({error!r}): `make advisories`") from error
        if count < fewest:
            raise NoAdvisories(f"{archive} has {count} advisories; expected {fewest} at least: `make advisories`")
        self.newest_at = datetime.fromisoformat(self.newest).timestamp()

    def _add(self, advisory: Mapping[str, Any]) -> None:
        version = str(advisory.get("schema_version", "1.0.0"))
        if not version.startswith("1."):  # pip-audit would leave it out with a warning
            raise ValueError(f"{advisory.get('id')} is written in OSV's schema {version}, and 1 is known here")
        for affected in advisory.get("affected", ()):
            package = affected.get("package", {})
            if package.get("ecosystem") == "PyPI":
                listed = self._by_name.setdefault(canonicalize_name(package["name"]), [])
                if advisory not in listed:
                    listed.append(advisory)

    def query(self, name: str, version: str) -> list[Mapping[str, Any]]:
        """Return the advisories that a version is affected by, and remember that it was asked for."""
        name = canonicalize_name(name)
        self.asked.add((name, version))
        return [
            advisory
            for advisory in self._by_name.get(name, ())
            if any(
                canonicalize_name(affected["package"]["name"]) == name and is_affected(affected, version)
                for affected in advisory["affected"]
                if affected.get("package", {}).get("ecosystem") == "PyPI"
            )
        ]

    @contextmanager
    def served(self) -> Iterator[str]:
        """Answer on a port of this machine, as OSV's service does; gives the address."""
        advisories = self

        class QueryHandler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                found = advisories.query(asked["package"]["name"], asked["version"])
                body = json.dumps({"vulns": found} if found else {}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), QueryHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            server.server_close()


def is_affected(affected: Mapping[str, Any], version: str) -> bool:
    """Whether a version is among the affected ones, as OSV's schema defines it; yes where that is unknown."""
    try:
        mine = Version(version)
        if version in affected.get("versions", ()) or mine in set(map(_version, affected.get("versions", ()))):
            return True
        return any(
            _is_in_range(span.get("events", ()), mine)
            for span in affected.get("ranges", ())
            if span.get("type") == "ECOSYSTEM"
        )
    except (InvalidVersion, TypeError, AttributeError):
        return True


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None  # an old release's, which no lock pins


def _is_in_range(events: Any, mine: Version) -> bool:
    spans = [
        (Version("0" if value == "0" else value), kind)
        for event in events
        for kind, value in event.items()
        if kind in ("introduced", "fixed", "last_affected")
    ]
    inside = False
    for at, kind in sorted(spans, key=lambda span: span[0]):
        if kind == "introduced" and mine >= at:
            inside = True
        elif (kind == "fixed" and mine >= at) or (kind == "last_affected" and mine > at):
            inside = False
    return inside


def fetch(source: str = SOURCE, file: Path = FILE, fewest: int = FEWEST) -> Advisories:
    """Fetch the archive; one that can't be read never takes the place of the one before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    try:
        with urllib.request.urlopen(source, timeout=60) as answer, partial.open("wb") as stream:
            while part := answer.read(2**20):
                stream.write(part)
        advisories = Advisories(partial, fewest)
        os.replace(partial, file)  # noqa: PTH105
    except OSError as error:
        raise NoAdvisories(f"{source} can't be fetched: {error}. Fetch it elsewhere, and copy it to {file}") from error
    finally:
        partial.unlink(missing_ok=True)
    return advisories


def main() -> int:
    try:
        found = fetch()
    except NoAdvisories as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{FILE}: advisories up to {found.newest[:10]}, fetched {time.strftime('%Y-%m-%d %H:%M')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

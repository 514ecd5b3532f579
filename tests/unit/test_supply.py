"""What a release is made of, and what is known against its parts.

OSV's service and pip-audit's own database can't be had without the internet. The archive has OSV's format, made here.
`make audit`'s own part and its answers are real. What stands for pip-audit asks as it does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from supply import bom
from supply.advisories import Advisories, NoAdvisories, fetch, is_affected
from supply.audit import GREEN, UNKNOWN, VULNERABLE, audit, main
from supply.locks import pins_of
from tests.unit.stand_ins import put_program

LOCK = """\
# made by hand
my-tool==1.2 \\
    --hash=sha256:00
Other_Tool==2.0 \\
    --hash=sha256:00
windows-only==1.0 ; sys_platform == 'win32' \\
    --hash=sha256:00
"""
# As pip-audit asks OSV, with its exit codes; `MISSES` is what it skips, as it does without --strict.
STAND_IN = f"""#!{sys.executable}
import json, os, re, sys, urllib.request
arguments = sys.argv[1:]
assert "--strict" in arguments and "--require-hashes" in arguments, arguments
address, lock = (arguments[arguments.index(flag) + 1] for flag in ("--osv-url", "--requirement"))
found = 0
for name, version in re.findall(r"(?m)^([A-Za-z0-9_-]+)==([^ ]+) \\\\", open(lock).read()):
    if name == os.environ.get("MISSES"):
        continue
    name = re.sub("[-_.]+", "-", name).lower()
    query = json.dumps({{"package": {{"name": name, "ecosystem": "PyPI"}}, "version": version}}).encode()
    found += bool(json.load(urllib.request.urlopen(address, query)))
sys.exit(int(os.environ.get("ENDS_WITH", 1 if found else 0)))
"""


def advisory(name: str, events: Sequence[Mapping[str, str]] = (), **more: Any) -> dict[str, Any]:
    affected: dict[str, Any] = {"package": {"name": name, "ecosystem": "PyPI"}}
    affected["ranges"] = [{"type": "ECOSYSTEM", "events": list(events)}]
    affected["versions"] = more.pop("versions", [])
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"schema_version": "1.6.0", "id": f"X-{name}", "modified": now, "affected": [affected], **more}


class Place:
    def __init__(self, root: Path) -> None:
        self.lock, self.archive, self.tool = root / "cpu-3.11.txt", root / "advisories.zip", root / "pip-audit"
        self.lock.write_text(LOCK)
        put_program(self.tool, STAND_IN)
        self.tell(advisory("nobody", [{"introduced": "0"}]))

    def tell(self, *advisories: Mapping[str, Any]) -> None:
        with zipfile.ZipFile(self.archive, "w") as archive:
            for number, each in enumerate(advisories):
                archive.writestr(f"{number}.json", json.dumps(each))

    def audit(self, days: float = 7) -> int:
        return audit([self.lock], self.archive, days, self.tool, fewest=1)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_packages_that_no_advisory_names_are_green_with_the_datas_age(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    assert place.audit() == GREEN
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    assert capfd.readouterr().out.splitlines() == [
        f"advisories up to {today}, fetched 0.0 days ago",
        "2 packages of 1 locks were compared, and 0 are affected",
    ]


def test_a_package_that_one_names_is_told_with_the_lock_that_has_it(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    place.tell(advisory("other.tool", [{"introduced": "0"}, {"fixed": "2.1"}]))
    assert place.audit() == VULNERABLE
    assert "other-tool 2.0 is in cpu-3.11.txt" in capfd.readouterr().out


def test_without_data_nothing_is_green(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.archive.unlink()
    assert main([str(place.lock), "--advisories", str(place.archive), "--tool", str(place.tool)]) == UNKNOWN
    errors = capsys.readouterr().err
    assert errors.startswith("nothing was compared: there is no")
    assert "`make advisories` fetches it" in errors


@pytest.mark.parametrize("of", ["the file", "the newest advisory"])
def test_old_data_are_not_green(of: str, place: Place) -> None:
    old = time.time() - 8 * 86400
    if of == "the file":
        os.utime(place.archive, (old, old))
    else:
        place.tell(advisory("nobody", modified=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(old))))
    with pytest.raises(NoAdvisories, match="expected 7 at most"):
        place.audit()
    assert place.audit(days=9) == GREEN


@pytest.mark.parametrize("content", [b"", b"half a file", None])
def test_data_that_can_not_be_read_are_not_green(content: bytes | None, place: Place) -> None:
    if content is None:
        place.tell({"id": "without a date"})
    else:
        place.archive.write_bytes(content)
    with pytest.raises(NoAdvisories, match="is no archive of advisories"):
        place.audit()


def test_few_advisories_are_not_green(place: Place) -> None:
    with pytest.raises(NoAdvisories, match="has 1 advisories; expected 1000 at least"):
        audit([place.lock], place.archive, 7, place.tool)


def test_a_schema_that_pip_audit_passes_over_is_not_green(place: Place) -> None:
    place.tell(advisory("my-tool", [{"introduced": "0"}], schema_version="2.0.0"))
    with pytest.raises(NoAdvisories, match="written in OSV's schema 2"):
        place.audit()


def test_a_package_that_was_skipped_is_not_green(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MISSES", "my-tool")
    assert place.audit() == UNKNOWN
    assert "not compared: my-tool 1.2" in capfd.readouterr().err


@pytest.mark.parametrize(("ends_with", "code"), [("0", UNKNOWN), ("1", VULNERABLE), ("3", UNKNOWN)])
def test_a_tool_that_does_not_say_what_the_data_say_is_not_green(
    ends_with: str, code: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.tell(advisory("my-tool", [{"introduced": "0"}]))
    monkeypatch.setenv("ENDS_WITH", ends_with)
    assert place.audit() == code


def test_a_tool_that_is_not_there_is_not_green(place: Place) -> None:
    place.tool.unlink()
    assert place.audit() == UNKNOWN


def test_no_lock_is_not_green(place: Place) -> None:
    place.lock.write_text("")
    with pytest.raises(NoAdvisories, match="there is nothing to compare"):
        place.audit()


@pytest.mark.parametrize(
    ("version", "events", "versions", "yes"),
    [
        ("1.0", [{"introduced": "0"}], [], True),
        ("1.0", [{"introduced": "0"}, {"fixed": "1.0"}], [], False),
        ("0.9", [{"introduced": "0"}, {"fixed": "1.0"}], [], True),
        ("1.0", [{"introduced": "1.0"}, {"last_affected": "1.0"}], [], True),
        ("1.1", [{"introduced": "1.0"}, {"last_affected": "1.0"}], [], False),
        ("2.5", [{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "2.0"}, {"fixed": "3.0"}], [], True),
        ("1.5", [{"fixed": "3.0"}, {"introduced": "2.0"}, {"fixed": "1.0"}, {"introduced": "0"}], [], False),
        ("1.10", [{"introduced": "1.9"}, {"fixed": "1.11"}], [], True),
        ("1.0", [], ["1.0.0"], True),
        ("1.0", [], ["0.9", "not a version"], False),
        ("1.0", [{"introduced": "nonsense"}], [], True),
    ],
)
def test_a_version_is_affected_as_osvs_schema_says(
    version: str, events: list[dict[str, str]], versions: list[str], yes: bool
) -> None:
    (affected,) = advisory("x", events, versions=versions)["affected"]
    assert is_affected(affected, version) is yes


def test_the_service_answers_as_osvs(place: Place) -> None:
    place.tell(advisory("my-tool", [{"introduced": "0"}, {"fixed": "2"}]), advisory("npm-thing"))
    advisories = Advisories(place.archive, fewest=1)
    with advisories.served() as address:
        for version, ids in (("1.2", ["X-my-tool"]), ("2", [])):
            query = {"package": {"name": "my-tool", "ecosystem": "PyPI"}, "version": version}
            with urllib.request.urlopen(address, json.dumps(query).encode()) as answer:
                assert [each["id"] for each in json.load(answer).get("vulns", [])] == ids


def test_what_is_fetched_takes_the_old_ones_place_only_when_it_is_whole(place: Place, tmp_path: Path) -> None:
    kept = tmp_path / "kept.zip"
    fetch(place.archive.as_uri(), kept, fewest=1)
    before = kept.read_bytes()
    place.archive.write_bytes(b"half a file")
    with pytest.raises(NoAdvisories):
        fetch(place.archive.as_uri(), kept, fewest=1)
    place.archive.unlink()
    with pytest.raises(NoAdvisories, match="can't be fetched"):
        fetch(place.archive.as_uri(), kept, fewest=1)
    assert kept.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("kept*")) == ["kept.zip"]


def test_every_pin_of_this_platform_is_read(place: Place) -> None:
    assert list(pins_of([place.lock])) == [("my-tool", "1.2"), ("other-tool", "2.0")]
    found = pins_of(sorted(Path("locks").glob("*.txt")))
    assert any(name == "tensorflow" for name, _ in found)
    assert len(found) > 100


BILL = f"""#!{sys.executable}
import json, sys
assert "--output-reproducible" in sys.argv
components = [{{"bom-ref": "requirements-L2", "name": "my-tool", "version": "1.2", "description": "the lock's line"}}]
print(json.dumps({{"bomFormat": "CycloneDX", "metadata": {{"tools": {{}}}}, "components": components}}))
"""


def test_a_release_has_a_bill_for_each_lock_that_names_it(place: Place, tmp_path: Path) -> None:
    tool = put_program(tmp_path / "cyclonedx-py", BILL)
    (path,) = bom.write("0123456789ab", [place.lock], tmp_path / "cache", tool)
    assert path.name == "0123456789ab.cpu-3.11.cdx.json"
    bill = json.loads(path.read_text())
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (
        "psfleet",
        "0123456789ab",
    )
    assert bill["components"] == [{"bom-ref": "requirements-L2", "name": "my-tool", "version": "1.2"}]
    assert bill["dependencies"][0] == {"ref": "psfleet-0123456789ab", "dependsOn": ["requirements-L2"]}
    first = path.read_bytes()
    path.unlink()
    bom.write("0123456789ab", [place.lock], tmp_path / "cache", tool)
    assert path.read_bytes() == first


def test_a_release_has_the_bills_of_its_own_locks() -> None:
    names = [path.name for path in bom.locks_for({}, gpu=False)]
    assert names == [f"cpu-no-gpu-3.{minor}.txt" for minor in (10, 11, 12, 13)]
    names = [path.name for path in bom.locks_for({}, gpu=True)]
    assert names == [f"{kind}-3.{minor}.txt" for kind in ("cpu", "cuda") for minor in (10, 11, 12, 13)]

"""A file that is written in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet.files import replace_file


@pytest.mark.parametrize(
    ("before", "asked", "mode"), [(0o640, None, 0o640), (0o644, 0o600, 0o600), (None, 0o600, 0o600)]
)
def test_a_file_keeps_its_mode_and_its_link_or_gets_the_mode_that_is_asked_for(
    tmp_path: Path, before: int | None, asked: int | None, mode: int
) -> None:
    path, link = tmp_path / "hosts.yml", tmp_path / "link.yml"
    link.symlink_to(path)
    if before is not None:
        path.write_text("before")
        path.chmod(before)
    umask = os.umask(0o077)
    try:
        replace_file(link, b"after", asked)
    finally:
        os.umask(umask)
    assert link.is_symlink()
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == mode
    assert sorted(tmp_path.iterdir()) == [path, link]

import os
from pathlib import Path

import pytest
from reserved_ports import keep, plan, read_ports, write_ports


@pytest.mark.parametrize("text", ["", "2222", "2222,2400-2402", "1-3,9,65535"])
def test_ports_are_written_as_they_are_read(text: str) -> None:
    assert write_ports(read_ports(text)) == text


def test_others_ports_stay_and_old_ones_of_ours_go() -> None:
    reserved, file = plan("8080,9000-9001", "", [2400, 2401])
    assert reserved == "2400-2401,8080,9000-9001"
    assert plan(reserved, file, [2400, 2401]) == (reserved, file)
    moved, text = plan(reserved, file, [2500])
    assert moved == "2500,8080,9000-9001"
    assert plan(moved, text, []) == ("8080,9000-9001", "")


def test_the_file_is_readable_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        keep(tmp_path / "f", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644
    keep(tmp_path / "f", "")
    assert list(tmp_path.iterdir()) == []

"""The daily loop's bench, as far as it needs no lab."""

from __future__ import annotations

import pytest

from bench import loop


def test_a_start_of_simulated_hosts_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    loop.simulate([3])
    head, *_, row = capsys.readouterr().out.splitlines()
    assert "processor, s" in head
    assert row.startswith("| 3 |")

"""Whose rights the units of long-lived services have: a task or a service as root would open the whole host."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

ROLES = Path(__file__).parents[2] / "roles"
EXPECTED = {
    "trainer/templates/trainer@.service.j2": ("trainer", "trainer"),
    "tensorboard/templates/tensorboard.service.j2": ("trainer", "trainer"),
    "node_exporter/templates/psfleet-gpu-metrics.service.j2": ("prometheus", None),
}


@pytest.mark.parametrize("template", EXPECTED)
def test_a_service_has_its_own_user_and_no_way_to_more_rights(template: str) -> None:
    unit = configparser.RawConfigParser(strict=False, interpolation=None, allow_no_value=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    lines = (ROLES / template).read_text().splitlines()
    unit.read_string("\n".join(line for line in lines if not line.startswith(("{", "#"))))
    service = unit["Service"]
    assert (service.get("User"), service.get("Group")) == EXPECTED[template]
    assert service.get("NoNewPrivileges") == "yes"
    assert service.get("ProtectSystem") == "strict"


def test_no_other_unit_names_a_user() -> None:
    """One that does belongs into the table above; the others are short acts of root."""
    found = {
        path.relative_to(ROLES).as_posix()
        for path in ROLES.rglob("*.service.j2")
        if any(line.startswith(("User=", "DynamicUser=")) for line in path.read_text().splitlines())
    }
    assert found == set(EXPECTED)

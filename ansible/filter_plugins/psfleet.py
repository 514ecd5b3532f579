"""The filters of psfleet's playbooks and roles: fleet/site/filters.py has them by their names."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).parents[1] / "kit.py"))
from fleet.site.filters import FILTERS  # noqa: E402


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return FILTERS

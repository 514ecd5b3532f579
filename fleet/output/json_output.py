"""What the verbs answer with `--json`: fleet/site/schema/answers.json describes each, docs/json.md tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.run.records import to_json

# Within a version keys are only added. What else changes raises it.
VERSION = 1


def render(verb: str, record: Mapping[str, Any], *, on_a_line: bool = False) -> str:
    """Return one answer of a verb as JSON; on a line, where more follow."""
    return to_json({"version": VERSION, "verb": verb, **record}, indent=None if on_a_line else 1)

"""A run's checkpoints as `checkpoints` lists them: what is known of each, and why it is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.core.settings.config import Config, ConfigError
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.run.retention import Retention
from trainer.telemetry.status import lay_out, render_metrics, render_number, render_time


def read_checkpoints(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return what is known of each checkpoint that counts, oldest first; `kept` says why, by the run's own settings."""
    saved = directory.catalogue.saved()
    rules = rules_of(directory)
    reasons = rules.reasons(saved) if rules else {}
    return [dataclasses.asdict(each) | {"kept": reasons.get(each.step, [])} for each in saved]


def rules_of(directory: RunDirectory) -> Retention | None:
    """Return the rules of the settings that the run was last trained with; None where they can't be read."""
    try:
        settings = (read_record(directory.settings) or {}).get("settings") or {}
        known = {field.name for field in dataclasses.fields(Config)}
        return Retention.from_config(Config.from_dict({key: value for key, value in settings.items() if key in known}))
    except (ConfigError, ValueError):
        return None


def describe_checkpoints(found: Sequence[Mapping[str, Any]]) -> str:
    """Lay checkpoints out as a table, each as JSON has it; the release of a host may know less of one."""
    rows = [("STEP", "SAVED", "MIB", "TRAINING LOSS", "EVALUATION", "KEPT AS")]
    for each in found:
        loss, size = each.get("loss"), f"{each.get('size', 0) / 2**20:.1f}"
        rows.append(
            (
                str(each["step"]),
                render_time(each["created"]),
                size,
                "" if loss is None else render_number(loss),
                render_metrics(each.get("evaluation") or {}),
                ", ".join(each.get("kept") or []),
            )
        )
    return lay_out(rows)

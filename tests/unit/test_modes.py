"""What makes a file on a host says its mode: root's umask may be 077 (docs/decisions/0194)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKERS = ("assemble", "blockinfile", "copy", "file", "get_url", "lineinfile", "replace", "template", "unarchive")


def tasks(items: Any) -> Iterator[dict[str, Any]]:
    for item in items if isinstance(items, list) else []:
        yield item
        for part in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
            yield from tasks(item.get(part))


def test_every_task_that_makes_a_file_says_its_mode() -> None:
    files = [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("roles/*/handlers/*.yml"), *ROOT.glob("ansible/**/*.yml")]
    without, seen = [], 0
    for file in files:
        for task in tasks(yaml.safe_load(file.read_text())):
            for maker in MAKERS:
                arguments = task.get(f"ansible.builtin.{maker}")
                if isinstance(arguments, dict) and arguments.get("state") not in ("absent", "link"):
                    seen += 1
                    without += [] if "mode" in arguments else [f"{file}: {task.get('name')}"]
            for each in task.get("write_files", {}).get("files", ()):
                seen += 1
                without += [] if "mode" in each else [f"{file}: {each['dest']}"]
    assert without == []
    assert seen > 50

"""docs/design.md names each thread that the trainer starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What reads another process's output with threads; it is no coordinator.
ELSEWHERE = {ROOT / "trainer/tasks/local_supervisor.py", ROOT / "trainer/tasks/build_proof.py"}


def started() -> Iterator[str]:
    """Yield the names of the threads that the sources start."""
    for path in sorted(set((ROOT / "trainer").rglob("*.py")) - ELSEWHERE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func).rpartition(".")[2]
            names = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            if function == "in_thread":
                names = node.args[:1]
            elif function != "Thread":
                continue
            assert names, f"{path.name}:{node.lineno}: give the thread a name"
            yield from (str(name.value) for name in names if isinstance(name, ast.Constant))


def test_each_thread_stands_in_the_design_and_each_of_the_design_is_started() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("## Threads of the coordinator")[2]
    page = page.partition("\n## ")[0]
    own = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    of_servers = {"run", "connections", "journal"}
    assert own | of_servers == set(started())
    assert all(f"`{name}`" in page for name in of_servers)

"""What the pages name is there: files and modules of the repository, verbs with their flags, and make's targets.

Links have a test of their own (test_docs.py); a module that moved leaves its name in sentences and examples.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(
    r"(?<![\w./-])((?:ansible|bench|docs|fleet|lab|roles|supply|tests|trainer)/[\w./*-]+\.(?:py|yml|j2|md|sh|html))\b"
)
MODULE = re.compile(r"-m ((?:bench|fleet|lab|supply|trainer)(?:\.\w+)*)")
SHORT_NAME = re.compile(r"`([a-z_]+\.py)`")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
VERB = re.compile(r"^[ `$]*(?:fab|psfleet) ([a-z][a-z-]*)([^`#|&;\n]*)", re.MULTILINE)
TARGET = re.compile(r"^[ `$]*make ([a-z][\w-]*)", re.MULTILINE)
OWN_TO_PSFLEET = {"init", "lock", "playbook"}


def tracked(pattern: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [file for file in listed if (ROOT / file).exists()]


PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in tracked("*.md")}
PYTHON = {Path(file).name for file in tracked("*.py")}


@cache
def flags_of_verbs() -> dict[str, set[str]]:
    """Return each verb's flags as docs/verbs.md, which is made from the verbs, lists them."""
    of_all, *sections = PAGES["docs/verbs.md"].split("\n## `")
    shared = set(re.findall(r"--[a-z-]+", of_all))
    return {section.partition("`")[0]: shared | set(re.findall(r"--[a-z-]+", section)) for section in sections}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_are_there(page: str) -> None:
    wrong = [file for file in FILE.findall(PAGES[page]) if not any(ROOT.glob(file))]
    wrong += [name for name in SHORT_NAME.findall(PAGES[page]) if name not in PYTHON]
    for module in MODULE.findall(PAGES[page]):
        path = ROOT / module.replace(".", "/")
        if not (path.is_dir() or path.with_suffix(".py").exists()):
            wrong.append(f"python -m {module}")
    assert wrong == []


@cache
def targets() -> set[str]:
    lines = re.findall(r"^([a-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return {target for line in lines for target in line.split()}


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_there(page: str) -> None:
    flags, wrong = flags_of_verbs(), []
    for code in CODE.findall(PAGES[page]):
        wrong += [f"make {target}" for target in TARGET.findall(code) if target not in targets()]
        for verb, words in VERB.findall(code):
            if verb in flags:
                missing = set(re.findall(r"(?<= )--[a-z-]+", words)) - flags[verb]
                wrong += [f"fab {verb} {flag}" for flag in missing]
            elif verb not in OWN_TO_PSFLEET:
                wrong.append(f"fab {verb}")
    assert wrong == []

"""Stages the docs site in `.cache/site`, its pages and its configuration; `make docs` builds it.

The pages lie where they lie in the repository, so that their links hold. A link to any other file of the repository
leads to a page made of that file, since the site has no repository beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".cache" / "site"
STAGE = SITE / "pages"
FENCE = re.compile(r"^( *(```+|~~~+).*?^ *\2 *$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[(?:docs/)?[\w-]+\.md)?(\]\()([^()\s#]+)(#[^()\s]*)?\)")
GLUED_LIST = re.compile(r"(?m)^(?![-*|#>]|\d+\. )(\S.*)\n(?=(?:[-*]|\d+\.) )")
LANGUAGES = {".py": "python", ".yml": "yaml", ".json": "json", ".sh": "sh", ".toml": "toml"}
PICTURES = {".png", ".svg"}
# In the repository a link leads to a recorded run; in the site to the page that the trainer makes of it.
RUNS = "tests/browser/recorded/runs/"
HEADS = {"fleet/site/schema/page.md"}  # text of a page that is made from it


def tracked() -> list[str]:
    """Return the repository's files, as paths from its root; new ones that git does not ignore too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(path for path in set(listed) if path and (ROOT / path).is_file())


def stage() -> None:
    """Write all pages, and what they link to. What an earlier call wrote is removed."""
    shutil.rmtree(STAGE, ignore_errors=True)
    files = tracked()
    pages = [path for path in files if path.endswith(".md") and path not in HEADS]
    wanted: set[str] = set()
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        parts = FENCE.split(text)
        # The pattern has two groups: a block of code, and its fence again.
        prose = [part if number % 3 else _relink(page, _part_lists(part), wanted) for number, part in enumerate(parts)]
        _write(_place(page), "".join(part for number, part in enumerate(prose) if number % 3 != 2))
    for path in sorted(wanted - set(pages)):
        _write_source(path, files)
    shutil.copyfile(ROOT / "docs" / "mkdocs.yml", SITE / "mkdocs.yml")
    shutil.copyfile(ROOT / "docs" / "site.css", STAGE / "site.css")


def _place(page: str) -> str:
    """Return where a page lies in the site: a README is its folder's first page."""
    return str(PurePosixPath(page).with_name("index.md")) if PurePosixPath(page).name == "README.md" else page


def _part_lists(text: str) -> str:
    """Return a text with an empty line above each list: GitHub needs none below a sentence, and the site does."""
    return GLUED_LIST.sub(r"\1\n\n", text)


def _relink(page: str, text: str, wanted: set[str]) -> str:
    """Return a page's text with its links as the site has them, and note what they need."""

    def replace(match: re.Match[str]) -> str:
        name, target, anchor = match[1] or "", match[3], match[4] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(PurePosixPath(page).parent / target)
        if (ROOT / path / "README.md").is_file():
            path = f"{path}/README.md"
        wanted.add(path)
        if name and path.endswith(".md"):  # on a site a page goes by its title
            name = f"[{_title(path)}"
        place = _place(path) if path.endswith(".md") else path
        if path.startswith(RUNS):
            place = f"examples/{PurePosixPath(path).name}.html"
        elif not path.endswith(".md") and PurePosixPath(path).suffix not in PICTURES:
            place = f"source/{path}.md"
        return f"{name}]({os.path.relpath(place, PurePosixPath(_place(page)).parent)}{anchor})"

    return LINK.sub(replace, text)


def _title(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _write_source(path: str, files: list[str]) -> None:
    """Write the page of a file that is no page itself, or of a folder; raises FileNotFoundError for neither."""
    if path.startswith(RUNS):
        name = PurePosixPath(path).name
        command = [sys.executable, "-m", "trainer", "report", "--shared-dir", str((ROOT / RUNS).parent)]
        made = subprocess.run([*command, "--run", name], cwd=ROOT, capture_output=True, text=True, check=True)
        _write(f"examples/{name}.html", made.stdout)
        return
    if PurePosixPath(path).suffix in PICTURES:
        (STAGE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, STAGE / path)
        return
    if (ROOT / path).is_dir():
        inside = [f"- `{each.removeprefix(path + '/')}`" for each in files if each.startswith(f"{path}/")]
        content = "\n".join(inside)
    else:
        text = (ROOT / path).read_text(encoding="utf-8")
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall(r"`+", text)), 3)
        content = f"{fence}{LANGUAGES.get(PurePosixPath(path).suffix, '')}\n{text}{fence}"
    _write(f"source/{path}.md", f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{content}\n")


def _write(place: str, text: str) -> None:
    (STAGE / place).parent.mkdir(parents=True, exist_ok=True)
    (STAGE / place).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    stage()

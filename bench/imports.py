"""Which module imports which, read from the sources: for `make shape` and for the test of the imports.

Each `import` of the sources counts, wherever it stands: in a function, or for the types alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From the bottom up: the repository's folders. A role's modules are sent to hosts, and import none of it.
FOLDERS = ("roles", "trainer", "fleet", "supply", "lab", "ansible", "fabfile", "bench", "tests")


def imports(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package, each with those of its own package that it imports."""
    return graph_of({module_name(path, package): path for path in sorted(package.rglob("*.py"))})


def graph_of(sources: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules, each with those of them that it imports."""
    return {
        module: {known for name in imported(path) if (known := longest_prefix(name, sources)) not in ("", module)}
        for module, path in sources.items()
    }


def module_name(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """Yield what a source imports; of `from a import b` that is a.b, which may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or "tests" in path.parts, f"{path}: write the whole name of what is imported"
            folders = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            yield from (".".join([*folders, str(node.module), alias.name]) for alias in node.names)


def longest_prefix(name: str, known: Mapping[str, object]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return a cycle for each module that is found to lead back to itself."""
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(path: list[str]) -> None:
        for name in sorted(graph[path[-1]]):
            if name in path:
                found.append([*path[path.index(name) :], name])
            elif name not in done:
                follow([*path, name])
        done.add(path[-1])

    for name in sorted(graph):
        if name not in done:
            follow([name])
    return found


def whole() -> dict[str, set[str]]:
    """Return every module of the repository, by its path."""
    found = {"fabfile": ROOT / "fabfile.py"}
    for folder in FOLDERS:
        found |= {module_name(path, ROOT / folder): path for path in sorted((ROOT / folder).rglob("*.py"))}
    return graph_of(found)

"""Dependencies between modules point one way, and never in a circle: in the trainer, in fleet, and in the repository.

Each `import` of the sources counts, wherever it stands: in a function, or for the types alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench.imports import FOLDERS, ROOT, cycles, imports, whole

# From the bottom up: a package's folders, and at the top what users start and name. Then the same within folders.
# On the level of OTHERS is what no level names.
OTHERS = "*"
LEVELS = {
    "trainer": (
        ("core",),
        ("run",),
        ("telemetry",),
        ("report", "process"),
        ("cluster",),
        ("training",),
        ("tasks",),
        (
            "__main__",
            "check",
            "command_line",
            "drill",
            "examples",
            "export_run",
            "gpu_check",
            "keep_queue",
            "keep_run",
            "testing",
        ),
    ),
    "trainer.core": (("settings",), (OTHERS,)),
    "trainer.run": ((OTHERS,), ("saves", "selections"), ("upkeep",)),
    "trainer.cluster": ((OTHERS,), ("reach",), ("members",)),
    "trainer.training": (
        ("tf_internals", OTHERS),
        ("data",),
        ("measures",),
        ("updates",),
        ("forgotten", "metric_uses"),
        ("tables", "keras", "exports"),
        ("handover",),
        ("steps",),
        ("initial_weights",),
        ("loop", "evaluation"),
    ),
    "fleet": (
        ("output", "signals", "files"),
        ("errors",),
        ("places",),
        ("site",),
        ("hosts",),
        ("rollout", "planning", "render"),
        ("status", "bundle"),
        ("doctor",),
        ("actions",),
        ("verbs", "drills"),
        ("command_line",),
        ("program", "init", "host_locks", "new_site"),
    ),
}
HEAVY = ("tensorflow", "keras", "tf_keras", "numpy")


def level(module: str, folder: str) -> int:
    part = module.removeprefix(f"{folder}.").split(".")[0]
    level_of = {name: number for number, names in enumerate(LEVELS[folder]) for name in names}
    found = level_of.get(part, level_of.get(OTHERS))
    assert found is not None, f"{module}: say in tests/unit/test_imports.py, LEVELS, on which level {part} stands"
    return found


def arrows_up(graph: Mapping[str, set[str]], folder: str = "trainer") -> list[str]:
    inside = {module for module in graph if module.startswith(f"{folder}.")}
    arrows = [(a, b) for a in inside for b in graph[a] & inside]
    return [f"{a} imports {b}, which stands above it" for a, b in sorted(arrows) if level(a, folder) < level(b, folder)]


GRAPH = imports(ROOT / "trainer") | imports(ROOT / "fleet")
WHOLE = whole()
COMMANDS = [module for module in WHOLE if module.startswith(("fabfile", "fleet.command_line"))]


@pytest.mark.parametrize("folder", LEVELS)
def test_no_import_points_up(folder: str) -> None:
    assert arrows_up(GRAPH, folder) == []


def test_each_module_of_the_verbs_is_a_verb() -> None:
    """Its flags stand in fleet/command_line. What several verbs need is in fleet/actions, or below it."""
    verbs = {module for module in WHOLE if module.startswith("fleet.verbs.")}
    assert verbs == {name for module in COMMANDS for name in WHOLE[module] if name.startswith("fleet.verbs.")}


def test_core_imports_no_tensorflow() -> None:
    """Nor a part of it: the control machine has none, and a process forks before it loads it."""
    sources = (ROOT / "trainer" / "core").rglob("*.py")
    heavy = {name for path in sources for name in at_import(path) if name.partition(".")[0] in HEAVY}
    assert heavy == set()


def test_what_unit_tests_import_needs_no_tensorflow() -> None:
    """`make unit` runs where the tools of the control machine alone are."""
    todo = [path for path in (ROOT / "tests" / "unit").rglob("*.py") if path.name != Path(__file__).name]
    seen, heavy = set(todo), set()
    while todo:
        path = todo.pop()
        for name in at_import(path):
            if name.partition(".")[0] in HEAVY:
                heavy.add(f"{path.relative_to(ROOT)} imports {name}")
            place = ROOT / name.replace(".", "/")
            new = {each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()} - seen
            seen |= new
            todo += new
    assert heavy == set()


def at_import(path: Path) -> Iterator[str]:
    """Yield what a source imports when it is imported itself: not in a function, nor for types alone."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, ast.FunctionDef) and not is_for_types:
            todo += ast.iter_child_nodes(node)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(GRAPH) == []


def test_no_folder_imports_one_above_it() -> None:
    arrows = [(a, b) for a, names in WHOLE.items() for b in names]
    height = {name: number for number, name in enumerate(FOLDERS)}
    assert [f"{a} imports {b}" for a, b in arrows if height[a.split(".")[0]] < height[b.split(".")[0]]] == []


def test_nothing_in_the_repository_imports_in_a_circle() -> None:
    assert cycles(WHOLE) == []


def test_one_place_edits_where_python_looks() -> None:
    """For Ansible's plugins. A process of the trainer sets it as a whole, for the program that it becomes."""
    edit = re.compile(r"^\s*sys\.path\.(?:insert|append|extend)\(", re.MULTILINE)
    found = [module for module in WHOLE if not module.startswith("tests.") and edit.search(text_of(module))]
    assert found == ["ansible.kit"]


def text_of(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", LEVELS)
def test_each_level_is_of_something_that_exists(folder: str) -> None:
    names = {f"{folder}.{name}" for names in LEVELS[folder] for name in names if name != OTHERS}
    assert names <= {".".join(module.split(".")[: folder.count(".") + 2]) for module in GRAPH}


@pytest.mark.parametrize(
    "source",
    [
        "from trainer.training import fit",
        "import trainer.training.fit",
        "def f():\n    from trainer.training.fit import train_with_fit",
        "if TYPE_CHECKING:\n    from trainer.training.fit import train_with_fit",
    ],
)
def test_what_points_up_is_found_wherever_it_stands(tmp_path: Path, source: str) -> None:
    for name, text in {"run/records.py": source, "training/fit.py": ""}.items():
        path = tmp_path / "trainer" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    assert arrows_up(imports(tmp_path / "trainer")) == [
        "trainer.run.records imports trainer.training.fit, which stands above it"
    ]


def test_what_points_up_within_a_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "trainer" / "training"
    for name, text in {"data/input.py": "from trainer.training.steps import runner", "steps/runner.py": ""}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / name).with_name("__init__.py").touch()
    assert arrows_up(imports(tmp_path / "trainer"), "trainer.training") == [
        "trainer.training.data.input imports trainer.training.steps.runner, which stands above it"
    ]


def test_an_arrow_up_in_fleet_is_found() -> None:
    graph: dict[str, set[str]] = {
        "fleet.hosts.run": {"fleet.verbs.stop", "fleet.errors"},
        "fleet.verbs.stop": {"fleet.hosts.run"},
        "fleet.errors": set(),
    }
    assert arrows_up(graph, "fleet") == ["fleet.hosts.run imports fleet.verbs.stop, which stands above it"]


def test_a_circle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c", "b"]]

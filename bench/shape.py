"""The shape of the repository: how long its parts are, and how plain its words.

`make shape` prints a row for each figure. No figure is a limit: the table shows where the code and pages drift.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator

from bench.imports import ROOT, cycles, whole

LONG_FUNCTION, LONG_MODULE, MANY_ATTRIBUTES, LONG_SENTENCE = 40, 400, 10, 30
RECORDS = {"dataclass", "NamedTuple", "TypedDict", "Enum", "Protocol"}
RETIRED = (
    *("anew", "shall", "whoever", "whomever", "somebody", "past using", "who scrapes", "for who", "of before"),
    *("mends", "mended", "mending", "mend"),
    *("nobody has told", "told nothing", "told of", "must be there"),
    "rehearsal",
    "scene",
    "scenes",
)
# A word between quotes is named, and not used. Words of a name have `_` between them.
WORDS = "|".join(RETIRED).replace(" ", "[ _]")
RETIRED_WORD = re.compile(rf"([\"`'])(?:{WORDS})\1|(?<![^\W_])({WORDS})(?![^\W_])", re.IGNORECASE)
SYS_PATH = re.compile(r"^\s*sys\.path(?:\.(?:insert|append|extend)\(|\[.*\] = | \+?= )", re.MULTILINE)
READING_PATH = re.compile(r"(?:docs|roles)/[^/]+/README\.md|docs/[^/]+\.md|docs/decisions/[^/]+\.md|README\.md")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lengths(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each function's lines, without its decorators, and its name."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares, or that its methods set on `self`."""
    targets = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
    declared = {each.id for each in targets if isinstance(each, ast.Name)}
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return declared | {each.attr for each in stored if ast.unparse(each.value) == "self"}


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class only holds values: its decorators or bases say so."""
    return any(RECORDS & set(re.findall(r"\w+", ast.unparse(each))) for each in [*node.decorator_list, *node.bases])


def interface(tree: ast.AST) -> list[str]:
    """Return the annotations of all parameters and results of a module's functions."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, Function):
            of = node.args
            arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))]
            found += [*(each.annotation for each in arguments), node.returns]
    return [ast.unparse(each) for each in found if each is not None]


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose: without code blocks, headings and tables."""
    prose = re.sub(r"(?m)^\s*```[\s\S]*?^\s*```|^#.*$|^\s*\|.*$", "\n", text)
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", prose)
    return [each for block in blocks for each in re.split(r"(?<=[.!?])\s+", block.strip()) if words(each)]


def cells(text: str) -> list[str]:
    """Return the cells of a page's tables."""
    rows = (line.strip() for line in text.splitlines() if line.lstrip().startswith("|"))
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|")) if words(cell)]


def words(text: str) -> int:
    """Count words; a link counts as its text, and a sign by itself not at all."""
    return sum(any(map(str.isalnum, each)) for each in re.sub(r"\]\([^)]*\)", "]", text).split())


def retired(text: str) -> list[str]:
    """Return the words of a text that plain English has better ones for (CONTRIBUTING.md)."""
    return [used for _, used in RETIRED_WORD.findall(text) if used]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}, {100 * part / max(whole, 1):.1f} %"


def over(limit: int, found: list[tuple[int, str]]) -> str:
    """Say how many are over a limit, and which is the longest."""
    return f"{sum(size > limit for size, _ in found)}; longest {max(found, default=(0, '-'))}"


def table(texts: dict[str, str]) -> dict[str, str]:
    """Return each measure with its figure, of the repository's texts by their paths."""
    python = {path: text for path, text in texts.items() if path.endswith(".py")}
    product = {path: text for path, text in python.items() if not path.startswith("tests/")}
    trees = {path: ast.parse(text) for path, text in product.items()}
    functions = [(size, f"{path}:{name}") for path, tree in trees.items() for size, name in lengths(tree)]
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = [(len(attributes(node)), node.name) for node in classes if not is_record(node)]
    faces = [each for path, tree in trees.items() if path.startswith("trainer/") for each in interface(tree)]
    pages = [text for path, text in texts.items() if READING_PATH.fullmatch(path)]
    prose, tabled = [[each for text in pages for each in split(text)] for split in (sentences, cells)]
    return {
        f"functions over {LONG_FUNCTION} lines": over(LONG_FUNCTION, functions),
        f"modules over {LONG_MODULE} lines": over(LONG_MODULE, [(t.count("\n"), path) for path, t in product.items()]),
        f"classes over {MANY_ATTRIBUTES} attributes, no records": over(MANY_ATTRIBUTES, kinds),
        "Any in the trainer's interfaces": share(sum("Any" in re.findall(r"\w+", each) for each in faces), len(faces)),
        "edits of sys.path": str(sum(len(SYS_PATH.findall(text)) for text in python.values())),
        "product lines": f"{sum(text.count(chr(10)) for text in product.values()):,}",
        "test lines": f"{sum(text.count(chr(10)) for path, text in python.items() if path not in product):,}",
        "words on the reading path": f"{sum(len(text.split()) for text in pages):,}",
        f"sentences over {LONG_SENTENCE} words": share(sum(words(each) > LONG_SENTENCE for each in prose), len(prose)),
        f"cells over {LONG_SENTENCE} words": share(sum(words(each) > LONG_SENTENCE for each in tabled), len(tabled)),
        "retired words": str(sum(len(retired(text)) for text in texts.values())),
    }


def tracked() -> dict[str, str]:
    """Return the repository's texts as they lie in the working tree, by their paths, without what others wrote."""
    others = [f":!{each}" for each in ("locks/", "*LICENSE", "*.min.js", "*.png", "*.npz")]
    listed = subprocess.check_output(["git", "ls-files", ".", *others], cwd=ROOT, text=True)
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in listed.split("\n") if (ROOT / path).is_file()}


if __name__ == "__main__":
    for measure, figure in {**table(tracked()), "circles of imports": str(len(cycles(whole())))}.items():
        print(f"{measure:<40} {figure}")
    print("minutes of make test: each part ends with its slowest tests, under `slowest durations`")

"""The figures of `make shape`, counted on small texts."""

from __future__ import annotations

import ast
import textwrap

import pytest

from bench.shape import (
    RETIRED,
    attributes,
    cells,
    interface,
    is_record,
    lengths,
    retired,
    sentences,
    table,
    tracked,
    words,
)


def class_of(source: str) -> ast.ClassDef:
    [node] = [each for each in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(each, ast.ClassDef)]
    return node


def test_a_functions_lines_are_those_from_its_def_to_its_end() -> None:
    source = "@decorated\ndef one():\n    '''It is short.'''\n    return 1\n\n\nasync def two():\n    pass\n"
    assert list(lengths(ast.parse(source))) == [(3, "one"), (2, "two")]


def test_attributes_are_the_declared_and_those_that_methods_set() -> None:
    node = class_of(
        """
        class Clock:
            zone: str
            shared = 1
            def __init__(self, other):
                self.hour = self.minute = 0
                self.hour, other.second = 1, 2
                self.place.name = "here"
                print(self.read)
        """
    )
    assert attributes(node) == {"zone", "hour", "minute"}


def test_a_record_is_known_by_its_decorator_or_its_base() -> None:
    assert is_record(class_of("@dataclasses.dataclass(frozen=True)\nclass A: ..."))
    assert is_record(class_of("class A(NamedTuple): ..."))
    assert not is_record(class_of("class A(Exception): ..."))


def test_an_interface_is_each_annotated_parameter_and_result() -> None:
    source = "def f(a, b: Any, *c: int, d: list[Any] | None = None, **e: str) -> 'Any': pass"
    assert interface(ast.parse(source)) == ["Any", "list[Any] | None", "int", "str", "'Any'"]


def test_sentences_are_of_prose_alone() -> None:
    page = """
    # A heading. Of two.
    One sentence. Two
    lines make another!

    ```sh
    a command. and more.
    ```
    - an item
    - a second one

    | a cell | another. With a dot |
    |---|---|
    """
    found = [" ".join(each.split()) for each in sentences(textwrap.dedent(page))]
    assert found == ["One sentence.", "Two lines make another!", "- an item", "a second one"]


def test_cells_are_those_with_words() -> None:
    assert [each.strip() for each in cells("| a | b \\| c | |\n|---|---|---|\nno | table")] == ["a", "b \\| c"]


def test_a_link_counts_as_its_text_and_a_sign_not_at_all() -> None:
    assert words("- see [the long page](a/b.md#c d) = 3") == 5


def test_the_table_tells_product_from_tests_and_pages_from_evidence() -> None:
    long = "def long():\n" + "    pass\n" * 41
    many = "class Many:\n    def __init__(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(11))
    figures = table(
        {
            "fleet/one.py": "import sys\nsys.path.insert(0, '.')\nprint(sys.path)\n" + long,
            "trainer/two.py": many + "def f(a: Any, b: int) -> None: pass\n",
            "tests/three.py": long,
            "docs/page.md": "One two. " + "word " * 31 + ".\n\n| " + "cell " * 31 + "|\n",
            "docs/evidence/night.md": f"It ran {RETIRED[0]}. It never says `{RETIRED[0]}`.",
        }
    )
    assert figures == {
        "functions over 40 lines": "1; longest (42, 'fleet/one.py:long')",
        "modules over 400 lines": "0; longest (45, 'fleet/one.py')",
        "classes over 10 attributes, no records": "1; longest (11, 'Many')",
        "Any in the trainer's interfaces": "1 of 3, 33.3 %",
        "edits of sys.path": "1",
        "product lines": "59",
        "test lines": "42",
        "words on the reading path": "67",
        "sentences over 30 words": "1 of 2, 50.0 %",
        "cells over 30 words": "1 of 1, 100.0 %",
        "retired words": "1",
    }


def test_no_retired_word_is_used() -> None:
    """CONTRIBUTING.md has what to say instead."""
    assert {path: words for path, text in tracked().items() if (words := retired(text))} == {}


@pytest.mark.parametrize("text", [f"it starts {RETIRED[0]}", f'print("it starts {RETIRED[0]}")', f"what {RETIRED[-1]}"])
def test_a_retired_word_is_found_at_the_end_of_a_text_too(text: str) -> None:
    assert retired(text)


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_found_in_a_name_and_not_in_another_word(word: str) -> None:
    name = word.replace(" ", "_")
    assert retired(f"def it_{name}_here(): {name}_ = _{name}") == [name] * 3
    assert retired(f"x{name}_ = {name}x") == []


def test_pages_code_and_scripts_of_all_kinds_are_read_but_not_what_others_wrote() -> None:
    texts = tracked()
    assert {"Vagrantfile", "lab/lxc.rb", "lab/demo", "fleet/site/schema/answers.json"} <= set(texts)
    assert not [path for path in texts if path.endswith(("LICENSE", ".min.js")) or path.startswith("locks/")]

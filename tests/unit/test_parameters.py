"""Parameters come to a constructor by name and with types; what it can't take is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from trainer.core.constructor import construct
from trainer.core.failures import UserError
from trainer.core.settings.parameters import describe_values, parse_assignments


class Typed:
    def __init__(
        self,
        rate: float = 0.1,
        units: int = 8,
        name: str = "net",
        flag: bool = False,
        layers: tuple[int, ...] = (64,),
        size: tuple[int, int] = (1, 2),
        tags: Sequence[str] = (),
        words: set[str] | None = None,
        options: Mapping[str, float] | None = None,
        kind: Literal["a", "b"] = "a",
        plain: Annotated[list, "of anything"] = (),
        anything: Any = None,
        untyped=(1, 2),
    ) -> None:
        self.given = {key: value for key, value in locals().items() if key != "self"}


def test_text_is_read_as_json_and_else_as_text() -> None:
    given = parse_assignments(["rate=1e-3", "layers=[64, 64]", "name=adam", "flag=true", "path=a=b", "empty="])
    assert given == {"rate": 0.001, "layers": [64, 64], "name": "adam", "flag": True, "path": "a=b", "empty": ""}


def test_what_is_told_can_be_typed_again() -> None:
    given = {"rate": 0.001, "layers": [64, "a"], "name": "adam", "number": "5", "none": None, "flag": True}
    text = describe_values(given)
    assert text == 'rate=0.001, layers=[64, "a"], name=adam, number="5", none=null, flag=true'
    assert parse_assignments([f"{each}" for each in text.replace('[64, "a"]', '[64,"a"]').split(", ")]) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate", "--set rate: expected NAME=VALUE"),
        ("=1", "'' can't name a parameter"),
        ("learning-rate=1", "'learning-rate' can't name a parameter"),
        ("lambda=1", "'lambda' can't name a parameter"),
        ("rate=NaN", "rate is nan: expected what JSON can say"),
        ("rate=[1, Infinity]", "expected what JSON can say"),
        (f"name={'x' * 10_000}", "they are 10,012 characters long, and 10,000 is the most"),
    ],
)
def test_what_can_be_no_parameter_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^--set") as caught:
        parse_assignments([text])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("rate", 1, 1.0),
        ("units", 3, 3),
        ("layers", [1, 2, 3], (1, 2, 3)),
        ("size", [1, 2], (1, 2)),
        ("tags", ["a"], ["a"]),
        ("words", ["a", "a"], {"a"}),
        ("words", None, None),
        ("options", {"a": 1}, {"a": 1.0}),
        ("kind", "b", "b"),
        ("plain", [1, "a"], [1, "a"]),
        ("anything", {"a": [1]}, {"a": [1]}),
        ("untyped", [3], (3,)),
        ("untyped", "text", "text"),
    ],
)
def test_values_get_the_constructors_types(name: str, given: object, wanted: object) -> None:
    value = construct(Typed, "p:P", {name: given}).given[name]
    assert (value, type(value)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rate", "fast"),
        ("rate", True),
        ("units", 1.5),
        ("units", True),
        ("name", 5),
        ("flag", 1),
        ("flag", "True"),
        ("layers", 64),
        ("layers", [64, "a"]),
        ("size", [1, 2, 3]),
        ("tags", "abc"),
        ("words", [1]),
        ("options", {"a": "b"}),
        ("kind", "c"),
        ("plain", {"a": 1}),
    ],
)
def test_another_type_than_the_constructor_says_is_refused(name: str, given: object) -> None:
    with pytest.raises(UserError, match=f"^program p:P: its constructor says {name}: .*, and {name} is .* as in JSON"):
        construct(Typed, "p:P", {name: given})


class Needing:
    def __init__(self, rate, *, layers=()):
        self.rate, self.layers = rate, layers


class Bare:
    pass


class Taking:
    def __init__(self, **more: Any) -> None:
        self.more = more


class Missing:
    def __init__(self, rate: NotThere = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        self.rate = rate


@dataclass
class Data:
    rate: float = 0.1
    layers: tuple[int, ...] = (64,)


@pytest.mark.parametrize(
    ("found", "given", "message"),
    [
        (Needing, {"rat": 1}, "has no parameter rat (did you mean rate?); it takes rate, layers"),
        (Needing, {"layers": []}, "needs rate: give it with --set rate=VALUE"),
        (Bare, {"rate": 1}, "has no parameter rate; it takes none"),
        (Bare(), {"rate": 1}, "is an object that is built already, and rate can't reach its constructor: name the"),
        (Data, {"lr": 1}, "has no parameter lr; it takes rate, layers"),
        (Data, {"rate": "a"}, "its constructor says rate: float"),
    ],
)
def test_what_a_constructor_does_not_take_is_refused_with_what_it_takes(found: Any, given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        construct(found, "p:P", given)
    assert message in str(caught.value)


def test_constructors_of_every_kind_are_called() -> None:
    needing = construct(Needing, "p:P", {"rate": "any", "layers": [1]})
    assert (needing.rate, needing.layers) == ("any", (1,))
    assert construct(Taking, "p:P", {"rate": 1}).more == {"rate": 1}
    assert construct(Missing, "p:P", {"rate": "any"}).rate == "any"
    assert construct(Data, "p:P", {"rate": 1, "layers": [1]}) == Data(1.0, (1,))
    assert isinstance(construct(Bare, "p:P", {}), Bare)
    ready = Bare()
    assert construct(ready, "p:P", {}) is ready

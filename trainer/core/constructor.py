"""Build a user's program: parameters reach its constructor by name and with types, or are refused."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.core.failures import UserError

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ROWS = (collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection, collections.abc.Iterable)


class WrongArgumentType(Exception):
    """A value that a parameter's annotation does not allow."""


def construct(found: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Build the program of a class, or take the object itself; `name` is how the settings call it.

    Raises UserError where the constructor has no such parameter, needs another, or is given another type than it says.
    What the constructor itself raises passes through.
    """
    if not isinstance(found, type):
        if values:
            raise UserError(
                f"program {name} is an object that is built already, and {', '.join(values)} can't reach its "
                "constructor: name the class instead"
            )
        return found
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # a class of an extension that doesn't tell
        return found(**values)
    named = {each.name: each for each in parameters if each.kind in NAMED}
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        for given in values:
            if given not in named:
                close = difflib.get_close_matches(given, named, n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                takes = f"it takes {', '.join(named)}" if named else "it takes none"
                raise UserError(f"program {name}: its constructor has no parameter {given}{hint}; {takes}")
    missing = [key for key, each in named.items() if each.default is inspect.Parameter.empty and key not in values]
    if missing:
        raise UserError(
            f"program {name}: its constructor needs {', '.join(missing)}: give it with --set {missing[0]}=VALUE, or "
            "under program_args in the run settings"
        )
    hints = read_hints(found)
    return found(**{key: coerce_parameter(name, key, value, named.get(key), hints) for key, value in values.items()})


def read_hints(found: type) -> dict[str, Any]:
    """Return the annotations of the constructor's parameters; none where they name what is missing at run time."""
    try:
        return typing.get_type_hints(inspect.getattr_static(found, "__init__"))
    except Exception:
        return {}


def coerce_parameter(
    name: str, key: str, value: Any, parameter: inspect.Parameter | None, hints: Mapping[str, Any]
) -> Any:
    """Return the value as the parameter wants it; raises UserError where its annotation does not allow it."""
    if key not in hints:
        wants_tuple = parameter is not None and isinstance(parameter.default, tuple) and isinstance(value, list)
        return tuple(value) if wants_tuple else value
    try:
        return coerce(value, hints[key])
    except WrongArgumentType:
        wanted = inspect.formatannotation(hints[key])
        raise UserError(
            f"program {name}: its constructor says {key}: {wanted}, and {key} is {json.dumps(value)}. Values are "
            f'written as in JSON, such as 0.01, true, [64, 64] or "text"'
        ) from None


def coerce(value: Any, wanted: Any) -> Any:
    """Return a value of JSON as an annotation wants it; raises WrongArgumentType.

    A whole number does for a float, a list for a tuple or a set. What JSON has no type for is the constructor's to
    judge.
    """
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return coerce_any(value, inner)
    if origin is typing.Annotated:
        return coerce(value, inner[0])
    if origin is typing.Literal:
        if any(type(value) is type(each) and value == each for each in inner):
            return value
        raise WrongArgumentType
    kind = origin or wanted
    if kind in (None, types.NoneType):
        return require(value is None, value)
    if kind is bool:
        return require(isinstance(value, bool), value)
    if kind is int:
        return require(isinstance(value, int) and not isinstance(value, bool), value)
    if kind is float:
        return float(require(isinstance(value, (int, float)) and not isinstance(value, bool), value))
    if kind is str:
        return require(isinstance(value, str), value)
    if kind in (list, tuple, set, frozenset, *ROWS):
        return coerce_row(value, kind, inner)
    if kind in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        require(isinstance(value, dict), value)
        return {key: coerce(each, inner[1]) for key, each in value.items()} if inner else value
    return value


def coerce_any(value: object, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return coerce(value, kind)
        except WrongArgumentType:
            continue
    raise WrongArgumentType


def coerce_row(value: Any, kind: Any, inner: Sequence[Any]) -> Any:
    require(isinstance(value, list), value)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        require(len(value) == len(inner), value)
        return tuple(coerce(each, one) for each, one in zip(value, inner, strict=True))
    row = [coerce(each, inner[0]) for each in value] if inner else value
    return row if kind in (list, *ROWS) else kind(row)


def require(holds: bool, value: object) -> Any:
    if not holds:
        raise WrongArgumentType
    return value

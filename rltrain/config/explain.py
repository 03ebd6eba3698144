"""Describes in words the values that a config key accepts, from the schema."""

import types
import typing
from collections.abc import Iterator
from dataclasses import astuple
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rltrain.config.schema import Config
from rltrain.config.section import Words

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
PLURALS = {int: "whole numbers", float: "numbers", str: "text"}
BOUNDS = {Ge: "at least {}", Gt: "above {}", Le: "at most {}", Lt: "below {}"}


def expectation(path: tuple[str | int, ...]) -> str:
    """Returns the values accepted by the key at `path`, such as "a whole number, at least 1". Keys inside free-form
    values accept any value."""
    return describe(_annotation(path))


def choices(path: tuple[str | int, ...]) -> list[str]:
    """Returns the texts to choose from for the key at `path`. Empty if the key is not a choice."""
    return [text for text in _literals(_annotation(path)) if isinstance(text, str)]


def _literals(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from arguments
    elif get_origin(annotation) in (Annotated, types.UnionType, typing.Union):
        for argument in arguments:
            yield from _literals(argument)


def _annotation(path: tuple[str | int, ...]) -> Any:
    annotation: Any = Config
    for key in path:
        section = section_of(annotation)
        if section is not None and isinstance(key, str) and key in section.model_fields:
            annotation = _with_bounds(section.model_fields[key])
        else:
            annotation = _element(annotation)
    return annotation


def describe(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    """Returns a type of the schema in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    for words in (bound for bound in bounds if isinstance(bound, Words)):
        return words.text
    if origin is Annotated:
        return describe(arguments[0], tuple(_flatten(arguments[1:])))
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is tuple:
        inner = section_of(arguments[0])
        plain = get_args(arguments[0])[0] if get_origin(arguments[0]) is Annotated else arguments[0]
        return f"a list of {f'sections with the keys {_keys(inner)}' if inner else PLURALS.get(plain, 'values')}"
    if origin is dict:
        return f"keys with {'values' if arguments[1] is Any else describe(arguments[1])}"
    section = section_of(annotation)
    if section is not None:
        return f"a section with the keys {_keys(section)}"
    limits = [BOUNDS[type(bound)].format(*astuple(bound)) for bound in bounds if type(bound) in BOUNDS]
    return NAMES.get(annotation, "a value") + (f", {' and '.join(limits)}" if limits else "")


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the section class in an annotation, or None. It may be optional or the element of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = () if get_origin(annotation) is dict else get_args(annotation)
    return next((found for argument in inner if (found := section_of(argument)) is not None), None)


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key of the schema. A section comes before its keys."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def _with_bounds(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _element(annotation: Any) -> Any:
    """Returns the type of the values inside a mapping or list."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _element(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return _element(next(argument for argument in arguments if argument is not types.NoneType))
    if origin is dict:
        return arguments[1]
    return arguments[0] if origin is tuple else Any


def _flatten(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item

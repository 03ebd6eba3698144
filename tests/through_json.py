"""Values of the rollout as the ranks of an engine exchange them: written as JSON and read again."""

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def written(value: object) -> Any:
    return json.loads(json.dumps(TypeAdapter(type(value)).dump_python(value, mode="json")))


def read(kind: type[T], record: Any) -> T:
    return TypeAdapter(kind).validate_python(record)


def through_json(value: T) -> T:
    return read(type(value), written(value))

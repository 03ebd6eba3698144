"""The JSON schema of config files, for editors: made from the sections and their docstrings."""

import argparse
import json
from typing import Any

from pydantic import BaseModel

from rltrain.config.explain import section_of
from rltrain.config.key_reference import docstrings
from rltrain.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives the parser the description and the arguments of the command."""
    parser.description = __doc__


def run(arguments: argparse.Namespace) -> int:
    """Print it. Exit status: 0."""
    print(text(), end="")
    return 0


def text() -> str:
    """What configs/schema.json holds."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def json_schema() -> dict[str, Any]:
    """With the docstring of every key as its description."""
    schema = Config.model_json_schema()
    schema["title"] = "rltrain"
    definitions = schema.get("$defs", {})
    for section in sections_of(Config):
        own = schema if section is Config else definitions.get(section.__name__, {})
        for key, words in docstrings(section).items():
            if key in own.get("properties", {}):
                own["properties"][key]["description"] = words
    return schema


def sections_of(section: type[BaseModel]) -> list[type[BaseModel]]:
    """It and all that stand in it, each once."""
    found = [section]
    for one in found:
        inner = [section_of(field.annotation) for field in one.model_fields.values()]
        found += [other for other in inner if other is not None and other not in found]
    return found

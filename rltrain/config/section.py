"""The base class and the value types of config sections, and the names of roles."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from rltrain.tasks.roles import DECLARED

# Value types and the base class.

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Words:
    """Words for a key's type in messages, if the type alone does not describe it."""

    text: str


def _temperature(value: float) -> float:
    if value and value < 1e-3:
        raise PydanticCustomError("temperature", "Input should be 0, or from 0.001 to 1000")
    return value


# Limits on sampling in requests, config files and options. Within them dividing logits and summing probabilities stays
# exact enough in float32.
Temperature = Annotated[
    float,
    Field(ge=0, le=1e3, allow_inf_nan=False),
    AfterValidator(_temperature),
    Words("0, or a number from 0.001 to 1000"),
]
TopP = Annotated[float, Field(ge=1e-6, le=1), Words("a number, at least 0.000001 and at most 1")]
TopK = Annotated[
    int, Field(ge=-1, lt=2**31), AfterValidator(lambda value: max(value, 0)), Words("a whole number, at least -1")
]
"""Number of likeliest tokens to sample from. -1 and 0 both mean off."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class HubName:
    """Marks a path key. Its values may also name repositories of this kind on the Hugging Face hub."""

    kind: Literal["model", "dataset"]


class Section(BaseModel):
    """A section of the config. It is frozen, and refuses unknown keys and wrong types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# The names of roles.


def role_names() -> tuple[str, ...]:
    """Returns every role name, in listing order."""
    return tuple(DECLARED)


def split_roles(key: str) -> tuple[str, ...]:
    """Splits a key of `placement` into its roles: "actor, reference" -> ("actor", "reference")."""
    return tuple(role.strip() for role in key.split(","))

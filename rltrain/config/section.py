"""What every section of a config file is made of, and the names of roles."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from rltrain.tasks.roles import DECLARED

# What every section of a config file is made of.

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Words:
    """Says in a message what a key takes, where its type does not."""

    text: str


def _temperature(value: float) -> float:
    if value and value < 1e-3:
        raise PydanticCustomError("temperature", "Input should be 0, or from 0.001 to 1000")
    return value


# What a request, a config or an option may ask of sampling, within what logits can be divided by and probabilities be
# added up to in float32.
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
"""-1 and 0 are both off."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class HubName:
    """Marks a key whose paths may be names on the Hugging Face hub, of what kind of repository."""

    kind: Literal["model", "dataset"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# The names of the roles of a run.


def role_names() -> tuple[str, ...]:
    """Every role name, in the order in which roles are listed."""
    return tuple(DECLARED)


def split_roles(key: str) -> tuple[str, ...]:
    """The roles that a key of `placement` names: "actor, reference" -> ("actor", "reference")."""
    return tuple(role.strip() for role in key.split(","))

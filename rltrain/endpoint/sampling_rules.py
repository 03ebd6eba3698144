"""Whose sampling parameters count: the run's or the request's."""

from dataclasses import dataclass, replace
from typing import Literal

from rltrain.endpoint.refused import invalid, unsupported
from rltrain.rollout.engine import SamplingParams

Policy = Literal["override", "refuse", "request"]


@dataclass(frozen=True)
class AskedSampling:
    """Of a request; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SamplingRules:
    """`own` holds for all turns (override), or must be what requests ask for if anything (refuse), or is what they get
    that ask for nothing else (request)."""

    own: SamplingParams
    policy: Policy

    def sampling_for(self, asked: AskedSampling) -> SamplingParams:
        """Raises Refused."""
        given = {name: value for name, value in vars(asked).items() if value is not None}
        if self.policy == "request":
            return replace(self.own, **given)
        for name, value in given.items():
            if self.policy == "refuse" and value != (own := getattr(self.own, name)):
                raise invalid(
                    f"{name}: got {value}, but responses are drawn with the run's own {name} = {own}; leave it out, or "
                    "set rollout.endpoint.sampling: override",
                    name,
                )
        return self.own

    def refuse_unless_overridden(self, param: str, given: object, expected: str) -> None:
        """For a wish that no engine here fulfils: where the run's way of drawing overrides requests it is passed over.
        Raises Refused."""
        if self.policy != "override":
            raise unsupported(param, given, expected)

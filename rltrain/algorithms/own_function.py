"""Functions of the user's that an algorithm calls with what their parameters' names ask for."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.errors import ConfigError
from rltrain.rewards.locating import locate


@dataclass(frozen=True)
class OwnFunction:
    """What `name` under `config_key` names."""

    name: str
    config_key: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    @classmethod
    def of(cls, name: str, config_key: str) -> "OwnFunction":
        """ConfigError where there is no such function."""
        function = locate(name, config_key)
        return cls(name, config_key, function, inspect.signature(function).parameters)

    def takes(self, names: Sequence[str]) -> bool:
        """Whether it has parameters of all these names."""
        return all(name in self.parameters for name in names)

    def require_known(self, forms: Sequence[Sequence[str]], known: Sequence[str]) -> None:
        """ConfigError unless it has the parameters of one of the forms, and without a default only known ones."""
        if not any(self.takes(names) for names in forms):
            expected = " or ".join(f"({', '.join(names)})" for names in forms)
            raise self.error(f"takes ({', '.join(self.parameters)}); expected parameters {expected}")
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for name, parameter in self.parameters.items():
            if parameter.kind not in variable and parameter.default is parameter.empty and name not in known:
                raise self.error(f"asks for {name}; what there is to ask for is {', '.join(known)}")

    def call(self, values: Mapping[str, Any]) -> Any:
        """With those of the values that it has parameters for. ConfigError where it raises."""
        try:
            return self.function(**{name: value for name, value in values.items() if name in self.parameters})
        except Exception as error:
            raise self.error(f"raised {type(error).__name__}: {error}") from error

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.config_key}: {self.name!r} {what}")

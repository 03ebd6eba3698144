"""The commands `rltrain train` and `rltrain dry-run` as functions of a config that is made in Python."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltrain.config import schema
from rltrain.config.loader import validated
from rltrain.config.python_values import plain
from rltrain.config.source import Source, read_source
from rltrain.errors import UserError

RUNNING = "RLTRAIN_RUN"
"""Environment variable of the processes of a job that `run` has begun: what they load may not begin another."""


class Config(schema.Config):
    """A config, checked as a file is: sections are mappings, functions and classes may stand for their names.

    Frozen. ConfigError says which key is wrong; what spans several keys is checked by `dry_run` and `run`.
    """

    def __init__(self, **keys: Any) -> None:
        data = plain(keys, "")
        validated(Source(data, "Config"))
        super().__init__(**data)

    @classmethod
    def from_file(cls, path: str | Path, *overrides: str | Mapping[str, Any]) -> "Config":
        """That of a YAML file with overrides in their order: "a.b=value" as on the command line, or mappings of dotted
        keys to Python values."""
        source = read_source(Path(path))
        for override in overrides:
            if isinstance(override, str):
                source.override(override)
                continue
            for key, value in override.items():
                source.assign(key, plain(value, key), f"override of {key}")
        validated(source)
        return cls(**source.data)


def run(config: schema.Config | Callable[[], schema.Config]) -> None:
    """Train, as one rank of torchrun's: `rltrain train` from inside a program. Collective over: all ranks.

    A function that makes the config is called inside the job, so that what it refuses is said once for all ranks.
    Returns when the job came to its end; a job that fails or is stopped ends this process with its exit status.
    Raises UserError where torchrun has not started this process, or where a file that a worker loads calls this.
    """
    if RUNNING in os.environ:
        raise UserError(
            "run was called in a process of a job that runs already, as when a worker loads the file of a function "
            'or environment; expected the call under if __name__ == "__main__":'
        )
    if "RANK" not in os.environ:
        raise UserError("run is called on every rank; expected torchrun --nproc-per-node N FILE.py to start them")
    from rltrain.command import begin_as_rank

    begin_as_rank()
    from rltrain.job import run_config

    os.environ[RUNNING] = "1"
    try:
        run_config(config if callable(config) else lambda: config)
    finally:
        del os.environ[RUNNING]


def dry_run(config: schema.Config, **options: Any) -> str:
    """What a job would do, in words: `rltrain dry-run`. Needs no torchrun, GPU or weights.

    `options` are those of `rltrain.dry_run.options.DryRunOptions`: world_size, ranks_per_node, gpu, ... Raises the
    UserError that the job would be refused with.
    """
    from rltrain.dry_run.description import describe
    from rltrain.dry_run.options import DryRunOptions

    return describe(config, DryRunOptions(**options))

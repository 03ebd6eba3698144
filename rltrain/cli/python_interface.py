"""The commands `rltrain train` and `rltrain dry-run` as functions of a config that is made in Python."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from rltrain.config import schema
from rltrain.config.loader import Source, read_source, validated
from rltrain.errors import ConfigError, UserError

# Values of a config that is made in Python, as a file would have them: functions and classes become their names.


def plain(value: Any, key: str) -> Any:
    """`value` of the dotted `key` without Python objects, down to its leaves. ConfigError for a function that has no
    name by which another process finds it."""
    if isinstance(value, Mapping):
        return {name: plain(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{key}.{index}") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and not isinstance(value, BaseModel):
        return name_of(value, key)
    return value


def name_of(function: Callable[..., Any], key: str) -> str:
    """ "module:function", or "file.py:function" where the file is the script itself or lies outside the working
    directory. Workers find it by that name, in processes of their own."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module_name is None or name is None:
        raise _refused(function, key, "it is an object without a name")
    if name == "<lambda>":
        raise _refused(function, key, "a lambda has no name")
    if "<locals>" in name:
        raise _refused(function, key, "it is defined inside another function")
    module = sys.modules.get(module_name)
    if getattr(module, name, None) is not function:
        raise _refused(function, key, f"{module_name} has not this object under the name {name}")
    file = getattr(module, "__file__", None)
    if module_name == "__main__" and (file is None or not file.endswith(".py")):
        raise _refused(function, key, "it is defined in no file")
    if module_name == "__main__" or ("." not in module_name and not _is_found(module_name, file)):
        return f"{Path(str(file)).resolve()}:{name}"
    return f"{module_name}:{name}"


def _is_found(module_name: str, file: str | None) -> bool:
    """Whether a process that starts in this working directory imports the module by its name."""
    return file is None or not file.endswith(".py") or Path(file).resolve().parent == Path.cwd()


def _refused(function: object, key: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{key}: got {function!r}, but {reason}; expected a function or class at the top level of a module, by whose "
        'name other processes find it, or that name: "file.py:function" or "module:function"'
    )


MORE_RANKS = "run starts one rank; more are started by torchrun --nproc-per-node N FILE.py, where FILE.py calls run"
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
    """Trains as `rltrain train` does, from inside a program. Collective over: all ranks.

    Where torchrun has started this process it is one rank. Anywhere else, as in a notebook, the job has one rank, which
    runs in a process of its own. A function that makes the config is called inside the job, so that what it refuses is
    said once for all ranks. Returns when the job came to its end. A job that fails or is stopped ends this process with
    its exit status: by SystemExit where torchrun has not started it. Raises UserError where the config needs more than
    one rank and torchrun has not started them, or where a file that a worker loads calls this.
    """
    if RUNNING in os.environ:
        raise UserError(
            "run was called in a process of a job that runs already, as when a worker loads the file of a function "
            'or environment; expected the call under if __name__ == "__main__":'
        )
    if "RANK" not in os.environ:
        _run_on_one_rank(config() if callable(config) else config)
        return
    from rltrain.cli.train import begin_as_rank

    begin_as_rank()
    from rltrain.trainer import run_config

    os.environ[RUNNING] = "1"
    try:
        run_config(config if callable(config) else lambda: config)
    finally:
        del os.environ[RUNNING]


def _run_on_one_rank(config: schema.Config) -> None:
    """Starts torchrun with one rank, and waits for its end."""
    from rltrain.cli.train import check_config_in

    check_config_in(config, [(1, 1)], MORE_RANKS)
    command = [sys.executable, "-m", "rltrain.cli.ranks", "--standalone", "--nproc-per-node=1"]
    # The rank finds modules where this process does.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    with TemporaryDirectory(prefix="rltrain_") as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
        status = _status_of(
            subprocess.Popen([*command, "-m", "rltrain.cli.python_interface", str(path)], env=environment)
        )
    if status:
        sys.exit(status)


def _status_of(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit status of `process`, which gets Ctrl-C as well as this one does, and saves first."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def read_config(path: str | Path) -> Config:
    """Returns the config that `run` has written for the rank that it starts."""
    return Config(**json.loads(Path(path).read_text()))


def dry_run(config: schema.Config, **options: Any) -> str:
    """What a job would do, in words: `rltrain dry-run`. Needs no torchrun, GPU or weights.

    `options` are those of `rltrain.planning.options.DryRunOptions`: world_size, ranks_per_node, gpu, ... Raises the
    UserError that the job would be refused with.
    """
    from rltrain.planning.description import describe
    from rltrain.planning.options import DryRunOptions

    return describe(config, DryRunOptions(**options))


if __name__ == "__main__":  # the rank that `run` starts
    run(read_config(sys.argv[1]))

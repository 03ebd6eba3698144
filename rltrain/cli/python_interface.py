"""The commands `rltrain train` and `rltrain dry-run` as functions of a config made in Python."""

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

# Conversion of Python values to values of a config file. Functions and classes become their names.


def plain(value: Any, key: str) -> Any:
    """Returns `value` of the dotted `key` without Python objects, at any depth. Raises ConfigError for a function
    without a name that other processes can import."""
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
    """Returns the name of a function for worker processes: "module:function" or "file.py:function".

    The latter is for functions of the script itself, and of files outside the working directory.
    """
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module_name is None or name is None:
        raise _refused(function, key, "the object has no name")
    if name == "<lambda>":
        raise _refused(function, key, "a lambda has no name")
    if "<locals>" in name:
        raise _refused(function, key, "it is defined inside another function")
    module = sys.modules.get(module_name)
    if getattr(module, name, None) is not function:
        raise _refused(function, key, f"it is not {name} at the top level of {module_name}")
    file = getattr(module, "__file__", None)
    if module_name == "__main__" and (file is None or not file.endswith(".py")):
        raise _refused(function, key, "it is not defined in a file")
    if module_name == "__main__" or ("." not in module_name and not _is_found(module_name, file)):
        return f"{Path(str(file)).resolve()}:{name}"
    return f"{module_name}:{name}"


def _is_found(module_name: str, file: str | None) -> bool:
    """Returns whether a process started in this working directory can import the module by its name."""
    return file is None or not file.endswith(".py") or Path(file).resolve().parent == Path.cwd()


def _refused(function: object, key: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{key}: got {function!r}, but {reason}; expected a function or class at the top level of a module, "
        'or its name: "file.py:function" or "module:function"'
    )


MORE_RANKS = "run starts one rank; start more with torchrun --nproc-per-node N FILE.py for a FILE.py that calls run"
RUNNING = "RLTRAIN_RUN"
"""Environment variable in the processes of a job started by `run`. Modules loaded there cannot start another job."""


class Config(schema.Config):
    """A config with the same checks as a config file. Sections are mappings. Functions and classes may replace their
    names.

    It is frozen. Raises ConfigError with the wrong key. Combinations of keys are checked by `dry_run` and `run`.
    """

    def __init__(self, **keys: Any) -> None:
        data = plain(keys, "")
        validated(Source(data, "Config"))
        super().__init__(**data)

    @classmethod
    def from_file(cls, path: str | Path, *overrides: str | Mapping[str, Any]) -> "Config":
        """Returns the config of a YAML file with overrides applied in order. An override is "a.b=value" as on the
        command line, or a mapping of dotted keys to Python values."""
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
    """Trains as `rltrain train` does, from inside a program. Returns at the end of the job. Collective over: all ranks.

    Under torchrun this process is one of the ranks. Otherwise, for example in a notebook, the job has one rank in a
    separate process. If `config` is a function, it is called inside the job. Its errors are then reported once for all
    ranks.

    A failed or stopped job ends this process with its exit status. Without torchrun this is a SystemExit. Raises
    UserError if the config needs more than one rank without torchrun, or if a file loaded by a worker calls this
    function.
    """
    if RUNNING in os.environ:
        raise UserError(
            "run was called inside a running job, for example by a worker that loads the file of a reward function; "
            'expected the call under if __name__ == "__main__":'
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
    """Starts torchrun with one rank and waits for its end."""
    from rltrain.cli.train import check_config_in

    check_config_in(config, [(1, 1)], MORE_RANKS)
    command = [sys.executable, "-m", "rltrain.cli.ranks", "--standalone", "--nproc-per-node=1"]
    # Lets the rank import the same modules as this process.
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
    """Returns the exit status of `process`. After Ctrl-C it keeps waiting, as the process also gets the signal and
    saves first."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def read_config(path: str | Path) -> Config:
    """Returns the config written by `run` for the rank it starts."""
    return Config(**json.loads(Path(path).read_text()))


def dry_run(config: schema.Config, **options: Any) -> str:
    """Returns a description of the job, as `rltrain dry-run` does. It needs no torchrun, GPU or weights.

    `options` are those of `rltrain.planning.options.DryRunOptions`: world_size, ranks_per_node, gpu, ... Raises the
    UserError that the job would be refused with.
    """
    from rltrain.planning.description import describe
    from rltrain.planning.options import DryRunOptions

    return describe(config, DryRunOptions(**options))


if __name__ == "__main__":  # the rank that `run` starts
    run(read_config(sys.argv[1]))

"""Errors whose message is meant for the person who runs the job, printed without a traceback."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake the user can mend: says what was given, what was expected, and where to change it."""


class ConfigError(UserError):
    """The config file or an override is wrong."""


def cannot_write(
    path: object, error: OSError, config_key: str = "output_dir", folder_key: str = "output_dir"
) -> ConfigError:
    """For what a run was asked for under `config_key`, in the folder that `folder_key` names."""
    return ConfigError(
        f"{config_key}: cannot write {path}: {error.strerror}; expected {folder_key} to be a folder that this user "
        "may write to"
    )


@contextmanager
def writing(path: object, config_key: str = "output_dir") -> Iterator[None]:
    """Raises `cannot_write` where what stands inside cannot write `path`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, config_key) from error


MOST_LISTED = 24
"""Allowed values that a message lists before it counts the rest."""


def listed(names: Iterable[object], most: int = MOST_LISTED) -> str:
    """Returns the first names of a list, and how many more there are."""
    texts = [str(name) for name in names]
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Returns the valid name that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), None)


def one_of(given: object, allowed: Iterable[object], *, where: str = "") -> str:
    """Returns "one of a, b, c (the nearest is b)" for a message about `given`, which is none of them.

    `where` names the page that lists all of them, for a list that may be too long for a message.
    """
    texts = [str(name) for name in allowed]
    notes = [f"{where} has all"] if where and len(texts) > MOST_LISTED else []
    notes += [f"the nearest is {near}"] if (near := nearest(str(given), texts)) else []
    return f"one of {listed(texts)}" + (f" ({'; '.join(notes)})" if notes else "")


USER_ERROR, FAILED = 2, 1
"""Exit statuses of commands and jobs: a mistake that the user can mend, anything else."""


def named_by(key: str) -> str:
    """How a message says where a path was given: a key of the config, or an option or argument of a command."""
    if key.startswith("--"):
        return f"option {key}"
    return f"argument {key}" if key.isupper() else f"config key {key}"


class PlacementError(ConfigError):
    """The placement does not fit the world, the roles or a parallel layout."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class DataError(UserError):
    """A prompt file is missing or a row of it cannot be used."""


class RewardError(UserError):
    """The reward function fails on too many samples."""


class EpisodeError(UserError):
    """Too many episodes fail, or an environment breaks its interface."""


class SandboxError(UserError):
    """A program cannot be started in a sandbox, whatever it is."""


class StallError(UserError):
    """A wait ran past its limit; the message names the task, the step and the ranks waited for."""


class ReplicaError(UserError):
    """Ranks that hold the same part of a model hold different values."""


class ExchangeError(UserError):
    """What a rank received of an experience is not what another one sent."""


class DivergenceError(UserError):
    """A loss or gradient is not finite, or ranks that must agree do not."""


class ParityError(UserError):
    """Trainer and engine compute different things from the same weights."""


class SyncError(UserError):
    """A weight sync cannot go on: ranks disagree about what moves, or a rank is gone."""


class SyncMismatchError(SyncError):
    """After a weight sync a rank holds other values than the ranks that it has them from."""


class EngineError(UserError):
    """A rollout engine in a process of its own cannot be started, refuses what it is asked, or has died too often."""


class EngineLost(Exception):  # noqa: N818 - names what happened; never shown to users
    """The server of a rollout engine died or stopped answering. Whoever holds the engine starts it anew."""

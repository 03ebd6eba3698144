"""Errors with a message for the user. Commands print them without a traceback."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake the user can correct. The message has the given and the expected value, and the place to change."""


class ConfigError(UserError):
    """The config file or an override is wrong."""


def cannot_write(
    path: object, error: OSError, config_key: str = "output_dir", folder_key: str = "output_dir"
) -> ConfigError:
    """Returns the error for a path that cannot be written. `config_key` asks for it, and `folder_key` gives its
    folder."""
    return ConfigError(
        f"{config_key}: cannot write {path}: {error.strerror}; expected {folder_key} to be a folder that this user "
        "may write to"
    )


@contextmanager
def writing(path: object, config_key: str = "output_dir") -> Iterator[None]:
    """Turns an OSError in the block into the error of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, config_key) from error


MOST_LISTED = 24
"""Most allowed values in a message. Further ones are only counted."""


def listed(names: Iterable[object], most: int = MOST_LISTED) -> str:
    """Returns the first `most` names, followed by the number of further ones."""
    texts = [str(name) for name in names]
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Returns the most similar valid name, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), None)


def one_of(given: object, allowed: Iterable[object], *, where: str = "") -> str:
    """Returns "one of a, b, c (the nearest is b)" for a message about an unknown value `given`.

    `where` is the page with all allowed values. It is mentioned if the list is too long for a message.
    """
    texts = [str(name) for name in allowed]
    notes = [f"{where} has all"] if where and len(texts) > MOST_LISTED else []
    notes += [f"the nearest is {near}"] if (near := nearest(str(given), texts)) else []
    return f"one of {listed(texts)}" + (f" ({'; '.join(notes)})" if notes else "")


USER_ERROR, FAILED = 2, 1
"""Exit statuses of commands and jobs: a mistake of the user, and any other failure."""


def named_by(key: str) -> str:
    """Returns the words for the origin of a path in a message: a config key, or an option or argument of a command."""
    if key.startswith("--"):
        return f"option {key}"
    return f"argument {key}" if key.isupper() else f"config key {key}"


class PlacementError(ConfigError):
    """The placement does not fit the number of ranks, the roles or a parallel layout."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class DataError(UserError):
    """A prompt file is missing, or one of its rows cannot be used."""


class RewardError(UserError):
    """The reward function fails on too many samples."""


class EpisodeError(UserError):
    """Too many episodes fail, or an environment breaks its interface."""


class SandboxError(UserError):
    """A program cannot be started in a sandbox."""


class StallError(UserError):
    """A wait exceeded its limit. The message has the task, the step and the awaited ranks."""


class ReplicaError(UserError):
    """Replicas of a model hold different values."""


class ExchangeError(UserError):
    """A rank received other experience than was sent to it."""


class DivergenceError(UserError):
    """A loss or gradient is not finite, or ranks disagree on a value."""


class ParityError(UserError):
    """Trainer and engine compute different results from the same weights."""


class SyncError(UserError):
    """A weight sync failed: the ranks disagree about its content, or a rank is gone."""


class SyncMismatchError(SyncError):
    """After a weight sync a rank holds other values than its senders."""


class EngineError(UserError):
    """The process of a rollout engine cannot be started, refuses a request, or has died too often."""


class EngineLost(Exception):  # noqa: N818 - names what happened; never shown to users
    """The server of a rollout engine died or stopped answering. The owner of the engine restarts it."""

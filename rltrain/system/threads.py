"""Threads of this process that the job relies on: none of them ends by an error in silence."""

import threading
from collections.abc import Callable


class JobThread(threading.Thread):
    """The only kind that rltrain starts. An error that it does not handle itself ends the job."""


def end_job_by_threads(end: Callable[[str, BaseException], None]) -> None:
    """From now on call `end(name of the thread, error)`, from that thread, where a JobThread fails.

    Threads of libraries are left as they are: they print their error and end.
    """

    def failed(arguments: threading.ExceptHookArgs) -> None:
        if isinstance(arguments.thread, JobThread) and arguments.exc_value is not None:
            end(arguments.thread.name, arguments.exc_value)
        else:
            threading.__excepthook__(arguments)

    threading.excepthook = failed

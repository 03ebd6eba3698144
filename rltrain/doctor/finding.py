"""One line of the doctor's report."""

from dataclasses import dataclass

FINE, LACKING, MISSING, WRONG = "ok", "-", "MISSING", "WRONG"
FAULTS = (MISSING, WRONG)
"""What a job cannot run with, or not well."""


@dataclass(frozen=True)
class Finding:
    what: str
    state: str
    detail: str
    compared: bool = False
    """Whether it has to be the same on all nodes of a job."""

"""The lines of the doctor's report."""

from collections.abc import Iterator, Sequence
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


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        yield f"{finding.state:8}{finding.what:{width}}  {finding.detail}".rstrip()


def has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.state in FAULTS for finding in findings)

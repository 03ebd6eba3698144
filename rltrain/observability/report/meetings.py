"""The part of a joint task in which a rank waits for the last one to come."""

from dataclasses import replace
from itertools import islice

from rltrain.observability.report.run_folder import RankTrace, Span

JOINT_TASKS = ("weight_sync", "decide_to_stop")
"""Tasks that nobody can do a part of before everybody is there."""

Meeting = tuple[str, object, object]


def mark_meetings(ranks: list[RankTrace]) -> None:
    """Put a wait into every joint task that a rank began before the last one did.

    A task with spans of its own within is left as it is: its rank says itself what it waited for.
    """
    latest_us: dict[Meeting, float] = {}
    for span in (span for rank in ranks for span in rank.spans if _is_joint(span)):
        latest_us[_meeting(span)] = max(latest_us.get(_meeting(span), span.start_us), span.start_us)
    for rank in ranks:
        waits = []
        for i, span in enumerate(rank.spans):
            until_us = min(latest_us[_meeting(span)], span.end_us) if _is_joint(span) else span.start_us
            if until_us > span.start_us and not _has_inner(rank.spans, i):
                waits.append(replace(span, name="the others", category="wait", end_us=until_us, depth=span.depth + 1))
        rank.spans = sorted([*rank.spans, *waits], key=lambda span: (span.start_us, span.depth))


def _is_joint(span: Span) -> bool:
    return span.category == "task" and span.name in JOINT_TASKS


def _meeting(span: Span) -> Meeting:
    return (span.name, span.arguments.get("step"), span.arguments.get("chunk"))


def _has_inner(spans: list[Span], i: int) -> bool:
    following = next((other for other in islice(spans, i + 1, None) if other.thread == spans[i].thread), None)
    return following is not None and following.depth > spans[i].depth and following.start_us < spans[i].end_us

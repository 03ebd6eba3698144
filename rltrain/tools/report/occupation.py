"""What the ranks of each role spend the run on, from their traces."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rltrain.tools.report.run_folder import MAIN_THREAD, RankTrace, Span

OWN, OTHER, MEMORY, WAITING, IDLE = "own tasks", "other roles' tasks", "memory moves", "waiting", "nothing"
PURPOSES = (OWN, OTHER, MEMORY, WAITING, IDLE)

_PURPOSE_OF_CATEGORY = {"wait": WAITING, "post": WAITING, "offload": MEMORY, "onload": MEMORY, "prefetch": MEMORY}
_WORK = ("task", "sync")


@dataclass(frozen=True)
class Occupation:
    """How the ranks of `role` spent the run: seconds by purpose, all its ranks together."""

    role: str
    ranks: tuple[int, ...]
    seconds: dict[str, float]

    def fraction(self, purpose: str) -> float:
        total_s = sum(self.seconds.values())
        return self.seconds[purpose] / total_s if total_s else 0.0

    @property
    def idle_fraction(self) -> float:
        """Of the time of its ranks, what went into waiting for others or into nothing."""
        return self.fraction(WAITING) + self.fraction(IDLE)


def occupations(ranks: list[RankTrace]) -> list[Occupation]:
    """By role, in the order of its first rank.

    Every moment between the first and the last task, wait or memory move of the run counts to the innermost span of the
    rank's main thread: a wait within a task is waiting. Whose task it is says the span's argument `role`: one role, or
    several joined by "+". Spans of other categories, or without it, count to the span around them.
    """
    relevant = [span for rank in ranks for span in rank.spans if span.category in (*_WORK, *_PURPOSE_OF_CATEGORY)]
    if not relevant:
        return []
    run_s = (max(span.end_us for span in relevant) - min(span.start_us for span in relevant)) / 1e6
    hosts: dict[str, list[RankTrace]] = {}
    for rank in ranks:
        for role in rank.roles:
            hosts.setdefault(role, []).append(rank)
    return [
        Occupation(role, tuple(rank.rank for rank in hosting), _total(role, hosting, run_s))
        for role, hosting in hosts.items()
    ]


def _total(role: str, hosting: list[RankTrace], run_s: float) -> dict[str, float]:
    total = dict.fromkeys(PURPOSES, 0.0)
    for rank in hosting:
        seconds = _seconds_by_purpose(rank.spans, role)
        seconds[IDLE] = max(run_s - sum(seconds[purpose] for purpose in PURPOSES if purpose != IDLE), 0.0)
        for purpose in PURPOSES:
            total[purpose] += seconds[purpose]
    return total


def _seconds_by_purpose(spans: Iterable[Span], role: str) -> dict[str, float]:
    """Of one rank's main thread."""
    seconds = dict.fromkeys(PURPOSES, 0.0)
    for span, own_s in own_seconds(spans, lambda span: _purpose(span, role) is not None):
        seconds[_purpose(span, role) or IDLE] += own_s
    return seconds


def own_seconds(spans: Iterable[Span], counts: Callable[[Span], bool]) -> Iterator[tuple[Span, float]]:
    """The spans of a rank's main thread that count, with their seconds less those of others that count within them."""
    around: list[tuple[Span, float]] = []
    for span in spans:
        if span.thread != MAIN_THREAD or not counts(span):
            continue
        while around and around[-1][0].end_us <= span.start_us:
            yield around.pop()
        seconds = (span.end_us - span.start_us) / 1e6
        if around:
            outer, own_s = around.pop()
            around.append((outer, own_s - seconds))
        around.append((span, seconds))
    yield from around


def _purpose(span: Span, role: str) -> str | None:
    """None: that of the span around it."""
    if span.category in _WORK and "role" in span.arguments:
        return OWN if role in str(span.arguments["role"]).split("+") else OTHER
    return _PURPOSE_OF_CATEGORY.get(span.category)


def task_seconds(ranks: list[RankTrace]) -> dict[str, float]:
    """Seconds of work by task, all ranks together, longest first: without waits, memory moves and tasks within it."""
    seconds: dict[str, float] = {}
    for rank in ranks:
        for span, own_s in own_seconds(rank.spans, lambda span: span.category in ("task", *_PURPOSE_OF_CATEGORY)):
            if span.category == "task":
                seconds[span.name] = seconds.get(span.name, 0.0) + own_s
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))

"""How much of its time a role had nothing to do."""

import time
from collections import Counter
from collections.abc import Callable, Collection


class IdleTime:
    """Of the roles of one rank, between two reports."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._work_s: Counter[str] = Counter()

    def worked(self, roles: Collection[str], seconds: float) -> None:
        for role in roles:
            self._work_s[role] += seconds  # type: ignore[assignment]

    def metrics(self, roles: Collection[str]) -> dict[str, float]:
        """perf/<role>_idle since the last call, of those of `roles` that have ever worked."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        work_s, self._work_s = self._work_s, Counter(dict.fromkeys(self._work_s, 0))
        return {f"perf/{role}_idle": max(0.0, 1 - work_s[role] / elapsed) for role in roles if role in work_s}

"""What is reported of a step's episodes: sums that add up over ranks, and the metrics that are made of them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from rltrain.environments.batch import FAILURE_KINDS, EpisodeEvent
from rltrain.environments.interface import Action

Sums = Mapping[str, float]

OF_INFO = "info/"


class EpisodeStatistics:
    """Sums over the episodes that ended here, with what they took from their beginning on.

    Call `acted` and `happened` in the order of what happens; the rest follows.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._turns: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self.first_failure: str | None = None
        """In words, with the traceback where there is one."""

    def acted(self, episode: int, action: Action) -> None:
        self._turns[episode] += 1
        self._calls[episode] = len(action.tool_calls)

    def happened(self, event: EpisodeEvent) -> None:
        """Seconds of a batch count to each of its episodes: they are what an episode waits."""
        num_calls = self._calls.pop(event.episode, 0)
        self._sums["seconds"] += event.seconds
        self._sums["tool_calls"] += num_calls
        self._sums["tool_seconds"] += event.seconds * (num_calls > 0)
        if event.done:
            self._ended(event)

    def waited(self, seconds: float) -> None:
        """An engine's sample did, from its turn's end to the answer; more than the environment took is the queue's."""
        self._sums["answers"] += 1
        self._sums["waited"] += seconds

    def observed(self, num_tokens: int) -> None:
        """Of an episode that has ended: tokens that its environment gave."""
        self._sums["observed_tokens"] += num_tokens

    def began_anew(self, num_episodes: int) -> None:
        """Episodes that could not go on from a checkpoint."""
        self._sums["anew"] += num_episodes

    def abandoned(self, episode: int) -> None:
        """It does not count among those that ended."""
        self._turns.pop(episode, None)
        self._calls.pop(episode, None)

    def _ended(self, event: EpisodeEvent) -> None:
        turns = self._turns.pop(event.episode, 0)
        self._sums["episodes"] += 1
        self._sums["turns"] += turns
        self._sums["truncated"] += event.truncated
        if event.failure is not None:
            self._sums[f"failed_{event.failure.kind}"] += 1
            self.first_failure = self.first_failure or str(event.failure)
        for name, value in event.info.items():
            if isinstance(value, int | float):
                self._sums[f"{OF_INFO}{name}"] += value
                self._sums[f"{OF_INFO}{name}/count"] += 1

    def take(self) -> dict[str, float]:
        """The sums so far; they begin anew."""
        sums, self._sums, self.first_failure = dict(self._sums), defaultdict(float), None
        return sums


def added(ranks: Iterable[Sums]) -> Sums:
    """Of the sums of all ranks; names that a rank lacks are zero there."""
    total: defaultdict[str, float] = defaultdict(float)
    for sums in ranks:
        for name, value in sums.items():
            total[name] += value
    return total


def metrics(sums: Sums) -> dict[str, float]:
    """Without env/; empty where no episode ended."""
    count = sums.get("episodes", 0)
    if not count:
        return {}
    failed = {f"failed_{kind}": sums.get(f"failed_{kind}", 0.0) for kind in FAILURE_KINDS}
    calls = sums.get("tool_calls", 0.0)
    means = {
        name.removeprefix(OF_INFO): total / sums[f"{name}/count"]
        for name, total in sums.items()
        if name.startswith(OF_INFO) and not name.endswith("/count")
    }
    return {
        **means,
        "episodes": count,
        "turns_mean": sums.get("turns", 0.0) / count,
        "truncated_ratio": sums.get("truncated", 0.0) / count,
        "seconds_mean": sums.get("seconds", 0.0) / count,
        "tool_calls": calls,
        "tool_call_s": sums.get("tool_seconds", 0.0) / calls if calls else 0.0,
        "failed": sum(failed.values()),
        **failed,
        "began_anew": sums.get("anew", 0.0),
        "observed_tokens": sums.get("observed_tokens", 0.0),
        "wait_s_mean": sums.get("waited", 0.0) / max(sums.get("answers", 0.0), 1.0),
    }

"""Statistics of a step's episodes: sums that add up over ranks, and metrics from these sums."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from rltrain.environments.batch import FAILURE_KINDS, EpisodeEvent
from rltrain.environments.interface import Action

Sums = Mapping[str, float]

OF_INFO = "info/"


class EpisodeStatistics:
    """The sums over finished episodes, including their earlier steps.

    Call `acted` and `happened` in the order of the events.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._turns: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self.first_failure: str | None = None
        """The description of the first failure, with the traceback if there is one."""

    def acted(self, episode: int, action: Action) -> None:
        self._turns[episode] += 1
        self._calls[episode] = len(action.tool_calls)

    def happened(self, event: EpisodeEvent) -> None:
        """Counts an event. The seconds of a batch count for each of its episodes, because each waits for the whole
        batch."""
        num_calls = self._calls.pop(event.episode, 0)
        self._sums["seconds"] += event.seconds
        self._sums["tool_calls"] += num_calls
        self._sums["tool_seconds"] += event.seconds * (num_calls > 0)
        if event.done:
            self._ended(event)

    def waited(self, seconds: float) -> None:
        """Counts an answer. `seconds` is the time of a sample from the end of its turn to the answer, including the
        queue."""
        self._sums["answers"] += 1
        self._sums["waited"] += seconds

    def observed(self, num_tokens: int) -> None:
        """Counts the tokens of the environment in a finished episode."""
        self._sums["observed_tokens"] += num_tokens

    def began_anew(self, num_episodes: int) -> None:
        """Counts episodes that could not continue from a checkpoint."""
        self._sums["anew"] += num_episodes

    def abandoned(self, episode: int) -> None:
        """Forgets an episode. It does not count as finished."""
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
        """Returns the sums so far and resets them."""
        sums, self._sums, self.first_failure = dict(self._sums), defaultdict(float), None
        return sums


def added(ranks: Iterable[Sums]) -> Sums:
    """Returns the sums over all ranks. Names missing on a rank count as zero."""
    total: defaultdict[str, float] = defaultdict(float)
    for sums in ranks:
        for name, value in sums.items():
            total[name] += value
    return total


def metrics(sums: Sums) -> dict[str, float]:
    """Returns the metrics, without the prefix env/. Empty if no episode finished."""
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

"""Which groups of a stream of prompts make up a step, and which of them may be begun for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamRules:
    """Step k takes the groups at positions from k * per_step on; where all steps share one log, the next per_step
    groups to get done, whichever they are. A step is handed over in num_chunks equal chunks.
    """

    num_groups: int
    """Of the whole stream that count."""
    per_step: int
    num_chunks: int = 1
    shared_log: str | None = None
    """Its name, where steps share one."""
    first_step: int = 0
    """The first that is entered in it."""
    num_ahead: int = 0
    """How many groups behind those of a step may be begun during it."""
    max_staleness: int | None = None
    """They may if weights are so fresh that the next step could begin, which allows this much; None: always."""

    @property
    def per_chunk(self) -> int:
        return self.per_step // self.num_chunks

    @property
    def chunks_per_log(self) -> int:
        if self.shared_log is None:
            return self.num_chunks
        return (self.num_groups // self.per_step - self.first_step) * self.num_chunks

    def log_of(self, position: int) -> str:
        """The log that the group at `position` is entered in when it is done."""
        return self._log(position // self.per_step)

    def entries_of(self, step: int, chunk: int) -> tuple[str, int]:
        """Where the groups of a chunk are entered: which log, and which chunk of it."""
        return self._log(step), chunk if self.shared_log is None else (step - self.first_step) * self.num_chunks + chunk

    def max_position(self, step: int, policy_version: int | None, num_dropped: int = 0) -> int:
        """The first position that may not be begun during this step, with weights of this version, after so many
        groups that do not count."""
        max_position = (step + 1) * self.per_step + num_dropped
        if self.max_staleness is None or self._is_fresh(policy_version, step + 1 - self.max_staleness):
            max_position += self.num_ahead
        return min(max_position, self.num_groups + num_dropped)

    @staticmethod
    def _is_fresh(policy_version: int | None, least: int) -> bool:
        return policy_version is not None and policy_version >= least

    def _log(self, step: int) -> str:
        return self.shared_log or f"step {step}"

"""Which groups of a stream of prompts make up a step, and which of them may be begun for it."""

from dataclasses import dataclass

from rltrain.rollout.stream.rollout_state import Consumed


@dataclass(frozen=True)
class StreamRules:
    """The first step takes the groups at the first per_step positions that are open in `done`, the next step those at
    the next open ones, and so on. Where all steps share one log, a step takes the next per_step groups to get done,
    whichever they are. A step is handed over in num_chunks equal chunks.
    """

    num_groups: int
    """Of the whole stream that count."""
    per_step: int
    num_chunks: int = 1
    shared_log: str | None = None
    """Its name, where steps share one."""
    done: Consumed = Consumed()
    """The positions that the run begins with: their groups belong to the steps before the first one."""
    lead: int = 0
    """Steps by which training may be behind what is drawn."""
    num_ahead: int = 0
    """How many groups behind those of a step may be begun during it."""
    max_staleness: int | None = None
    """They may if weights are so fresh that the next step could begin, which allows this much; None: always."""

    @property
    def first_step(self) -> int:
        return self.done.num_handed_over // self.per_step

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
        return self._log(self.first_step + self.done.num_open_before(position) // self.per_step)

    def entries_of(self, step: int, chunk: int) -> tuple[str, int]:
        """Where the groups of a chunk are entered: which log, and which chunk of it."""
        return self._log(step), chunk if self.shared_log is None else (step - self.first_step) * self.num_chunks + chunk

    def max_position(self, step: int, policy_version: int | None, num_dropped: int = 0) -> int:
        """The first position that may not be begun during this step, with weights of this version, after so many
        groups that were begun and do not count."""
        max_begun = (step + 1 - self.first_step) * self.per_step
        if self.max_staleness is None or self._is_fresh(policy_version, step + 1 - self.max_staleness):
            max_begun += self.num_ahead
        max_begun = min(max_begun, self.num_groups - self.first_step * self.per_step)
        return self.done.open_position(max_begun + num_dropped)

    @staticmethod
    def _is_fresh(policy_version: int | None, least: int) -> bool:
        return policy_version is not None and policy_version >= least

    def _log(self, step: int) -> str:
        return self.shared_log or f"step {step}"

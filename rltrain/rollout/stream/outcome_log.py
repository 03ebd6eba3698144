"""What the role reward tells engines of the prompts of training steps, and when engines agree to heed it."""

import json

import torch.distributed as dist

from rltrain.data.order import Outcomes


class OutcomeLog:
    """In the shared store. What is there is deleted once `num_readers` ranks have read it."""

    def __init__(self, store: dist.Store, num_readers: int) -> None:
        self.store = dist.PrefixStore("outcomes", store)
        self.num_readers = num_readers

    def put(self, step: int, outcomes: Outcomes) -> None:
        """All of a step's. By one rank."""
        self.store.set(f"step {step}", json.dumps([[row, *counts] for row, counts in outcomes.items()]))

    def has(self, step: int) -> bool:
        return bool(self.store.check([f"step {step}"]))

    def read(self, step: int) -> Outcomes:
        """Those of a step that has them, once per rank."""
        text = self.store.get(f"step {step}")
        self._count_reader(f"step {step}")
        return {row: (solved, drawn) for row, solved, drawn in json.loads(text)}

    def agree(self, window: int, step: int) -> int:
        """In which step's generate task a window of the stream is drawn: `step`, or what the first rank to ask said.
        Once per rank."""
        agreed = int(self.store.compare_set(f"window {window}", "", str(step)))
        self._count_reader(f"window {window}")
        return agreed

    def _count_reader(self, key: str) -> None:
        if self.store.add(f"{key}/read", 1) == self.num_readers:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/read")

"""What SGLang 0.5.23 holds its callers to, kept by stand-ins for its server.

Read in its source: managers/scheduler_components/weight_updater.py (sessions, memory), managers/scheduler.py (pauses,
being idle, flushing), managers/tokenizer_control_mixin.py (updates wait for requests), entrypoints/http_server.py.
"""

TAGS = ("kv_cache", "weights", "cuda_graph")


class SchedulerDied(Exception):  # noqa: N818 - it is what has happened
    """An assertion or an error in SGLang's scheduler, which ends the server."""


class Refused(Exception):  # noqa: N818
    """Status 400: the server lives on and has done nothing."""


class ServerRules:
    """One server's state as far as its callers have to heed it. Methods take whether no request runs, where that
    counts."""

    def __init__(self, *, saves_memory: bool = True) -> None:
        self.saves_memory = saves_memory
        """Whether it was started with enable_memory_saver."""
        self.is_paused = self.is_open = False
        self.released: set[str] = set()
        self.version = "default"
        """Of the weights."""

    def pause(self, mode: str) -> None:
        if mode not in ("in_place", "retract"):
            raise SchedulerDied(f"pause_generation in mode {mode}")
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False

    def check_drawing(self) -> None:
        """Before every decode step."""
        if self.released:
            raise SchedulerDied(f"a step without the memory of {sorted(self.released)}: an illegal address")
        if self.is_open and not self.is_paused:
            raise SchedulerDied("a step by weights that are being replaced")

    def begin_update(self, selector: str, *, is_idle: bool) -> None:
        self._check_update(is_idle)
        if selector not in ("all", "target", "draft"):
            raise SchedulerDied(f"invalid selector {selector!r}")
        if self.is_open:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.is_open = True

    def update(self, version: str | None, *, is_idle: bool) -> None:
        self._check_update(is_idle)
        if not self.is_open:
            raise Refused("must run between begin_weight_update() and end_weight_update()")
        self.version = version or self.version

    def end_update(self, *, is_idle: bool) -> None:
        self._check_update(is_idle)
        if not self.is_open:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False

    def release(self, tags: list[str], *, is_idle: bool) -> None:
        if not is_idle:
            raise SchedulerDied("release_memory_occupation should be called only when server is idle")
        self._check_tags(tags)
        if twice := self.released & {*tags}:
            raise SchedulerDied(f"the memory of {sorted(twice)} is paused already")
        self.released |= {*tags}

    def resume(self, tags: list[str]) -> None:
        self._check_tags(tags)
        if never := {*tags} - self.released:
            raise SchedulerDied(f"KeyError: {sorted(never)} were not released")
        self.released -= {*tags}

    def _check_update(self, is_idle: bool) -> None:
        if not (is_idle or self.is_paused):
            raise SchedulerDied("a weight update waits for all requests to end: pause first")
        if "weights" in self.released:
            raise SchedulerDied("a weight update without the weights' memory: an illegal address")

    def _check_tags(self, tags: list[str]) -> None:
        if not self.saves_memory:
            raise SchedulerDied("the server was started without enable_memory_saver: nothing is given back")
        if not tags:
            raise SchedulerDied("without tags all memory is meant: name them")
        if unknown := {*tags} - {*TAGS}:
            raise SchedulerDied(f"tags {sorted(unknown)} are not known")

"""Events. Waiting for them does nothing here."""


class EventHandle:
    def current_stream_wait(self) -> None:
        pass


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event.current_stream_wait()

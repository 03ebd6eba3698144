"""What the endpoint takes on at once, and for how long."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Whoever exceeds one gets an answer of status 4xx that names it."""

    max_context_tokens: int
    """Of an engine: prompt and response together."""
    vocab_size: int
    """A prompt may have the ids below it. These include ids that no token has, which the model may draw too."""
    max_sessions: int = 1024
    """Open at one time."""
    max_turns: int = 1024
    """Drawn or waiting to be drawn at one time, in all sessions."""
    max_session_tokens: int = 1_000_000
    """Drawn in one session, over all its trajectories."""
    max_session_turns: int = 1000
    max_choices: int = 64
    """`n` of one request."""
    max_body_bytes: int = 16 * 2**20
    session_timeout_s: float = 3600.0
    """A session that is older ends, whatever it is doing."""
    repeat_within_s: float = 10.0
    """A turn whose client has gone is drawn on for so long: clients repeat a request whose connection was lost."""

"""What the config says of environments."""

from typing import Any, Literal

from pydantic import Field

from rltrain.config.section import Count, NonNegativeInt, Positive, Section


class Agent(Section):
    """A program or a function of the user's own that draws its turns by HTTP, at the endpoint of an engine: one run
    for every episode. See docs/endpoint.md."""

    command: tuple[str, ...] = Field(default=(), strict=False)
    """The program and its arguments. It runs in a folder of its own; relative paths of files here start at the folder
    that the job was started in. OPENAI_BASE_URL and the like tell it where the endpoint is."""
    function: str | None = None
    """In its place "module:name" or "file.py:name" (row, base_url=..., api_key=...), which may be async."""
    sandbox: Literal["auto", "bubblewrap", "kernel", "none"] = "auto"
    """What keeps the program from everything but its files and the endpoint; none: a plain process with limits."""
    readable: tuple[str, ...] = Field(default=(), strict=False)
    """Folders that it may read, beside the working directory, Python's and the system's."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of its environment."""
    limits: dict[str, Any] = Field(default_factory=dict)
    """Of the program, such as {memory_bytes: 2147483648}; see docs/sandbox.md. Its time is env.step_timeout_s."""


class Endpoint(Section):
    """HTTP in front of an engine, for the agents of env.agent."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = 0
    """Of the first engine; the next ones take the next ports. 0: any that is free."""
    sampling: Literal["override", "refuse"] = "override"
    """What becomes of a request that asks for another temperature, top_p or top_k than rollout.sampling."""
    max_sessions: Count = 1024
    """Open at a time, per engine."""


class Env(Section):
    """Environments, which role env runs: what answers the model's turns, until an episode is done."""

    function: str | None = None
    """A built-in environment's name, a user's own "module:name" or "file.py:name", or "gymnasium:ID"; see
    docs/environments.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    agent: Agent | None = None
    """In the place of `function`."""
    num_workers: Count = 4
    """Processes per rank that run environments."""
    batch_size: Count = 1
    """Episodes that one environment steps together."""
    max_turns: Count = 16
    """Turns of the model in an episode; one that is not done then is cut."""
    max_turn_tokens: Count | None = None
    """Tokens of one turn; null: what rollout.sampling.max_response_tokens, which limits all of them, leaves."""
    step_timeout_s: Positive = 30.0
    """For one step of an environment; one that takes longer is killed with its process and the episode has failed."""
    episode_timeout_s: Positive = 600.0
    """For all steps of an episode together."""
    offload: bool = False
    """Environments with offload() and onload(), which hold memory of the device, give it up between generate tasks."""
    overlap: bool = True
    """Environments step while engines decode other samples. false: in turn, for comparison."""

"""The config sections of the rollout and of environments."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rltrain.config.models import Offload, Parallel
from rltrain.config.section import Count, NonNegativeInt, Positive, Section, Temperature, TokenId, TopK, TopP

# What the config says of environments.


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


# The config section rollout: what draws responses, and how.


class Sampling(Section):
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1: off."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Strings that end a response, beside the checkpoint's end-of-sequence tokens."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), strict=False)
    """Token ids that end a response, and are part of it, beside those of the checkpoint."""
    max_response_tokens: Count = 1024


class SGLang(Section):
    """An engine is a server of its own, a child of the engine's first rank."""

    python: str | None = None
    """Interpreter of an environment that has SGLang, which pins a torch of its own; null: the rollout's, and of the
    rollout the one that runs rltrain."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the server, by their long names with underscores, such as {attention_backend: fa3}. Checked
    against the installed version; what rltrain sets itself is refused."""
    staging_mb: Positive = 512.0
    """Weights reach an engine's process through two slots of this size per rank."""
    start_timeout_s: Positive = 1800.0
    """For a server that starts; runs only while nothing is added to its log."""
    hang_timeout_s: Positive = 300.0
    """A server that has requests and draws no token for so long is started anew."""
    max_restarts: NonNegativeInt = 3
    """Per engine and run; after as many the job ends."""
    keep_weights: bool = True
    """Keep a copy of each engine's weights on the host, for an engine that has to be started anew or comes back to a
    device that it shares. Without it such an engine ends the job."""

    @property
    def heeds_seeds(self) -> bool:
        """Whether the server draws a response by its request's seed; on CPUs no server does."""
        return bool(self.args.get("enable_deterministic_inference"))


class Http(Section):
    """Engines are servers that somebody else runs, at `urls`."""

    weights: Literal["folder", "group"] = "folder"
    """How new weights reach them. folder: as a checkpoint on shared storage, which they load. group: by broadcasts over
    a process group of a rank and a server, SGLang's update group; by NCCL on GPUs, else by gloo."""
    weights_dir: str | None = None
    """The folder of weights: folder, which they see under the same path; null: <output_dir>/http_weights. It holds the
    present version, while a sync runs the next one too; with weight_sync.delta the last whole version and what changed
    since then."""
    token_env: str | None = None
    """The environment variable with the token that servers ask for, as Authorization: Bearer."""
    token_file: str | None = None
    """The file with it."""
    ca_file: str | None = None
    """Certificates (PEM) that those of https:// URLs are checked with; null: the system's."""
    start_timeout_s: Positive = 600.0
    """For the first of them to answer."""
    update_timeout_s: Positive = 1800.0
    """For one to load weights; those that come by a group, for each part of them."""
    hang_timeout_s: Positive = 300.0
    """Where nothing comes of a request for so long its server is given up, and the request goes to another."""
    max_retries: NonNegativeInt = 8
    """Of a sample, in a row and without a token drawn; after as many the job ends."""
    reread_s: Positive = 2.0
    """Between two looks for servers that are new in the file, or are back."""
    staging_mb: Positive = 512.0
    """Of weights that a rank holds at a time on their way, on its device; by way of a group twice as much."""


class Served(Section):
    """What the roles whose models are served by engines have in common."""

    engine: Literal["embedded", "sglang", "http"] = "embedded"
    """embedded: rltrain's own. sglang: SGLang, a server for each. http: servers that run already, at `urls`."""
    urls: Annotated[tuple[str, ...], Field(strict=False)] | str = ()
    """Of the servers of engine http, such as http://10.0.0.5:30000; or a file with one a line, which is read again
    while the job runs: they may come and go. Each rank of the role asks some of them."""
    protocol: Literal["auto", "sglang", "vllm", "openai"] = "auto"
    """What they speak. auto: each is asked."""
    http: Http = Http()
    sglang: SGLang = SGLang()
    dtype: Literal["auto", "fp8"] = "auto"
    """Of the weights that engines hold. auto: model.dtype. fp8: the layers' matrices in e4m3 with a scale for every
    block of 128 x 128, quantised on their way to the engine; the rest in model.dtype. The actor's log-probs then differ
    from the rollout's: see loss.correction."""
    parallel: Parallel = Parallel()
    """Of one engine: its matrices are cut over tp ranks. Experts are dealt out whole to ep shares of these, and each is
    cut over the tp / ep ranks of its share."""
    sampling: Sampling = Sampling()
    max_running_requests: Count = 256
    """Sequences decoded at once per engine, at most."""
    max_context_tokens: Count = 4096
    """Prompt and response together. What the judge is asked in a longer one fails, and is counted."""
    kv_cache_gb: Literal["auto"] | Positive = "auto"
    """Memory for keys and values on each rank of the embedded engine, in units of 1e9 bytes. Samples start as it has
    room; where it runs out those that started last wait again, and go on with the tokens that they have drawn. auto: on
    a GPU what is free when the engine has its turn, without what its passes and a weight sync need, and a 20th of
    the device; on a CPU no limit."""
    offload: Offload = "auto"


class Rollout(Served):
    endpoint: Endpoint = Endpoint()

"""The config sections of the rollout and of environments."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rltrain.config.models import Offload, Parallel
from rltrain.config.section import Count, NonNegativeInt, Positive, Section, Temperature, TokenId, TopK, TopP

# Environments.


class Agent(Section):
    """Your own program or function as an agent. It generates its turns over HTTP at the endpoint of an engine, with one
    run per episode. See docs/endpoint.md."""

    command: tuple[str, ...] = Field(default=(), strict=False)
    """The program and its arguments. It runs in its own folder. Relative paths to existing files are resolved in the
    folder the job was started in. Variables such as OPENAI_BASE_URL contain the address of the endpoint."""
    function: str | None = None
    """A function instead of `command`: "module:name" or "file.py:name". It is called as (row, base_url=...,
    api_key=...) and may be async."""
    sandbox: Literal["auto", "bubblewrap", "kernel", "none"] = "auto"
    """Sandbox of the program. It allows access to the program's own files and the endpoint only. `none`: a plain
    process with limits."""
    readable: tuple[str, ...] = Field(default=(), strict=False)
    """Folders the program may read, in addition to the working directory, Python and the system."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program."""
    limits: dict[str, Any] = Field(default_factory=dict)
    """Limits of the program, such as {memory_bytes: 2147483648}. See docs/sandbox.md. Its time limit is
    env.step_timeout_s."""


class Endpoint(Section):
    """HTTP endpoint of an engine, for the agents of env.agent."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: NonNegativeInt = 0
    """Port of the first engine. Further engines use the following ports. `0`: any free port."""
    sampling: Literal["override", "refuse"] = "override"
    """Decides what happens to requests with another temperature, top_p or top_k than rollout.sampling. `override`:
    rollout.sampling is used. `refuse`: the request fails."""
    max_sessions: Count = 1024
    """Most open sessions per engine."""


class Env(Section):
    """Environments of role env. They answer the turns of the model until the episode is done."""

    function: str | None = None
    """Name of a built-in environment, your own "module:name" or "file.py:name", or "gymnasium:ID". See
    docs/environments.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the environment."""
    agent: Agent | None = None
    """An agent instead of `function`."""
    num_workers: Count = 4
    """Number of environment processes per rank."""
    batch_size: Count = 1
    """Number of episodes stepped together by one environment."""
    max_turns: Count = 16
    """Most turns of the model in an episode. A longer episode is cut."""
    max_turn_tokens: Count | None = None
    """Most tokens of one turn. `null`: the remaining tokens of rollout.sampling.max_response_tokens, the limit of all
    turns together."""
    step_timeout_s: Positive = 30.0
    """Seconds for one step of an environment. A slower environment is killed with its process, and its episode counts
    as failed."""
    episode_timeout_s: Positive = 600.0
    """Seconds for all steps of an episode together."""
    offload: bool = False
    """Frees the device memory of environments between generate tasks. They need methods offload() and onload()."""
    overlap: bool = True
    """Steps environments while engines decode other samples. `false`: one after the other, for comparison."""


# The rollout.


class Sampling(Section):
    """Sampling of responses."""

    temperature: Temperature = 1.0
    """Sampling temperature. `0`: greedy."""
    top_p: TopP = 1.0
    """Smallest total probability of the likeliest tokens to sample from. `1`: off."""
    top_k: TopK = 0
    """Number of likeliest tokens to sample from. `0` or `-1`: off."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Strings that end a response, in addition to the checkpoint's end-of-sequence tokens."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), strict=False)
    """Token ids that end a response, in addition to those of the checkpoint. They are part of the response."""
    max_response_tokens: Count = 1024
    """Most tokens of a response."""


class SGLang(Section):
    """Settings of engine sglang. Each engine is a separate server, a child process of the engine's first rank."""

    python: str | None = None
    """Python interpreter of an environment with SGLang. SGLang requires its own version of torch. `null`: the
    interpreter of rollout.sglang, and for the rollout the one running rltrain."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the server, by their long names with underscores, such as {attention_backend: fa3}. They
    are checked against the installed version. Arguments set by rltrain are refused."""
    staging_mb: Positive = 512.0
    """Size in MB of each of two staging slots per rank, for weights on their way to the engine's process."""
    start_timeout_s: Positive = 1800.0
    """Seconds for the start of a server. The time runs only while its log does not grow."""
    hang_timeout_s: Positive = 300.0
    """Seconds without a generated token before a server with open requests is restarted."""
    max_restarts: NonNegativeInt = 3
    """Restarts per engine and run. One more ends the job."""
    keep_weights: bool = True
    """Keeps a copy of each engine's weights on the host. It is needed to restart an engine, or to return it to a shared
    device. Without it the job ends instead."""

    @property
    def heeds_seeds(self) -> bool:
        """Returns whether the server samples a response by its request's seed. Servers on CPUs never do."""
        return bool(self.args.get("enable_deterministic_inference"))


class Http(Section):
    """Settings of engine http. The servers run independently of the job, at `urls`."""

    weights: Literal["folder", "group"] = "folder"
    """Transport of new weights to the servers. `folder`: a checkpoint on shared storage. `group`: broadcasts over a
    process group of a rank and a server of SGLang or vLLM. Broadcasts use NCCL on GPUs. Without GPUs they use gloo,
    for servers of SGLang only."""
    weights_dir: str | None = None
    """Folder for weights: folder, with the same path on the servers. `null`: <output_dir>/http_weights. It holds the
    present version, and during a sync the next version too. With weight_sync.delta it holds the last full version and
    all changes since. With weight_sync.adapters apart it holds the base and the present adapters."""
    token_env: str | None = None
    """Environment variable with the servers' access token, sent as Authorization: Bearer."""
    token_file: str | None = None
    """File with the servers' access token."""
    ca_file: str | None = None
    """File with the certificates (PEM) to verify https:// URLs. `null`: those of the system."""
    start_timeout_s: Positive = 600.0
    """Seconds until the first server has to answer."""
    update_timeout_s: Positive = 1800.0
    """Seconds for a server to load weights. With weights: group the limit holds for each part of them."""
    hang_timeout_s: Positive = 300.0
    """Seconds without progress of a request before its server is given up. The request then moves to another server."""
    max_retries: NonNegativeInt = 8
    """Retries of a sample in a row without a new token. One more ends the job."""
    reread_s: Positive = 2.0
    """Seconds between two checks for servers that are new in the file or available again."""
    staging_mb: Positive = 512.0
    """Device memory in MB of a rank for weights in transfer. With weights: group it needs twice as much."""


class Served(Section):
    """Common keys of the roles with engines."""

    engine: Literal["embedded", "sglang", "http"] = "embedded"
    """`embedded`: the engine of rltrain. `sglang`: an SGLang server for each engine. `http`: running servers at
    `urls`."""
    urls: Annotated[tuple[str, ...], Field(strict=False)] | str = ()
    """Addresses of the servers for engine http, such as http://10.0.0.5:30000. Or a file with one address a line. The
    file is read repeatedly, so servers may join and leave. Each rank of the role uses some of the servers."""
    protocol: Literal["auto", "sglang", "vllm", "openai"] = "auto"
    """API of the servers. `auto`: each server is asked."""
    http: Http = Http()
    sglang: SGLang = SGLang()
    dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the engines' weights. `auto`: model.dtype. `fp8`: matrices of layers in e4m3 with a scale per block
    of 128 x 128, quantised on the way to the engine. All other weights keep model.dtype. The actor's log-probs then
    differ from the rollout's: see loss.correction."""
    parallel: Parallel = Parallel()
    """Parallel sizes of one engine. Matrices are split over tp ranks. Experts are distributed whole over ep shares of
    these ranks. Each expert is split over the tp / ep ranks of its share."""
    sampling: Sampling = Sampling()
    """Sampling of responses."""
    max_running_requests: Count = 256
    """Most sequences decoded at once per engine."""
    max_context_tokens: Count = 4096
    """Most tokens of prompt and response together. A longer question to the judge fails and is counted."""
    kv_cache_gb: Literal["auto"] | Positive = "auto"
    """Memory for keys and values on each rank of the embedded engine, in units of 1e9 bytes. If it runs out, the
    samples started last are paused. They continue later from their tokens. `auto` on a GPU: the free memory at the
    engine's turn, minus the needs of its passes and a weight sync, and minus a 20th of the device. `auto` on a CPU: no
    limit."""
    offload: Offload = "auto"
    """Same as actor.offload, for the memory of engines."""


class Rollout(Served):
    """The engines that generate responses for training."""

    endpoint: Endpoint = Endpoint()

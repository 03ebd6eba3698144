"""Every key a config file may hold: type, default and meaning. Objects are frozen; unknown keys are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Parallel(Section):
    """Parallel sizes of one role; data parallelism is what its ranks leave over."""

    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    ep: Count = 1
    sequence_parallel: bool = False


class Model(Section):
    path: str
    """Folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """auto takes Transformer Engine where it is installed and a GPU is present."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation, in Megatron's terms."""


class Optimizer(Section):
    """Adam with decoupled weight decay."""

    lr: Positive = 1e-6
    min_lr: NonNegative = 0.0
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps (mini-batches) of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegative = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-8
    clip_grad: NonNegative = 1.0


class Actor(Section):
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    micro_batch_tokens: Count = 16384
    """Sequences are packed into micro-batches of at most this many tokens (one longer sequence stands alone)."""
    distributed_optimizer: bool = True
    """Shard optimizer states over data-parallel ranks."""


class Reference(Section):
    parallel: Parallel | None = None
    """None: the actor's."""
    path: str | None = None
    """None: the actor's starting checkpoint."""
    micro_batch_tokens: Count = 16384


class Sampling(Section):
    temperature: NonNegative = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Strings that end a response, beside the checkpoint's end-of-sequence tokens."""
    max_response_tokens: Count = 1024


class Rollout(Section):
    engine: Literal["embedded"] = "embedded"
    parallel: Parallel = Parallel()
    sampling: Sampling = Sampling()
    max_running_requests: Count = 256
    """Slots of the KV cache: sequences decoded at once per engine."""
    max_context_tokens: Count = 4096
    """Prompt and response together."""


class Reward(Section):
    function: str = "exact_match"
    """exact_match, math, or a user's own "module:function" (prompt, response, label) -> float."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the reward function."""
    timeout_s: Positive = 5.0
    """Limit for one sample; past it the sample's reward is 0 and it is counted."""
    num_workers: Count = 4
    """Processes per rank that run the function; exact_match needs none."""


class Batch(Section):
    prompts_per_step: Count = 32
    samples_per_prompt: Count = 8
    mini_batches: Count = 1
    """Optimizer steps per rollout batch: each takes some samples of every prompt, or all samples of some prompts."""


class Kl(Section):
    """Penalty that keeps the actor near the reference."""

    coef: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"


class Loss(Section):
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    normalization: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    entropy_coef: NonNegative = 0.0
    old_logprobs: Literal["rollout", "actor"] = "actor"
    """The ratio's denominator: the engine's own log-probs, or the actor's recomputed before the first update."""
    kl: Kl = Kl()


class Advantages(Section):
    normalize_std: bool = True
    """Divide group-centred rewards by the group's standard deviation."""


class PromptFile(Section):
    path: str
    """JSONL or Parquet."""
    prompt_key: str = "prompt"
    """Column with a string, or with a list of chat messages."""
    label_key: str = "label"
    response_key: str = "response"
    """Column with the demonstration, for algorithm: sft."""
    max_rows: Count | None = None


class Data(Section):
    train: PromptFile
    eval: PromptFile | None = None
    chat_template: Literal["auto", "never"] = "auto"
    """auto applies the tokenizer's chat template to message lists, and to plain prompts if the tokenizer has one."""
    system_prompt: str | None = None
    shuffle: bool = True
    max_prompt_tokens: Count = 1024
    on_bad_row: Literal["refuse", "skip"] = "refuse"


class Evaluation(Section):
    """Greedy decoding of data.eval, scored by the reward function. Off when data.eval is absent."""

    interval: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    stop_at: float | None = None
    """End training early once the mean score reaches this."""


class Checkpoint(Section):
    save_hf: bool = True
    """Write the trained actor in Hugging Face format to <output_dir>/hf at the end."""


class Wandb(Section):
    project: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] | None = None
    """None: online with a key, offline without."""


class Logging(Section):
    progress: bool = True
    wandb: Wandb = Wandb()


class WeightSync(Section):
    bucket_mb: Count | None = None
    """Mebibytes that a rank packs, and that it receives, at a time; two of each are in flight. None: 8 on the CPU,
    where more leaves the caches, and 64 on GPUs."""
    transport: Literal["planned", "golden"] = "planned"
    """golden assembles every tensor in full on every rank, slowly: what the planned one must equal."""
    verify: bool = False
    """After every sync compare checksums of what both sides hold; the job ends if a tensor differs."""


class Cluster(Section):
    timeout_s: Positive = 1800.0
    """Longest wait for another rank before the job ends with a message that names it: longer than any task takes."""
    stall_report_s: Positive = 30.0
    """After this long a wait is reported, with what the awaited ranks are doing."""


class Config(Section):
    algorithm: Literal["grpo", "sft"] = "grpo"
    steps: Count
    seed: NonNegativeInt = 0
    output_dir: str = "runs/default"
    placement: dict[str, str | int]
    """Role (or comma-joined roles) -> inclusive rank ranges, for example "0-3,5" or "node:1-2" or "all"."""
    model: Model
    data: Data
    actor: Actor = Actor()
    reference: Reference = Reference()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    batch: Batch = Batch()
    loss: Loss = Loss()
    advantages: Advantages = Advantages()
    evaluation: Evaluation = Evaluation()
    weight_sync: WeightSync = WeightSync()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()

    @property
    def samples_per_group(self) -> int:
        """Samples that the actor gets of one prompt: a demonstration is alone."""
        return 1 if self.algorithm == "sft" else self.batch.samples_per_prompt

    @property
    def prompt_blocks(self) -> int:
        """Blocks of prompts of which each mini-batch takes one; 1 where it takes samples of every prompt."""
        return max(self.batch.mini_batches // self.samples_per_group, 1)

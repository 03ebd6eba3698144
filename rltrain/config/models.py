"""The config sections of models that the training backend holds, and of their low-rank adapters."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rltrain.config.section import Count, Fraction, HubName, NonNegative, NonNegativeInt, Positive, Section, Share

# The config section of low-rank adapters.


class Lora(Section):
    """Train low-rank adapters of the actor's matrices in their place: W + alpha / rank * B A, Hu et al. 2021, "LoRA",
    section 4.1."""

    rank: Count = 16
    """Rows of A [rank, inputs] and columns of B [outputs, rank]."""
    alpha: Positive = 32.0
    """What the adapters add counts alpha / rank times."""
    targets: tuple[str, ...] | None = Field(default=None, strict=False)
    """Which matrices have one, by their names in the checkpoint without layers, as PEFT's target_modules: q_proj,
    k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; of latent attention q_a_proj, q_b_proj, kv_a_proj_with_mqa,
    kv_b_proj; of Mixtral's experts w1, w2, w3. Of a layer's experts all have. null: all that the model has."""
    dropout: NonNegative = Field(default=0.0, lt=1)
    """Share of an adapter's inputs that count as zero in training."""
    path: str | None = None
    """A folder of PEFT's, with adapter_config.json and adapter_model.safetensors, to start from. null: A is drawn
    (`seed`), B is zero."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


# The config sections of the models that the training backend holds.

RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
Backend = Literal["megatron", "fsdp"]
Offload = Literal["auto"] | bool
"""Whether a role leaves the device between its tasks; auto: where it shares ranks with a role that needs the memory,
and the device is not the host."""


def _off(given: object) -> object:
    """YAML takes a bare off for false."""
    return "off" if given is False else given


class Parallel(Section):
    """Parallel sizes of one role; data parallelism is what its ranks leave over."""

    tp: Count = 1
    pp: Count = 1
    vpp: Count = 1
    """Chunks of consecutive layers that every pipeline stage holds, in turn with the others': interleaved stages, whose
    pipelines fill and empty in 1/vpp of the time."""
    layers_per_stage: tuple[NonNegativeInt, ...] | None = Field(default=None, strict=False)
    """Of the pp * vpp chunks, by depth. null: as many in each where pp * vpp divides the model's layers; else the
    embedding and the loss count as a layer each."""
    cp: Count = 1
    """Context parallelism: every sequence is cut among as many ranks of a replica."""
    ep: Count = 1
    """Shares of whole experts, over ranks that also work on different samples, or parts of a sequence or a tensor."""
    etp: Count | None = None
    """Ranks that an expert is cut over. None: as many as tp. ep x etp divides the ranks of a pipeline stage."""
    sequence_parallel: bool = False
    """With tp: tokens are shared out where nothing else is. Models with experts or latent attention always are so."""


class MoE(Section):
    """Experts of the models that are trained."""

    aux_loss_coef: NonNegative = 0.0
    """Of the loss that balances the experts' loads within each sample, DeepSeek-AI 2024, "DeepSeek-V3 Technical
    Report", equations 17 to 20, mean over the layers' samples, which count for what they count in the main loss."""
    z_loss_coef: NonNegative = 0.0
    """Of the mean squared log-sum-exp of routing scores, Zoph et al. 2022, "ST-MoE", equation 5, of samples alike."""
    bias_update_rate: NonNegative = 0.0
    """By how much each optimizer step raises or lowers the bias by which an expert is chosen that had fewer or more
    tokens than the mean, Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy", algorithm 1. 0: it stays as
    it was loaded, and has to in models without such biases (qwen3_moe, mixtral)."""
    dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"
    """How tokens come to their experts' ranks. deepep, where installed, needs GPUs and dtype bfloat16."""
    log_loads: bool = False
    """Report the load of every expert of every layer; their imbalance is reported in any case."""


OF_POLICY = ("actor", "inference", "reference", "rollout", "evaluation")
"""Roles whose models are the policy, as it is, was or begins."""


class FakeQuantization(Section):
    """Compute with what the matrices of experts would be after they were rounded to few bits, have engines draw with
    the same, and train what was not rounded, whose gradients are those of the rounded."""

    dtype: Literal["int4"] = "int4"
    """Symmetric: a group's elements are integers from -8 to 7 times its scale, which has model.dtype."""
    group_size: Count = 128
    """Consecutive elements of a matrix's row that have one scale. It divides the rows of every rank."""
    scale_divisor: float = Field(default=7.0, ge=7, le=8)
    """A scale is a group's largest magnitude over this: 7 as slime has it, 7.5 as llm-compressor."""


class Mtp(Section):
    """Train the layer that predicts a further token (multi-token prediction) of the model's checkpoint by the
    cross-entropy of the token after next of responses. docs/families.md says of which families."""

    coef: NonNegative = 0.1
    """Of that loss, which is added to the algorithm's. A sample's tokens have equal parts of what it counts for in the
    latter."""
    trains: Literal["layer", "head", "model"] = "layer"
    """What learns from that loss. layer: that layer alone. head: the vocabulary's head as well. model: all of it, the
    layers before and the embedding too."""


class Recompute(Section):
    granularity: Literal["none", "selective", "full"] = "full"
    """full: whole layers, of which only the inputs are kept. selective: parts of every layer."""
    layers: Count | None = None
    """full: so many layers, the first ones of every chunk (a stage's layers, or with vpp a part of them); null: all."""
    modules: tuple[RecomputedModule, ...] = Field(default=("core_attn",), strict=False)
    """selective: which parts. core_attn: what attention puts out. layernorm: what norms put out. mlp: the inside of
    dense MLPs. moe: the inside of layers of experts, shared ones among them. shared_experts: of these alone.
    mla_up_proj: queries, keys and values of latent attention."""

    def full_layers(self, count: int) -> int:
        """Of a chunk's `count` layers, how many, from the first one on, are computed anew as a whole."""
        return min(self.layers or count, count) if self.granularity == "full" else 0

    def repeats(self, module: RecomputedModule) -> bool:
        """Whether this part of every layer is computed anew on its own."""
        return self.granularity == "selective" and module in self.modules


class Model(Section):
    path: Annotated[str, HubName("model")]
    """Folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer. Or its name on the hub: OWNER/NAME,
    OWNER/NAME@REVISION; with hf: before it also where a folder has that name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights and activations. In float16 losses are scaled, see optimizer.loss_scale."""
    residual_dtype: Literal["float32"] | None = None
    """Of what every layer adds to, in trainer and engine; null: dtype. docs/precision.md says what it costs and
    gives."""
    head_dtype: Literal["float32"] | None = None
    """Of the product that makes logits; null: dtype."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """auto takes Transformer Engine where it is installed, a GPU is present and dtype is not float32."""
    recompute: Literal["none", "selective", "full"] | Recompute = "none"
    """Activations that backward computes anew, in Megatron's terms. selective: {granularity: selective}; full:
    {granularity: full}."""
    activation_offload: bool = False
    """Have the host keep what layers leave for backward, all but a stage's last: copied there while the next layers are
    computed, and back while the backward of the layer behind is. With recompute full: their inputs."""
    logits_chunk_tokens: Count | None = None
    """Tokens whose logits exist at a time, which are then made twice: a third more products of the vocabulary for the
    memory of a micro-batch's logits and of their gradient. null: logits of a whole micro-batch, made once."""
    cp_communication: Literal["auto", "all_to_all"] = "auto"
    """With context parallelism. auto: keys and values of all ranks go to each of them, with Transformer Engine round a
    ring while attention computes, else by one all-gather. all_to_all: each rank has all tokens of some heads, for which
    Transformer Engine must be new enough to do so with packed sequences."""
    moe: MoE = MoE()
    lora: Lora | None = None
    """Of the actor. null: all of its weights are trained."""
    fake_quantization: FakeQuantization | None = None
    """Of the actor, and so of inference, the reference and the engines: training that knows that its weights will be
    served in INT4. null: weights are as they are."""
    router_replay: Annotated[Literal["off", "rollout", "recompute"], BeforeValidator(_off)] = "off"
    """Which experts the actor's tokens visit. off: those that its routers choose in each pass. rollout: those that the
    engine had chosen which drew the tokens, in the pass of the old log-probs as in training. recompute: in training
    those of the pass of the old log-probs. docs/experts.md says for which tokens."""

    mtp: Mtp | None = None
    """Of the actor. null: layers that predict further tokens stay as the checkpoint has them."""

    @property
    def recomputed(self) -> Recompute:
        given = self.recompute
        return Recompute(granularity=given) if isinstance(given, str) else given

    @property
    def residual(self) -> str:
        """The type of the residual stream."""
        return self.residual_dtype or self.dtype

    @property
    def head(self) -> str:
        """The type in which logits are made."""
        return self.head_dtype or self.dtype


class LossScale(Section):
    """What losses are multiplied by with model.dtype float16, so that small gradients do not become zero. Optimizer
    steps whose gradients overflow are skipped, and halve it. Losses are sums over tokens here, whose gradients are as
    many times larger than those of means: it is small where other frameworks begin with 65536 and more."""

    initial: Positive = 128.0
    window: Count = 200
    """Optimizer steps without an overflow after which it is doubled."""
    hysteresis: Count = 1
    """Overflows before it is halved."""
    minimum: Positive = 2.0**-10
    """Gradients that overflow at this one count as a step that diverged (on_divergence)."""


class Muon(Section):
    """With optimizer.name muon, of the matrices of layers."""

    momentum: Share = 0.95
    nesterov: bool = True
    newton_schulz_steps: Count = 5
    """Passes of the iteration that makes a matrix orthogonal."""


class Optimizer(Section):
    """Adam with decoupled weight decay, or Muon. docs/optimizer.md says what each costs and gives."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of layers move by their orthogonalized momentum, whose size is AdamW's, so that lr and
    weight_decay are as well; embeddings, head, norms, biases and routers by AdamW."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of what the optimizer keeps beside the fp32 weights; it computes in fp32. bfloat16: half of the memory."""
    cpu_offload: bool | Share = False
    """Have fp32 weights and moments on the host, and make the steps there: of all parameters, or of a share of them.
    With backend fsdp of all, and gradients too: layers come to the device when they compute."""
    muon: Muon = Muon()
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
    loss_scale: LossScale = LossScale()


class Fsdp(Section):
    """Models that backend fsdp trains or evaluates."""

    replicas: Count = 1
    """Copies of the model among a role's ranks; consecutive ranks share one. 1: all ranks share one."""
    reshard_after_forward: bool = True
    """Give up a layer's gathered weights between its forward and its backward, which then gathers them again."""


class Trained(Section):
    """What the roles with an optimizer have in common."""

    backend: Backend | None = None
    """megatron: megatron-core. fsdp: transformers' own model, its parameters sharded over all ranks of the role by
    torch's fully_shard. None: the actor's, which is megatron."""
    fsdp: Fsdp | None = None
    """None: the actor's."""
    optimizer: Optimizer = Optimizer()
    micro_batch_tokens: Count = 16384
    """Sequences are packed into micro-batches of at most this many tokens for each rank of context parallelism: cp
    times as many together (one longer sequence stands alone)."""
    distributed_optimizer: bool = True
    """Shard optimizer states over data-parallel ranks."""
    overlap: Literal["auto"] | bool = "auto"
    """Reduce gradients over data parallelism while backward runs and, with distributed_optimizer, gather weights while
    the next mini-batch's forward does. auto: on GPUs."""
    gradient_bucket_mb: Positive | None = None
    """With overlap: gradients, in fp32, that are reduced at once. null: Megatron's choice, 160 MB, and from 40 replicas
    on 4 MB for each."""
    offload: Offload = "auto"


class Actor(Trained):
    parallel: Parallel = Parallel()


class Critic(Trained):
    parallel: Parallel | None = None
    """None: the actor's."""
    path: Annotated[str | None, HubName("model")] = None
    """A Hugging Face checkpoint to start from: with a score head, or without one, which then starts at zero. None: the
    actor's starting checkpoint."""
    lora: Lora | None = None
    """Train low-rank adapters and the score head; the rest stays as it was loaded. null: all weights are trained."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps in which the critic learns and the actor stays as it is."""
    value_clip: Positive | None = 0.2
    """How far a value may move from the one that advantages were made from before its loss is cut; null: no limit."""


class Evaluating(Section):
    """What the roles have in common whose model says something of samples and learns nothing."""

    backend: Backend | None = None
    """None: the actor's."""
    fsdp: Fsdp | None = None
    """None: the actor's."""
    parallel: Parallel | None = None
    """None: the actor's."""
    micro_batch_tokens: Count = 16384
    offload: Offload = "auto"


class Reference(Evaluating):
    path: Annotated[str | None, HubName("model")] = None
    """None: the actor's starting checkpoint."""
    refresh_every: NonNegativeInt = 0
    """Steps after which it takes over the actor's weights; 0: it stays as it is."""


class Teacher(Evaluating):
    """What the actor is taught on what it draws: on-policy distillation."""

    path: Annotated[str | dict[str, str] | None, HubName("model")] = None
    """A Hugging Face checkpoint whose vocabulary is the actor's. Or several of one architecture, by name: each row of
    data.train then says in `column` whose it is."""
    column: str = "teacher"
    """The column of data.train that names a row's teacher, where `path` has several."""
    coef: Positive = 1.0
    """Of the distance from the teacher."""
    where: Literal["advantage", "loss"] = "advantage"
    """advantage: a token's is lowered by how much likelier it is to the actor than to the teacher, which is a drawn
    estimate of the reverse KL. loss: the reverse KL is a term of the loss."""
    max_distance: Positive | None = None
    """Of a token no larger distance counts, with where: advantage in either direction. null: no bound. With where: loss
    it needs top_k, and a token beyond it has no gradient."""
    top_k: NonNegativeInt | Literal["full"] = 0
    """where: loss: the KL is taken over as many tokens, those that are likeliest to the teacher, all others being one
    more outcome; full: over the whole vocabulary. 0: it is estimated from the drawn token."""
    kl: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(actor || teacher). forward: KL(teacher || actor), with where: loss and top_k."""
    rest: bool = True
    """forward: whether all other tokens are one more outcome. false: it is the sum over top_k alone, 0 where that is
    negative, as verl has it."""
    min_logprob: Annotated[float, Field(lt=0)] | None = None
    """forward: log-probs below, the teacher's and the actor's, count as this, so that a token which the actor finds all
    but impossible has no gradient. null: none do."""

    @property
    def checkpoints(self) -> dict[str, str]:
        """Folders by name."""
        return self.path if isinstance(self.path, dict) else {"teacher": self.path or ""}


class Inference(Evaluating):
    """The actor's log-probs before an update, on ranks of their own. It is given the actor's weights whenever the
    rollout is. Placed on the actor's ranks in the actor's layout it is the actor itself."""


class RewardModel(Evaluating):
    """Scores whole responses by a classifier, a *ForSequenceClassification with one label: part of the reward."""

    path: Annotated[str | None, HubName("model")] = None
    """Its Hugging Face checkpoint, with a tokenizer and vocabulary of its own."""
    weight: float = 1.0
    """Of its score in the reward."""
    name: str = "model"
    """What its metrics are called by: rollout/reward_<name>."""
    chat_template: Literal["auto", "never"] = "auto"
    """auto: its tokenizer's template, where it has one, writes the conversation; never: the prompt's text and the
    response, one after the other."""
    ends_with_eos: bool = False
    """Whether texts end with the tokenizer's eos_token, as `algorithm: reward_model` has them: what a template writes
    behind the last one is left out, and where there is none it is added."""
    max_tokens: Count | None = None
    """Of a longer text only so many at its end are read. None: as many as the model has positions."""

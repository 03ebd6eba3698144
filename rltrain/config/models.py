"""The config sections of models in the training backend and of their low-rank adapters."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rltrain.config.section import Count, Fraction, HubName, NonNegative, NonNegativeInt, Positive, Section, Share

# Low-rank adapters.


class Lora(Section):
    """Trains low-rank adapters of the actor's matrices instead of the matrices: W + alpha / rank * B A, Hu et al. 2021,
    "LoRA", section 4.1."""

    rank: Count = 16
    """Rows of A [rank, inputs] and columns of B [outputs, rank]."""
    alpha: Positive = 32.0
    """Scale of the adapters. Their output is multiplied by alpha / rank."""
    targets: tuple[str, ...] | None = Field(default=None, strict=False)
    """Matrices with an adapter, by their names in the checkpoint without the layer, as in PEFT's target_modules. Most
    models: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. Latent attention: q_a_proj, q_b_proj,
    kv_a_proj_with_mqa, kv_b_proj. Experts of Mixtral: w1, w2, w3. A name selects all experts of a layer. `null`: all
    matrices of the model."""
    dropout: NonNegative = Field(default=0.0, lt=1)
    """Share of an adapter's inputs set to zero in training."""
    vision: bool = False
    """Also adapts the matrices of the vision tower, with model.vision. `targets` then selects from both."""
    path: str | None = None
    """A PEFT folder to start from, with adapter_config.json and adapter_model.safetensors. `null`: A is random (`seed`)
    and B is zero."""

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return self.alpha / self.rank


# Models in the training backend.

RecomputedModule = Literal[
    "activation", "core_attn", "layernorm", "mlp", "moe", "rotation", "shared_experts", "mla_up_proj"
]
CHEAP: tuple[RecomputedModule, ...] = ("activation", "layernorm", "rotation")
"""Modules whose outputs a kernel makes again from what is kept anyway."""
Backend = Literal["megatron", "fsdp"]
Offload = Literal["auto"] | bool
"""Decides whether a role leaves the device between its tasks. auto: it leaves if it shares ranks with a role in need of
the memory, and the device is not the host."""


SharePrefixes = Literal["auto"] | bool


def _off(given: object) -> object:
    """Turns YAML's false for a bare `off` back into "off"."""
    return "off" if given is False else given


class Parallel(Section):
    """Parallel sizes of one role. The remaining factor of its ranks is data parallelism."""

    tp: Count = 1
    """Tensor parallelism: ranks to split matrices over."""
    pp: Count = 1
    """Pipeline parallelism: stages to split the layers over."""
    vpp: Count = 1
    """Chunks of consecutive layers on every pipeline stage (interleaved stages). Pipelines fill and drain in 1/vpp of
    the time."""
    layers_per_stage: tuple[NonNegativeInt, ...] | None = Field(default=None, strict=False)
    """Number of layers in each of the pp * vpp chunks, by depth. `null`: equal numbers if pp * vpp divides the model's
    layers. Otherwise the embedding and the loss each count as a layer."""
    cp: Count = 1
    """Context parallelism: ranks of a replica to split every sequence over."""
    ep: Count = 1
    """Expert parallelism: shares of whole experts. They are spread over ranks with different samples, parts of a
    sequence or parts of a tensor."""
    etp: Count | None = None
    """Ranks to split an expert over. `null`: tp. ep x etp has to divide the ranks of a pipeline stage."""
    sequence_parallel: bool = False
    """With tp: splits tokens over the ranks outside of matrix products. It is always on for models with experts or
    latent attention."""


class MoE(Section):
    """Experts of the trained models."""

    aux_loss_coef: NonNegative = 0.0
    """Coefficient of the loss for balanced loads of experts within each sample: DeepSeek-AI 2024, "DeepSeek-V3
    Technical Report", equations 17 to 20. It is averaged over layers and samples. A sample has the same weight as in
    the main loss."""
    z_loss_coef: NonNegative = 0.0
    """Coefficient of the mean squared log-sum-exp of routing scores: Zoph et al. 2022, "ST-MoE", equation 5. A sample
    has the same weight as in the main loss."""
    bias_update_rate: NonNegative = 0.0
    """Change of the selection bias per optimizer step, up for experts with fewer tokens than the mean and down for
    experts with more: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy", algorithm 1. `0`: the bias stays
    as loaded. Models without such biases (qwen3_moe, mixtral) need 0."""
    dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"
    """Transport of tokens to the ranks of their experts. deepep must be installed, and needs GPUs and dtype
    bfloat16."""
    log_loads: bool = False
    """Reports the load of every expert of every layer. The imbalance of loads is always reported."""


OF_POLICY = ("actor", "inference", "reference", "rollout", "evaluation")
"""Roles with the policy as their model, in its present or an earlier state."""


class FakeQuantization(Section):
    """Trains with expert matrices rounded to few bits in every forward pass. Engines generate with the same rounded
    matrices. The optimizer updates the unrounded matrices with the gradients of the rounded ones."""

    dtype: Literal["int4"] = "int4"
    """int4 is symmetric. The elements of a group are integers from -8 to 7 times its scale. Scales have model.dtype."""
    group_size: Count = 128
    """Number of consecutive elements of a row with a common scale. It has to divide the rows of every rank."""
    scale_divisor: float = Field(default=7.0, ge=7, le=8)
    """Divisor of a group's largest magnitude. The result is the scale: 7 as in slime, 7.5 as in llm-compressor."""


class Mtp(Section):
    """Trains the checkpoint's layer for multi-token prediction. Its loss is the cross-entropy of the token after next
    in responses. docs/families.md lists the model families."""

    coef: NonNegative = 0.1
    """Coefficient of this loss, added to the loss of the algorithm. The tokens of a sample share its weight in the
    algorithm's loss equally."""
    trains: Literal["layer", "head", "model"] = "layer"
    """Parts of the model with gradients from this loss. `layer`: the prediction layer alone. `head`: also the
    vocabulary head. `model`: the whole model, including the layers before and the embedding."""


class VisionSettings(Section):
    """The vision tower of the policy. It encodes the images of prompts and observations."""

    train: bool = True
    """Trains the tower with the language model. `false`: its weights stay as in the checkpoint."""
    recompute: bool = True
    """Encodes images again in backward, a part at a time. `false`: activations of all images of a mini-batch stay in
    memory."""
    max_patches: Count = 16384
    """Most patches of images to encode at a time, in training and in engines. A larger image is encoded alone."""
    engine_cache_gb: NonNegative = 0.5
    """Memory of an embedded engine for the features of earlier images, in GB of 10^9 bytes."""
    training_cache_gb: NonNegative = 1.0
    """Host memory of a rank for the features of earlier images in training, in GB of 10^9 bytes. A trained tower has
    none."""


class Recompute(Section):
    """Recomputation of activations in backward."""

    granularity: Literal["none", "selective", "full"] = "full"
    """`full`: keeps only the inputs of whole layers. `selective`: recomputes parts of every layer."""
    layers: Count | None = None
    """With granularity full: number of layers to recompute, from the beginning of every chunk. A chunk is a stage's
    layers, or a part of them with vpp. `null`: all."""
    modules: tuple[RecomputedModule, ...] | None = Field(default=None, strict=False)
    """With granularity selective: the parts to recompute. Three cost little: `activation`, outputs of gated activations
    in dense MLPs; `layernorm`, outputs of norms before dense matrices; `rotation`, normalized and rotated queries and
    keys. `core_attn`: outputs of attention. `mlp`: the inside of dense MLPs. `moe`: the inside of MoE layers with their
    shared experts. `shared_experts`: the inside of shared experts. `mla_up_proj`: queries, keys and values of latent
    attention. `null`: the cheap ones that the backend has; core_attn with Transformer Engine or activation_offload."""

    def full_layers(self, count: int) -> int:
        """Returns the number of fully recomputed layers, from the first, in a chunk of `count` layers."""
        return min(self.layers or count, count) if self.granularity == "full" else 0

    def chosen(self, *, transformer_engine: bool) -> tuple[RecomputedModule, ...]:
        """Returns the parts of every layer that are recomputed on their own."""
        if self.granularity != "selective":
            return ()
        if self.modules is None:
            return ("core_attn",) if transformer_engine else CHEAP
        return self.modules


class Model(Section):
    """The starting checkpoint, and the computation of models."""

    path: Annotated[str, HubName("model")]
    """Folder of a Hugging Face checkpoint with config.json, safetensors and tokenizer. Or a name on the hub: OWNER/NAME
    or OWNER/NAME@REVISION. The prefix hf: selects the hub if a folder has the same name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of weights and activations. With float16 losses are scaled, see optimizer.loss_scale."""
    residual_dtype: Literal["float32"] | None = None
    """Data type of the residual stream in trainer and engine. `null`: dtype. docs/precision.md describes cost and
    benefit."""
    head_dtype: Literal["float32"] | None = None
    """Data type of the product for the logits. `null`: dtype."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """auto uses Transformer Engine if it is installed, a GPU is present and dtype is not float32."""
    recompute: Literal["none", "selective", "full"] | Recompute = "none"
    """Recomputes activations in backward to save memory, in Megatron's terms. `selective`: {granularity: selective}.
    `full`: {granularity: full}."""
    activation_offload: bool = False
    """Keeps activations for backward on the host, except those of a stage's last layer. Copies overlap with the
    computation of neighbouring layers. With recompute full only the inputs of layers are copied."""
    cp_communication: Literal["auto", "all_to_all"] = "auto"
    """With context parallelism. `auto`: every rank receives the keys and values of all ranks, with Transformer Engine
    in a ring during attention, else by one all-gather. `all_to_all`: every rank has all tokens for some heads. It needs
    a Transformer Engine with support for packed sequences in this mode."""
    moe: MoE = MoE()
    lora: Lora | None = None
    """Adapters of the actor. `null`: all of its weights are trained."""
    fake_quantization: FakeQuantization | None = None
    """Rounding of the policy's expert matrices in training: actor, inference, reference and engines. Use it for a model
    to be served in INT4. `null`: no rounding."""
    router_replay: Annotated[Literal["off", "rollout", "recompute"], BeforeValidator(_off)] = "off"
    """Choice of experts for the actor's tokens. `off`: the routers choose in every pass. `rollout`: the choices of the
    engine, in the pass for the old log-probs and in training. `recompute`: training repeats the choices of the pass for
    the old log-probs. docs/experts.md lists the tokens."""

    mtp: Mtp | None = None
    """Multi-token prediction of the actor. `null`: its prediction layers stay as in the checkpoint."""
    vision: VisionSettings | None = None
    """Images in prompts and observations. `null`: texts only. The vision tower of a checkpoint then stays unchanged."""

    @property
    def recomputed(self) -> Recompute:
        """The setting `recompute` as a section."""
        given = self.recompute
        section = Recompute(granularity=given) if isinstance(given, str) else given
        if self.activation_offload and section.granularity == "selective" and section.modules is None:
            return section.model_copy(update={"modules": ("core_attn",)})  # inputs of cheap outputs stay on the device
        return section

    @property
    def residual(self) -> str:
        """The data type of the residual stream."""
        return self.residual_dtype or self.dtype

    @property
    def head(self) -> str:
        """The data type of the logits."""
        return self.head_dtype or self.dtype


class LossScale(Section):
    """Loss scaling for model.dtype float16. It keeps small gradients from becoming zero. Optimizer steps with
    overflowing gradients are skipped, and halve the scale. Losses are sums over tokens, with larger gradients than
    means. The scale is therefore smaller than the usual 65536 of other frameworks."""

    initial: Positive = 128.0
    """Scale at the first step."""
    window: Count = 200
    """Number of optimizer steps without an overflow before the scale doubles."""
    hysteresis: Count = 1
    """Number of overflows before the scale is halved."""
    minimum: Positive = 2.0**-10
    """Smallest scale. An overflow at this scale counts as a diverged step (on_divergence)."""


class Muon(Section):
    """Settings of optimizer.name muon, for the matrices of layers."""

    momentum: Share = 0.95
    """Decay of the momentum per optimizer step."""
    nesterov: bool = True
    """Uses Nesterov momentum."""
    newton_schulz_steps: Count = 5
    """Iterations of the orthogonalization."""


class Optimizer(Section):
    """Adam with decoupled weight decay, or Muon. docs/optimizer.md compares them."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon updates matrices of layers by their orthogonalized momentum, scaled to the size of AdamW's updates. lr and
    weight_decay therefore keep their meaning. Embeddings, head, norms, biases and routers use AdamW."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the optimizer's moments. The optimizer always computes in fp32. bfloat16 halves their memory."""
    cpu_offload: bool | Share = False
    """Keeps fp32 weights and moments on the host, and runs the optimizer there. `true`: all parameters. A number: this
    share of them. With backend fsdp gradients are on the host too, and layers come to the device for their computation.
    fsdp allows no share."""
    muon: Muon = Muon()
    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps (mini-batches) with linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the end of the warm-up to the last optimizer step."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    beta1: Fraction = 0.9
    """Decay of Adam's first moment."""
    beta2: Fraction = 0.95
    """Decay of Adam's second moment."""
    eps: Positive = 1e-8
    """Added to the denominator of Adam's update."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the gradient. A larger gradient is scaled down. `0`: no limit."""
    loss_scale: LossScale = LossScale()


class Fsdp(Section):
    """Settings of models with backend fsdp."""

    replicas: Count = 1
    """Copies of the model among the ranks of a role. Consecutive ranks share a copy. `1`: all ranks share one."""
    reshard_after_forward: bool = True
    """Frees a layer's gathered weights after its forward. Backward then gathers them again."""


DEFAULT_MICRO_BATCH_TOKENS = 16384


class Batched(Section):
    """Common keys of the roles whose model computes whole samples in micro-batches."""

    micro_batch_tokens: Count | Literal["auto"] = DEFAULT_MICRO_BATCH_TOKENS
    """Most tokens of a micro-batch per rank of context parallelism. A micro-batch thus has up to cp times as many. A
    longer sequence forms a micro-batch alone. `auto`: as many as the GPU's memory allows by the dry run's estimate,
    and the default on CPUs."""

    @property
    def micro_batch_limit(self) -> int:
        """The number in `micro_batch_tokens`. For `auto` the default, which a job replaces before it starts."""
        tokens = self.micro_batch_tokens
        return DEFAULT_MICRO_BATCH_TOKENS if tokens == "auto" else tokens


class Trained(Batched):
    """Common keys of the roles with an optimizer."""

    backend: Backend | None = None
    """`megatron`: megatron-core. `fsdp`: the model of transformers, with parameters sharded over all ranks of the role
    by torch's fully_shard. `null`: the backend of the actor, by default megatron."""
    fsdp: Fsdp | None = None
    """Sharding with backend fsdp. `null`: the actor's."""
    optimizer: Optimizer = Optimizer()
    distributed_optimizer: bool = True
    """Shards optimizer states over data-parallel ranks."""
    overlap: Literal["auto"] | bool = "auto"
    """Overlaps the reduction of gradients over data parallelism with backward. With distributed_optimizer also overlaps
    the gathering of weights with the next mini-batch's forward. `auto`: on GPUs."""
    gradient_bucket_mb: Positive | None = None
    """With overlap: size in MB of the fp32 gradients in one reduction. `null`: Megatron's choice, 160 MB, or 4 MB per
    replica from 40 replicas on."""
    offload: Offload = "auto"
    """Moves the role's memory to the host between its tasks. `auto`: if it shares ranks with a role in need of the
    memory and runs on a GPU."""


class Actor(Trained):
    """The trained policy."""

    parallel: Parallel = Parallel()
    share_prefixes: SharePrefixes = "auto"
    """Computes a prefix that several samples of a micro-batch share only once: a prompt of a group, the turns before
    another. Results are the same but for rounding. micro_batch_tokens then counts computed tokens. `auto`: where that
    saves a tenth of the tokens."""


class Critic(Trained):
    """The value model of PPO."""

    parallel: Parallel | None = None
    """Parallel sizes. `null`: the actor's."""
    share_prefixes: SharePrefixes | None = None
    """Same as actor.share_prefixes. `null`: the actor's."""
    path: Annotated[str | None, HubName("model")] = None
    """A Hugging Face checkpoint to start from. Without a score head the head starts at zero. `null`: the actor's
    starting checkpoint."""
    lora: Lora | None = None
    """Trains low-rank adapters and the score head, and keeps all other weights as loaded. `null`: all weights are
    trained."""
    critic_warmup_steps: NonNegativeInt = 0
    """Number of first steps with a fixed actor. Only the critic learns in them."""
    value_clip: Positive | None = 0.2
    """Largest move of a value, from the value used for the advantages, before the value loss is clipped. `null`: no
    limit."""


class Evaluating(Batched):
    """Common keys of the roles with a fixed model for evaluating samples."""

    backend: Backend | None = None
    """Training backend. `null`: the actor's."""
    fsdp: Fsdp | None = None
    """Sharding with backend fsdp. `null`: the actor's."""
    parallel: Parallel | None = None
    """Parallel sizes. `null`: the actor's."""
    share_prefixes: SharePrefixes | None = None
    """Same as actor.share_prefixes. `null`: the actor's."""
    offload: Offload = "auto"
    """Same as actor.offload."""


class Reference(Evaluating):
    """The reference model of the KL penalty and of DPO."""

    path: Annotated[str | None, HubName("model")] = None
    """A Hugging Face checkpoint. `null`: the actor's starting checkpoint."""
    refresh_every: NonNegativeInt = 0
    """Steps between copies of the actor's weights to the reference. `0`: the reference never changes."""


class Teacher(Evaluating):
    """On-policy distillation: a teacher evaluates the samples of the actor."""

    path: Annotated[str | dict[str, str] | None, HubName("model")] = None
    """A Hugging Face checkpoint with the actor's vocabulary. Or several checkpoints of one architecture, by name. Each
    row of data.train then names its teacher in `column`."""
    column: str = "teacher"
    """Column of data.train with the name of a row's teacher, if `path` has several."""
    coef: Positive = 1.0
    """Coefficient of the distance from the teacher."""
    where: Literal["advantage", "loss"] = "advantage"
    """`advantage`: subtracts log-prob of the actor minus log-prob of the teacher from a token's advantage, an estimate
    of the reverse KL. `loss`: adds the reverse KL to the loss."""
    max_distance: Positive | None = None
    """Largest distance per token. With where: advantage it holds in both directions. With where: loss it needs top_k,
    and a token beyond it has no gradient. `null`: no limit."""
    top_k: NonNegativeInt | Literal["full"] = 0
    """With where: loss, number of tokens in the KL. It takes the teacher's likeliest tokens, with all others as one
    more outcome. `full`: the whole vocabulary. `0`: an estimate from the sampled token."""
    kl: Literal["reverse", "forward"] = "reverse"
    """`reverse`: KL(actor || teacher). `forward`: KL(teacher || actor), with where: loss and top_k."""
    rest: bool = True
    """With kl: forward. `true` counts all other tokens as one more outcome. `false` sums over top_k alone, with 0 for a
    negative sum, as in verl."""
    min_logprob: Annotated[float, Field(lt=0)] | None = None
    """With kl: forward. Lower bound of the log-probs of teacher and actor. A token of even lower log-prob under the
    actor has no gradient. `null`: no bound."""

    @property
    def checkpoints(self) -> dict[str, str]:
        """The checkpoint folders by the name of their teacher."""
        return self.path if isinstance(self.path, dict) else {"teacher": self.path or ""}


class Inference(Evaluating):
    """Computes the actor's log-probs before an update, on separate ranks. It receives the actor's weights together
    with the rollout. On the actor's ranks, with the actor's layout, it is the actor itself."""


class RewardModel(Evaluating):
    """Scores whole responses with a classifier, a *ForSequenceClassification with one label. The score is part of the
    reward."""

    path: Annotated[str | None, HubName("model")] = None
    """The Hugging Face checkpoint of the classifier. It may have its own tokenizer and vocabulary."""
    weight: float = 1.0
    """Weight of the score in the reward."""
    name: str = "model"
    """Name in metrics: rollout/reward_<name>."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: the chat template of the classifier's tokenizer formats the conversation, if it has one. `never`: the
    text is the prompt followed by the response."""
    ends_with_eos: bool = False
    """Makes texts end with the tokenizer's eos_token, as in `algorithm: reward_model`. Text of a template after the
    last eos_token is removed. A missing eos_token is added."""
    max_tokens: Count | None = None
    """Most tokens of a text. Only the end of a longer text is used. `null`: the positions of the model."""

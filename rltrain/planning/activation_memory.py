"""Bytes of activations that a forward pass keeps for its backward pass.

Counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), for this model: RMSNorm, gated MLP, grouped-query
or latent attention by a fused kernel, no dropout. Per token that the rank computes, in elements: the inputs of both
norms, which have the type of the residual stream, and of both blocks (4 hidden), queries, keys and values, what
attention puts out, and what the MLP's matrices put out. Where adapters alone learn, the inputs of matrices that have
none are not kept.
"""

from dataclasses import dataclass

from rltrain.models import Architecture
from rltrain.models.canonical import layer_of
from rltrain.models.delta_net import CHUNK_TOKENS
from rltrain.models.flops import block_bytes
from rltrain.models.lora import ADAPTER_A
from rltrain.models.table import LayerKind
from rltrain.planning.optimizer_memory import learns_adapters
from rltrain.planning.planned import PlannedJob, layers_of_chunks, layers_of_stage

# What autograd keeps of a layer's inputs for the gradients of its matrices: those of every matrix that learns, of a
# frozen one nothing, and of adapters their inputs and what is between their halves.

QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"
EXPERT_FC1, EXPERT_FC2 = (f"mlp.experts.local_experts.{{expert}}.{name}" for name in ("linear_fc1", "linear_fc2"))
LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class KeptInputs:
    """`adapters` are the numbers between the halves, of one token, by the matrix that these are beside; None where the
    matrices learn themselves. With `drops` an adapter keeps its input without what was dropped, and which that was."""

    adapters: dict[str, int] | None
    drops: bool

    def copies(self, matrix: str) -> int:
        """Of its input: 0 where nothing beside it or in it learns."""
        if self.adapters is None:
            return 1
        return (2 if self.drops else 1) if matrix in self.adapters else 0

    def beside(self, *matrices: str) -> int:
        """Elements of one token that the adapters of these matrices keep between their halves."""
        return sum((self.adapters or {}).get(matrix, 0) for matrix in matrices)


def kept_inputs(job: PlannedJob, role: str, sparse: bool) -> KeptInputs:
    """Of a layer with experts (`sparse`) or without."""
    lora = job.config.model.lora
    if lora is None or not learns_adapters(job, role):
        return KeptInputs(None, drops=False)
    layer = layer_of(job.architectures[role].adapted(lora.rank, lora.targets), LayerKind(sparse))
    halves = (row for row in (*layer.rows, *layer.experts) if row.megatron.endswith(ADAPTER_A))
    between = {row.megatron.removeprefix(LAYER).removesuffix(ADAPTER_A): lora.rank * len(row.parts) for row in halves}
    return KeptInputs(between, drops=lora.dropout > 0)


FP32 = 4
OFFLOADED_THERE = 2
"""With model.activation_offload, layers of which a device has everything while it is on its way to the host or back."""


@dataclass(frozen=True)
class Activations:
    """Of one role's model, on a rank of pipeline stage `stage`."""

    job: PlannedJob
    role: str
    stage: int

    @property
    def architecture(self) -> Architecture:
        return self.job.architectures[self.role]

    @property
    def has_head(self) -> bool:
        return self.stage == self.job.grids[self.role].pp - 1

    def training(self, tokens: int) -> int:
        """At most at once, with micro-batches of `tokens` tokens. A layer that is recomputed keeps its input, one whose
        parts are what is left without them, and one layer at a time has all that it computes anew."""
        kept, again = self._kept()
        of_all = sum(map(sum, kept))
        if self.job.config.model.activation_offload:
            leave = [layer for chunk in kept for layer in chunk[:-1]]
            there = self._under_way() * (of_all - sum(leave)) + OFFLOADED_THERE * max(leave, default=0)
            of_tokens = int(there + self._under_way() * self._ends()) + max(again, default=0)
        else:
            of_tokens = int(self._under_way() * (of_all + self._ends())) + max(again, default=0)
        return tokens * of_tokens + self._rounded_in_training() + self._scores(tokens)

    def offloaded(self, tokens: int) -> int:
        """At most at once on the host."""
        return tokens * int(self._under_way() * self.leaving())

    def leaving(self) -> int:
        """Of one token, what goes to the host and comes back: all layers' but the last one's of every chunk."""
        leaves = self.job.config.model.activation_offload
        return sum(sum(chunk[:-1]) for chunk in self._kept()[0]) if leaves else 0

    def _kept(self) -> tuple[list[list[int]], list[int]]:
        """Of one token: what the layers of each chunk keep for backward, and what layers compute anew."""
        kept, again = [], []
        for layers in layers_of_chunks(self.architecture, self.job.grids[self.role], self.stage):
            whole = self.job.config.model.recomputed.full_layers(len(layers))
            anew = [self.layer(sparse) for sparse in layers[:whole]] + [self._recomputed(s) for s in layers[whole:]]
            again += [size + self._between_projections() for size in anew]
            inputs = [self._hidden(self.job.residual_bytes)] * whole
            kept.append(inputs + [self.layer(sparse) - self._recomputed(sparse) for sparse in layers[whole:]])
        return kept, again

    def _under_way(self) -> float:
        """Micro-batches whose activations the stage has at once. By 1F1B as many as there are stages from it on; of
        interleaved stages a micro-batch is under way chunk by chunk (Narayanan et al. 2021, arXiv:2104.04473)."""
        grid = self.job.grids[self.role]
        behind = grid.pp - self.stage - 1
        chunks = 1 + behind if grid.vpp == 1 else 1 + 2 * behind + (grid.vpp - 1) * grid.pp
        return min(self.job.num_micro_batches(self.role), chunks / grid.vpp)

    def evaluating(self, tokens: int) -> int:
        """Without gradients: those of the layer that is being computed."""
        layers = layers_of_stage(self.architecture, self.job.grids[self.role], self.stage)
        rounded = self._rounded_layer() if any(layers) else 0
        of_token = max((self.layer(sparse) for sparse in set(layers)), default=0) + self._between_projections()
        return of_token * tokens + rounded + self._scores(tokens)

    def _scores(self, tokens: int) -> int:
        """Of the block that one layer at a time has."""
        num_heads = self.architecture.num_heads // self.job.grids[self.role].tp
        return block_bytes(self.architecture, num_heads, tokens)

    def _rounded_in_training(self) -> int:
        """Rounded matrices of experts that products keep for backward: of every layer that is not computed anew, once
        per micro-batch that is under way, and of one that is."""
        model, kept, again = self.job.config.model, 0, 0
        for layers in layers_of_chunks(self.architecture, self.job.grids[self.role], self.stage):
            whole = len(layers) if model.recomputed.repeats("moe") else model.recomputed.full_layers(len(layers))
            kept += sum(layers[whole:])
            again = max(again, int(any(layers[:whole])))
        return int((self._under_way() * kept + again) * self._rounded_layer())

    def _rounded_layer(self) -> int:
        """Of one layer, with model.fake_quantization."""
        moe, grid = self.architecture.moe, self.job.grids[self.role]
        if moe is None or self.job.config.model_of(self.role).fake_quantization is None:
            return 0
        elements = 3 * self.architecture.hidden_size * moe.ffn_hidden_size * moe.num_experts
        num_ranks = 1 if grid.is_sharded else grid.ep * (grid.etp or grid.tp)
        return elements // num_ranks * self.job.item_bytes

    def layer(self, sparse: bool) -> int:
        """Of one token in one layer."""
        post_norms = 2 * self._normed() if self.architecture.post_norms else 0
        blocks = self._blocks_inputs(sparse) + self._mixer(sparse) + self._inside(sparse)
        return 2 * self._norm() + post_norms + blocks

    def _recomputed(self, sparse: bool) -> int:
        """Of `layer`, what parts of it that are computed anew do not keep."""
        repeats = self.job.config.model.recomputed.repeats
        parts = (
            (repeats("core_attn"), self._attended()),
            (repeats("layernorm"), self._blocks_inputs(sparse)),
            (repeats("moe" if sparse else "mlp"), self._inside(sparse)),
        )
        return sum(size for is_repeated, size in parts if is_repeated)

    def _kept_inputs(self, sparse: bool) -> KeptInputs:
        return kept_inputs(self.job, self.role, sparse)

    def _blocks_inputs(self, sparse: bool) -> int:
        """What norms put out for attention, and for the MLP or the experts, whose router takes it too. A block that is
        computed anew keeps it whatever learns."""
        kept = self._kept_inputs(sparse)
        second = kept.copies(SHARED_FC1 if sparse else FC1) > 0 or not learns_adapters(self.job, self.role)
        again = self.job.config.model.recomputed.repeats("moe" if sparse else "mlp")
        return ((kept.copies(QKV) > 0) + (second or again)) * self._hidden(self.job.item_bytes)

    def _inside(self, sparse: bool) -> int:
        return self._experts() if sparse else self._mlp()

    def _hidden(self, item_bytes: int) -> int:
        """Of one hidden state: cut among tensor-parallel ranks by sequence parallelism."""
        parallel = self.job.config.parallel_of(self.role)[0]
        is_cut = parallel.sequence_parallel or self.architecture.is_split_by_tokens
        return self.architecture.hidden_size * item_bytes // (parallel.tp if is_cut else 1)

    def _norm(self) -> int:
        """A norm's input; transformers' norms have it in fp32 in between, and what their weight is multiplied by, which
        one that is frozen does not keep."""
        between = 1 + (not learns_adapters(self.job, self.role)) if self.job.grids[self.role].is_sharded else 0
        return self._hidden(self.job.residual_bytes) + between * self._hidden(FP32)

    def _normed(self) -> int:
        """A norm's input and output."""
        return self._norm() + self._hidden(self.job.item_bytes)

    def _ends(self) -> int:
        """The final norm's. A frozen head keeps no input, unless it makes logits again in parts."""
        if not self.has_head:
            return 0
        is_kept = self.job.config.model.logits_chunk_tokens or not learns_adapters(self.job, self.role)
        return (self._normed() if is_kept else self._norm()) + self._prediction()

    def _prediction(self) -> int:
        """Of the layer that predicts a further token, no part of which is computed anew: that of the decoder, the norms
        of the embedding and of what it puts out, the input of the matrix, and the whole states that logits are made of.
        The norm of the hidden state has the head's input."""
        if not self.architecture.predicts or self.job.config.model.mtp is None:
            return 0
        whole = self.architecture.hidden_size * self.job.item_bytes
        norms_and_input = 2 * self._norm() + 2 * self._hidden(self.job.item_bytes)
        return self.layer(self.architecture.predicting_kind.sparse) + norms_and_input + whole

    def _attended(self) -> int:
        """What attention puts out; the mean of all layers where some have gated delta nets."""
        a = self.architecture
        values = a.num_heads * (a.mla.value_head_dim if a.mla else a.head_dim) * a.num_attention_layers // a.num_layers
        return values * self.job.item_bytes // self.job.grids[self.role].tp

    def _mixer(self, sparse: bool) -> int:
        """Of attention; the mean of all layers where some have gated delta nets, of which what is projected and what
        heads put out is kept. Attention with gates keeps those and what they let through."""
        a, delta, cut = self.architecture, self.architecture.delta, self.job.grids[self.role].tp
        gates = 2 * a.query_size * self.job.item_bytes // cut if a.gated_attention else 0
        attention = self._attention(sparse) + gates
        if delta is None:
            return attention
        kept = (delta.channels + 2 * delta.values + 2 * delta.num_heads) * self.job.item_bytes // cut
        return (a.num_attention_layers * attention + delta.num_layers * kept) // a.num_layers

    def _between_projections(self) -> int:
        """Of a gated delta net, which one layer at a time has, forward or backward: as autograd keeps it, counted."""
        delta = self.architecture.delta
        if delta is None:
            return 0
        of_head = 5 * delta.key_dim + 10 * delta.value_dim + 7 * CHUNK_TOKENS
        of_head += delta.key_dim * delta.value_dim // CHUNK_TOKENS
        elements = delta.num_heads * of_head + delta.num_key_heads * 10 * delta.key_dim
        return elements * FP32 // self.job.grids[self.role].tp

    def _attention(self, sparse: bool) -> int:
        a, item, config = self.architecture, self.job.item_bytes, self.job.config
        queries, values = a.query_size, a.num_heads * a.head_dim
        keys = a.kv_size
        latents = 0
        if a.mla:
            keys, values = a.query_size, a.num_heads * a.mla.value_head_dim
            latents = 2 * ((a.mla.q_rank or 0) + a.mla.kv_rank + a.mla.rope_head_dim)
        kept_values = values if a.mla else a.kv_size
        frozen_norms = self.job.grids[self.role].is_sharded and learns_adapters(self.job, self.role)
        inputs = queries + keys + kept_values + (queries + keys if a.qk_norm and not frozen_norms else 0)
        copies = 0
        if self.job.has_local_layers(self.role):
            all_ranks = 1 if config.model.cp_communication == "all_to_all" else self.job.grids[self.role].cp
            copies = queries + (keys + kept_values) * all_ranks + values
        kept = self._kept_inputs(sparse)
        again = max(kept.copies(QKV) - 1, 0) * self._hidden(item)
        split = (inputs + (1 + kept.copies(PROJECTION)) * values + copies) * item + a.num_heads * FP32
        return split // self.job.grids[self.role].tp + (latents + kept.beside(QKV, PROJECTION)) * item + again

    def _mlp(self) -> int:
        """Gate and up, the activated gate, their product, which the last matrix is given; without a gate what ReLU lets
        through, and its square."""
        kept, item = self._kept_inputs(sparse=False), self.job.item_bytes
        again = max(kept.copies(FC1) - 1, 0) * self._hidden(item)
        of_products = 3 if self.architecture.gates_mlps else 1
        inside = (of_products + kept.copies(FC2)) * self.architecture.ffn_hidden_size // self.job.grids[self.role].tp
        return (inside + kept.beside(FC1, FC2)) * item + again

    def _experts(self) -> int:
        """Tokens are taken to be shared out evenly over the ranks of expert parallelism. Routers keep scores and
        weights, and what their losses are made of."""
        moe, item, grid = self.architecture.moe, self.job.item_bytes, self.job.grids[self.role]
        assert moe is not None
        etp, kept = grid.etp or grid.tp, self._kept_inputs(sparse=True)
        dispatched = (1 + kept.copies(EXPERT_FC1)) * moe.top_k * self.architecture.hidden_size * etp // grid.tp
        inside = (3 + kept.copies(EXPERT_FC2)) * moe.top_k * moe.ffn_hidden_size // grid.tp
        inside += (3 + kept.copies(SHARED_FC2)) * moe.shared_ffn_hidden_size // grid.tp
        inside += moe.top_k * kept.beside(EXPERT_FC1, EXPERT_FC2) + kept.beside(SHARED_FC1, SHARED_FC2)
        again = max(kept.copies(SHARED_FC1) - 1, 0) * self._hidden(item)
        settings = self.job.config.model.moe
        scores = 2 + 2 * (settings.aux_loss_coef > 0) + (settings.z_loss_coef > 0)
        return (dispatched + inside) * item + again + scores * moe.num_experts * FP32 // grid.tp

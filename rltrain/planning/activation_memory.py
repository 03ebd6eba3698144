"""Estimates the bytes of activations kept by a forward pass for its backward pass.

The count follows Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1). The model has RMSNorm, gated MLP, and
grouped-query or latent attention by a fused kernel, without dropout. Per token of a rank, these are kept, in elements:

- the inputs of both norms in the type of the residual stream, and the inputs of both blocks (4 hidden)
- queries, keys and values
- the outputs of attention and of the MLP's matrices

If only adapters learn, inputs of matrices without adapters are not kept.
"""

from dataclasses import dataclass

from rltrain.config.models import RecomputedModule
from rltrain.models import Architecture
from rltrain.models.canonical import layer_of
from rltrain.models.delta_net import CHUNK_TOKENS
from rltrain.models.flops import block_bytes
from rltrain.models.lora import ADAPTER_A
from rltrain.models.table import LayerKind
from rltrain.planning.optimizer_memory import learns_adapters
from rltrain.planning.planned import PlannedJob, layers_of_chunks, layers_of_stage

# Inputs of a layer's matrices kept by autograd for gradients. A trained matrix keeps its input, a frozen one does not.
# An adapter keeps its input and the values between its halves.

QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"
EXPERT_FC1, EXPERT_FC2 = (f"mlp.experts.local_experts.{{expert}}.{name}" for name in ("linear_fc1", "linear_fc2"))
LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class KeptInputs:
    """The kept inputs of one layer.

    `adapters` are the numbers of elements per token between an adapter's halves, by matrix. None if the matrices
    themselves learn. With `drops` an adapter also keeps its input after dropout, and the mask.
    """

    adapters: dict[str, int] | None
    drops: bool

    def copies(self, matrix: str) -> int:
        """Returns the number of kept copies of the matrix's input. 0 if neither it nor an adapter of it learns."""
        if self.adapters is None:
            return 1
        return (2 if self.drops else 1) if matrix in self.adapters else 0

    def beside(self, *matrices: str) -> int:
        """Returns the elements per token kept between the halves of these matrices' adapters."""
        return sum((self.adapters or {}).get(matrix, 0) for matrix in matrices)


def kept_inputs(job: PlannedJob, role: str, sparse: bool) -> KeptInputs:
    """Returns the kept inputs of a layer with experts (`sparse`) or without."""
    lora = job.config.model.lora
    if lora is None or not learns_adapters(job, role):
        return KeptInputs(None, drops=False)
    layer = layer_of(job.architectures[role].adapted(lora.rank, lora.targets, vision=lora.vision), LayerKind(sparse))
    halves = (row for row in (*layer.rows, *layer.experts) if row.megatron.endswith(ADAPTER_A))
    between = {row.megatron.removeprefix(LAYER).removesuffix(ADAPTER_A): lora.rank * len(row.parts) for row in halves}
    return KeptInputs(between, drops=lora.dropout > 0)


FP32 = 4
OFFLOADED_THERE = 2
"""Number of layers whose activations are whole on the device during a transfer, with model.activation_offload."""


@dataclass(frozen=True)
class Activations:
    """The activations of one role's model, on a rank of pipeline stage `stage`."""

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
        """Returns the peak bytes in training with micro-batches of `tokens` tokens.

        A fully recomputed layer keeps its input. A partly recomputed one keeps its other parts. One layer at a time has
        all its recomputed activations.
        """
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
        """Returns the peak bytes of offloaded activations in host memory.

        They are those of all micro-batches under way on the stage at once. Each has `tokens` tokens on this rank.
        """
        return tokens * int(self._under_way() * self.leaving())

    def leaving(self) -> int:
        """Returns the offloaded bytes per token. The last layer of every chunk stays."""
        leaves = self.job.config.model.activation_offload
        return sum(sum(chunk[:-1]) for chunk in self._kept()[0]) if leaves else 0

    def _kept(self) -> tuple[list[list[int]], list[int]]:
        """Returns, in bytes per token, the activations kept by each layer of each chunk, and the recomputed ones of
        each layer."""
        kept, again = [], []
        for layers in layers_of_chunks(self.architecture, self.job.grids[self.role], self.stage):
            whole = self.job.config.model.recomputed.full_layers(len(layers))
            anew = [self.layer(sparse) for sparse in layers[:whole]] + [self._recomputed(s) for s in layers[whole:]]
            again += [size + self._between_projections() for size in anew]
            inputs = [self._hidden(self.job.residual_bytes)] * whole
            kept.append(inputs + [self.layer(sparse) - self._recomputed(sparse) for sparse in layers[whole:]])
        return kept, again

    def _under_way(self) -> float:
        """Returns the number of micro-batches with activations on the stage at once.

        With 1F1B it is the number of stages from this one on. With interleaved stages it is counted by chunks
        (Narayanan et al. 2021, arXiv:2104.04473).
        """
        grid = self.job.grids[self.role]
        behind = grid.pp - self.stage - 1
        chunks = 1 + behind if grid.vpp == 1 else 1 + 2 * behind + (grid.vpp - 1) * grid.pp
        return min(self.job.num_micro_batches(self.role), chunks / grid.vpp)

    def evaluating(self, tokens: int) -> int:
        """Returns the peak bytes without gradients. Only the layer being computed has activations."""
        layers = layers_of_stage(self.architecture, self.job.grids[self.role], self.stage)
        rounded = self._rounded_layer() if any(layers) else 0
        of_token = max((self.layer(sparse) for sparse in set(layers)), default=0) + self._between_projections()
        return of_token * tokens + rounded + self._scores(tokens)

    def _scores(self, tokens: int) -> int:
        """Returns the bytes of the block of attention scores. One layer at a time has one."""
        num_heads = self.architecture.num_heads // self.job.grids[self.role].tp
        return block_bytes(self.architecture, num_heads, tokens)

    def _rounded_in_training(self) -> int:
        """Returns the bytes of rounded expert matrices kept for backward.

        Each layer without recomputation keeps them once per micro-batch under way. One recomputed layer at a time has
        them too.
        """
        model, kept, again = self.job.config.model, 0, 0
        for layers in layers_of_chunks(self.architecture, self.job.grids[self.role], self.stage):
            whole = len(layers) if self.job.repeats(self.role, "moe") else model.recomputed.full_layers(len(layers))
            kept += sum(layers[whole:])
            again = max(again, int(any(layers[:whole])))
        return int((self._under_way() * kept + again) * self._rounded_layer())

    def _rounded_layer(self) -> int:
        """Returns the bytes of one layer's rounded experts, with model.fake_quantization."""
        moe, grid = self.architecture.moe, self.job.grids[self.role]
        if moe is None or self.job.config.model_of(self.role).fake_quantization is None:
            return 0
        elements = 3 * self.architecture.hidden_size * moe.ffn_hidden_size * moe.num_experts
        num_ranks = 1 if grid.is_sharded else grid.ep * (grid.etp or grid.tp)
        return elements // num_ranks * self.job.item_bytes

    def layer(self, sparse: bool) -> int:
        """Returns the bytes per token of one layer."""
        post_norms = 2 * self._normed() if self.architecture.post_norms else 0
        blocks = self._blocks_inputs(sparse) + self._mixer(sparse) + self._inside(sparse)
        return 2 * self._norm() + post_norms + blocks

    def _recomputed(self, sparse: bool) -> int:
        """Returns the part of `layer` that is recomputed and not kept."""
        inside = self._repeats("moe" if sparse else "mlp")
        parts = (
            (self._repeats("core_attn"), self._attended(sparse)),
            (self._repeats("layernorm"), self._repeated_norms(sparse)),
            (self._repeats("rotation"), self._rotated()),
            (self._repeats("activation") and not inside, self._activated(sparse)),
            (inside, self._inside(sparse)),
        )
        return sum(size for is_repeated, size in parts if is_repeated)

    def made_again(self, sparse: bool) -> tuple[int, int]:
        """Returns the number of kernels that make cheap outputs again in a layer's backward, and the bytes that they
        read and write per token."""
        hidden = self._hidden(self.job.item_bytes)
        norms = self._repeated_norms(sparse) if self._repeats("layernorm") else 0
        rotated = self._rotated() if self._repeats("rotation") else 0
        activated = self._activated(sparse) if self._repeats("activation") and not self._repeats("mlp") else 0
        read = norms // hidden * self._norm() + rotated + 2 * activated
        return norms // hidden + (rotated > 0) + (activated > 0), read + norms + rotated + activated

    def _repeats(self, module: RecomputedModule) -> bool:
        return self.job.repeats(self.role, module)

    def _kept_inputs(self, sparse: bool) -> KeptInputs:
        return kept_inputs(self.job, self.role, sparse)

    def _blocks_inputs(self, sparse: bool) -> int:
        """Returns the bytes of the norms' outputs: the inputs of attention, and of the MLP or the experts with their
        router.

        A recomputed block keeps its input even if nothing in it learns.
        """
        kept = self._kept_inputs(sparse)
        second = kept.copies(SHARED_FC1 if sparse else FC1) > 0 or not learns_adapters(self.job, self.role)
        again = self._repeats("moe" if sparse else "mlp")
        return ((kept.copies(QKV) > 0) + (second or again)) * self._hidden(self.job.item_bytes)

    def _repeated_norms(self, sparse: bool) -> int:
        """Returns the part of `_blocks_inputs` that is recomputed. Without Transformer Engine it is the inputs of dense
        products alone, without those of latent attention. With dropout these products keep other inputs."""
        if self.job.has_te_layers(self.role):
            return self._blocks_inputs(sparse)
        kept = self._kept_inputs(sparse)
        first = kept.copies(QKV) == 1 and self.architecture.mla is None
        second = kept.copies(FC1) == 1 and not sparse and not self._repeats("mlp")
        return (first + second) * self._hidden(self.job.item_bytes)

    def _rotated(self) -> int:
        """Returns the bytes of normalized and rotated queries and keys that a kernel makes. The mean of all layers if
        some have gated delta nets."""
        a, grid = self.architecture, self.job.grids[self.role]
        unfused = a.mla is not None or a.gated_attention or a.norms_projections or self._pads
        if grid.is_sharded or unfused or grid.cp > 1 or a.num_kv_heads < grid.tp:
            return 0
        return (a.query_size + a.kv_size) * self.job.item_bytes // grid.tp * a.num_attention_layers // a.num_layers

    def _activated(self, sparse: bool) -> int:
        """Returns the bytes of a dense MLP's gated activations, the input of its last matrix."""
        is_kept = not sparse and self.architecture.gates_mlps and self._kept_inputs(sparse).copies(FC2) == 1
        return self.architecture.ffn_hidden_size * self.job.item_bytes // self.job.grids[self.role].tp * is_kept

    def _inside(self, sparse: bool) -> int:
        return self._experts() if sparse else self._mlp()

    def _hidden(self, item_bytes: int) -> int:
        """Returns the bytes of one hidden state. Sequence parallelism splits it among tensor-parallel ranks."""
        parallel = self.job.config.parallel_of(self.role)[0]
        is_cut = parallel.sequence_parallel or self.architecture.is_split_by_tokens
        return self.architecture.hidden_size * item_bytes // (parallel.tp if is_cut else 1)

    def _norm(self) -> int:
        """Returns the bytes of a norm's input."""
        return self._hidden(self.job.residual_bytes)

    def _normed(self) -> int:
        """Returns the bytes of a norm's input and output."""
        return self._norm() + self._hidden(self.job.item_bytes)

    def _ends(self) -> int:
        """Returns the bytes of the final norm. A frozen head for values keeps no input."""
        if not self.has_head:
            return 0
        is_kept = self.architecture.head == "vocabulary" or not learns_adapters(self.job, self.role)
        return (self._normed() if is_kept else self._norm()) + self._prediction()

    def _prediction(self) -> int:
        """Returns the bytes of the layer for a further token. None of it is recomputed.

        They are those of a decoder layer, of the norms of the embedding and of the layer's output, of the matrix's
        input, and of the whole states for logits. The norm of the hidden state uses the head's input.
        """
        if not self.architecture.predicts or self.job.config.model.mtp is None:
            return 0
        whole = self.architecture.hidden_size * self.job.item_bytes
        norms_and_input = 2 * self._norm() + 2 * self._hidden(self.job.item_bytes)
        return self.layer(self.architecture.predicting_kind.sparse) + norms_and_input + whole

    def _attended(self, sparse: bool) -> int:
        """Returns the bytes of attention's outputs that no product keeps, and of log-sum-exps. The mean of all layers
        if some have gated delta nets."""
        a = self.architecture
        is_kept_anyway = not self._pads and self._kept_inputs(sparse).copies(PROJECTION) > 0
        of_head = 0 if is_kept_anyway else (a.mla.value_head_dim if a.mla else a.head_dim) * self.job.item_bytes
        all_heads = a.num_heads * (of_head + FP32) * a.num_attention_layers // a.num_layers
        return all_heads // self.job.grids[self.role].tp

    @property
    def _pads(self) -> bool:
        """Whether attention computes padded copies of queries, keys and values, and keeps these."""
        a, job = self.architecture, self.job
        is_packed = job.attends_packed and a.attention_softcap is None and not a.attention_sinks and a.mla is None
        return not is_packed and not job.has_te_layers(self.role)

    def _mixer(self, sparse: bool) -> int:
        """Returns the bytes of attention. The mean of all layers if some have gated delta nets.

        A gated delta net keeps its projections and the outputs of its heads. Gated attention also keeps the gates and
        their products.
        """
        a, delta, cut = self.architecture, self.architecture.delta, self.job.grids[self.role].tp
        gates = 2 * a.query_size * self.job.item_bytes // cut if a.gated_attention else 0
        attention = self._attention(sparse) + gates
        if delta is None:
            return attention
        kept = (delta.channels + 2 * delta.values + 2 * delta.num_heads) * self.job.item_bytes // cut
        return (a.num_attention_layers * attention + delta.num_layers * kept) // a.num_layers

    def _between_projections(self) -> int:
        """Returns the bytes inside a gated delta net, in forward or backward. One layer at a time has them, for every
        token of samples that share a prompt. The numbers were counted in autograd."""
        delta = self.architecture.delta
        if delta is None:
            return 0
        of_head = 5 * delta.key_dim + 10 * delta.value_dim + 7 * CHUNK_TOKENS
        of_head += delta.key_dim * delta.value_dim // CHUNK_TOKENS
        elements = delta.num_heads * of_head + delta.num_key_heads * 10 * delta.key_dim
        unshared = 1 / self.job.computed_of_longest(self.role).share
        return int(elements * unshared) * FP32 // self.job.grids[self.role].tp

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
        # One product makes queries, keys and values in one memory. Attention keeps values, and so all of it.
        is_whole = not (self.job.grids[self.role].is_sharded or a.mla)
        has_both = is_whole or (a.qk_norm and not frozen_norms)
        inputs = queries + keys + kept_values + (queries + keys if has_both else 0)
        gathers = self.job.attends_locally(self.role) and config.model.cp_communication != "all_to_all"
        all_ranks = self.job.grids[self.role].cp if gathers else 1
        copies = (keys + kept_values) * all_ranks if self._pads or all_ranks > 1 else 0
        copies += queries + values if self._pads else 0
        kept = self._kept_inputs(sparse)
        again = max(kept.copies(QKV) - 1, 0) * self._hidden(item)
        outputs = 1 + kept.copies(PROJECTION) if self._pads else max(1, kept.copies(PROJECTION))
        split = (inputs + outputs * values + copies) * item + a.num_heads * FP32
        return split // self.job.grids[self.role].tp + (latents + kept.beside(QKV, PROJECTION)) * item + again

    def _mlp(self) -> int:
        """Returns the bytes of an MLP: gate and up, and the product as the last matrix's input.

        Without a gate they are the output of ReLU and its square.
        """
        kept, item = self._kept_inputs(sparse=False), self.job.item_bytes
        again = max(kept.copies(FC1) - 1, 0) * self._hidden(item)
        of_products = 2 if self.architecture.gates_mlps else 1
        inside = (of_products + kept.copies(FC2)) * self.architecture.ffn_hidden_size // self.job.grids[self.role].tp
        return (inside + kept.beside(FC1, FC2)) * item + again

    def _experts(self) -> int:
        """Returns the bytes of experts. Tokens are assumed to be even over the ranks of expert parallelism.

        Routers keep scores and weights, and the inputs of their losses.
        """
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

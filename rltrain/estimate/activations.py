"""Bytes of activations that a forward pass keeps for its backward pass.

Counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), for this model: RMSNorm, gated MLP, grouped-query
or latent attention by a fused kernel, no dropout. Per token that the rank computes, in elements: the inputs of both
norms, which have the type of the residual stream, and of both blocks (4 hidden), queries, keys and values, what
attention puts out, and what the MLP's matrices put out.
"""

from dataclasses import dataclass

from rltrain.estimate.planned import PlannedJob
from rltrain.estimate.shares import layers_of_stage
from rltrain.models import Architecture

FP32 = 4


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
        layers = layers_of_stage(self.architecture, self.job.grids[self.role], self.stage)
        whole = self.job.config.model.recomputed.full_layers(len(layers))
        again = [self.layer(sparse) for sparse in layers[:whole]] + [self._recomputed(s) for s in layers[whole:]]
        kept = whole * self._hidden(self.job.residual_bytes)
        kept += sum(self.layer(sparse) - self._recomputed(sparse) for sparse in layers[whole:])
        return tokens * (int(self._under_way() * (kept + self._ends())) + max(again, default=0))

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
        return max((self.layer(sparse) for sparse in set(layers)), default=0) * tokens

    def layer(self, sparse: bool) -> int:
        """Of one token in one layer."""
        return 2 * self._normed() + self._attention() + (self._experts() if sparse else self._mlp())

    def _recomputed(self, sparse: bool) -> int:
        """Of `layer`, what parts of it that are computed anew do not keep."""
        repeats, a = self.job.config.model.recomputed.repeats, self.architecture
        values = a.num_heads * (a.mla.value_head_dim if a.mla else a.head_dim) * self.job.item_bytes
        parts = (
            (repeats("core_attn"), values // self.job.grids[self.role].tp),
            (repeats("layernorm"), 2 * self._hidden(self.job.item_bytes)),
            (repeats("mlp") and not sparse, self._mlp()),
            (repeats("moe") and sparse, self._experts() if sparse else 0),
        )
        return sum(size for is_repeated, size in parts if is_repeated)

    def _hidden(self, item_bytes: int) -> int:
        """Of one hidden state: cut among tensor-parallel ranks by sequence parallelism."""
        parallel = self.job.config.parallel_of(self.role)[0]
        is_cut = parallel.sequence_parallel or self.architecture.is_split_by_tokens
        return self.architecture.hidden_size * item_bytes // (parallel.tp if is_cut else 1)

    def _normed(self) -> int:
        """A norm's input and output; transformers' norms have both in fp32 in between."""
        between = 2 * self._hidden(FP32) if self.job.grids[self.role].is_sharded else 0
        return self._hidden(self.job.residual_bytes) + self._hidden(self.job.item_bytes) + between

    def _ends(self) -> int:
        """The final norm's."""
        return self._normed() if self.has_head else 0

    def _attention(self) -> int:
        a, item, config = self.architecture, self.job.item_bytes, self.job.config
        queries, values = a.query_size, a.num_heads * a.head_dim
        keys = a.kv_size
        latents = 0
        if a.mla:
            keys, values = a.query_size, a.num_heads * a.mla.value_head_dim
            latents = 2 * ((a.mla.q_rank or 0) + a.mla.kv_rank + a.mla.rope_head_dim)
        kept_values = values if a.mla else a.kv_size
        inputs = queries + keys + kept_values + (queries + keys if a.qk_norm else 0)
        copies = 0
        if config.model.transformer_impl == "local":
            all_ranks = 1 if config.model.cp_communication == "all_to_all" else self.job.grids[self.role].cp
            copies = queries + (keys + kept_values) * all_ranks + values
        split = (inputs + 2 * values + copies) * item + a.num_heads * FP32
        return split // self.job.grids[self.role].tp + latents * item

    def _mlp(self) -> int:
        """Gate and up, the activated gate, their product."""
        return 4 * self.architecture.ffn_hidden_size * self.job.item_bytes // self.job.grids[self.role].tp

    def _experts(self) -> int:
        """Tokens are taken to be shared out evenly over the ranks of expert parallelism. Routers keep scores and
        weights, and what their losses are made of."""
        moe, item, grid = self.architecture.moe, self.job.item_bytes, self.job.grids[self.role]
        assert moe is not None
        etp = grid.etp or grid.tp
        dispatched = 2 * moe.top_k * self.architecture.hidden_size * etp // grid.tp
        inside = 4 * (moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size) // grid.tp
        settings = self.job.config.model.moe
        scores = 2 + 2 * (settings.aux_loss_coef > 0) + (settings.z_loss_coef > 0)
        return (dispatched + inside) * item + scores * moe.num_experts * FP32 // grid.tp

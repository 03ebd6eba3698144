"""Bytes of activations that a forward pass keeps for its backward pass.

Counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), for this model: RMSNorm, gated MLP, grouped-query
or latent attention by a fused kernel, no dropout. Per token, in elements: the inputs of both norms and of both blocks
(4 hidden), queries, keys and values, what attention puts out, and what the MLP's matrices put out.
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
        """At most at once, with micro-batches of `tokens` tokens: a stage has as many under way as follow it, itself
        among them (1F1B). With full recomputation a layer keeps its input, and one layer at a time keeps all."""
        pp = self.job.grids[self.role].pp
        under_way = min(self.job.num_micro_batches(self.role), pp - self.stage)
        layers = layers_of_stage(self.architecture, pp, self.stage)
        whole = [self.layer(sparse) * tokens for sparse in layers]
        ends = self._ends() * tokens
        if self.job.config.model.recompute == "full":
            return under_way * (len(layers) * self._hidden() * tokens + ends) + max(whole, default=0)
        return under_way * (sum(whole) + ends)

    def evaluating(self, tokens: int) -> int:
        """Without gradients: those of the layer that is being computed."""
        layers = layers_of_stage(self.architecture, self.job.grids[self.role].pp, self.stage)
        return max((self.layer(sparse) for sparse in set(layers)), default=0) * tokens

    def layer(self, sparse: bool) -> int:
        """Of one token in one layer."""
        return 4 * self._hidden() + self._attention() + (self._experts() if sparse else self._mlp())

    def _hidden(self) -> int:
        """Of one hidden state: cut among tensor-parallel ranks by sequence parallelism."""
        parallel = self.job.config.parallel_of(self.role)[0]
        is_cut = parallel.sequence_parallel or self.architecture.is_split_by_tokens
        return self.architecture.hidden_size * self.job.item_bytes // (parallel.tp if is_cut else 1)

    def _ends(self) -> int:
        """The final norm's input and output."""
        return 2 * self._hidden() if self.has_head else 0

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
        output = 0 if config.model.recompute == "selective" else values
        copies = queries + keys + kept_values + values if config.model.transformer_impl == "local" else 0
        split = (inputs + values + output + copies) * item + a.num_heads * FP32
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

"""The config section of low-rank adapters."""

from pydantic import Field

from rltrain.config.section import Count, NonNegative, Positive, Section


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

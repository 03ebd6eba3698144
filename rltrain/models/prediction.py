"""The layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): its parameters, and the families
that can train it.

It is a decoder layer that predicts one token further. Its input is a matrix times the normed last hidden state of a
token, concatenated with the normed embedding of the next token. Its output is normed. The model's head turns it into
logits of the token after the next.
"""

from dataclasses import dataclass, replace

from rltrain.models.table import CHECKPOINT_LAYER, MEGATRON_LAYER, Layer, Part, Row

MEGATRON_PREDICTION = "mtp.layers.0."
"""The beginning of Megatron's names of its parameters."""
MEGATRON_DECODER_LAYER = MEGATRON_PREDICTION + "transformer_layer."


@dataclass(frozen=True)
class PredictionNames:
    """A family's names in files: the two norms, the matrix, the last norm, and the prefix of the decoder layer.

    "{depth}" in a name is the number of the model's layers. With `hidden_first` the matrix has the columns of the
    hidden state first, otherwise those of the embedding. `counts` are the keys of config.json with the number of such
    layers.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    counts: tuple[str, ...] = ("num_nextn_predict_layers",)

    def layer(self, decoder: Layer, depth: int) -> Layer:
        """Returns the layer's parameters. `decoder` is the model's decoder layer of the same kind."""
        own = (
            _own(self.embedding_norm, "enorm.weight", depth, "hidden"),
            _own(self.hidden_norm, "hnorm.weight", depth, "hidden"),
            _own(self.projection, "eh_proj.weight", depth, "hidden", "two_hidden"),
            _own(self.final_norm, "final_layernorm.weight", depth, "hidden"),
        )
        prefix = _at(self.prefix, depth)
        rows, experts = (tuple(_moved(row, prefix) for row in of) for of in (decoder.rows, decoder.experts))
        return Layer((*own, *rows), experts, decoder.stacked)


def _at(name: str, depth: int) -> str:
    return name.replace("{depth}", str(depth))


def _own(name: str, megatron: str, depth: int, *dimensions: str) -> Row:
    found = _at(name, depth)
    return Row(parts=(Part(found, dimensions),), megatron=MEGATRON_PREDICTION + megatron, engine=found)


def _moved(row: Row, prefix: str) -> Row:
    """Returns a row of the decoder layer under the names of this layer. It is not quantizable, because engines do not
    have the layer."""
    parts = tuple(replace(part, name=part.name.replace(CHECKPOINT_LAYER, prefix)) for part in row.parts)
    megatron, of_te = (
        name and name.replace(MEGATRON_LAYER, MEGATRON_DECODER_LAYER) for name in (row.megatron, row.megatron_te)
    )
    assert megatron is not None
    engine = row.engine.replace(CHECKPOINT_LAYER, prefix)
    return replace(row, parts=parts, megatron=megatron, megatron_te=of_te, engine=engine, quantizable=False)


MIMO_PREDICTION = PredictionNames(
    prefix="model.mtp_layers.0.",
    embedding_norm="model.mtp_layers.0.token_layernorm.weight",
    hidden_norm="model.mtp_layers.0.hidden_layernorm.weight",
    projection="model.mtp_layers.0.input_proj.weight",
    final_norm="model.mtp_layers.0.final_layernorm.weight",
    hidden_first=True,
)
# Files can also have copies of the embedding and the head here. These copies stay unchanged.
DEEPSEEK_PREDICTION = PredictionNames(
    prefix="model.layers.{depth}.",
    embedding_norm="model.layers.{depth}.enorm.weight",
    hidden_norm="model.layers.{depth}.hnorm.weight",
    projection="model.layers.{depth}.eh_proj.weight",
    final_norm="model.layers.{depth}.shared_head.norm.weight",
)
QWEN3_NEXT_PREDICTION = PredictionNames(
    prefix="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    final_norm="mtp.norm.weight",
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
)

"""The model whose training state the benchmarks of checkpoints save."""

import json
from pathlib import Path

from convert import CONFIG

from rltrain.checkpoint.saved_state import MASTER
from rltrain.models import canonical_tensors, read_architecture

KINDS = (MASTER, "exp_avg", "exp_avg_sq")
STATE_BYTES = 4 * len(KINDS)
"""Of a parameter."""
TRAINED = {**CONFIG, "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
CONFIG_YAML = "steps: 1\nplacement: {'actor, reference, rollout, reward': 0}\ndata: {train: {path: none.jsonl}}\n"


def trained_model(folder: Path, gigabytes: float) -> None:
    """The config of a model whose training state has about so many bytes, without weights."""
    folder.mkdir()
    for num_layers in range(1, 1000):
        (folder / "config.json").write_text(json.dumps({**TRAINED, "num_hidden_layers": num_layers}, indent=2))
        num_parameters = canonical_tensors(read_architecture(folder)).matrix_shapes.prod(axis=1).sum()
        if num_parameters * STATE_BYTES >= gigabytes * 1e9:
            return

"""What config.json says of a checkpoint that scores texts, as transformers' models for sequence classification."""

from pathlib import Path

from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.config_file import ConfigReader

SUFFIX = "ForSequenceClassification"
DEFAULT_LABELS = 2
"""Of a config.json that names none."""


def require_classifier(path: Path, config_key: str) -> None:
    """CheckpointError where the model in `path` is none that gives one score."""
    reader = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    names = reader.values.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(SUFFIX) for name in names):
        raise reader.error("architectures", f"a classifier, [..., *{SUFFIX}], since role reward_model scores with it")
    labels = reader.values.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else reader.count("num_labels", default=DEFAULT_LABELS)
    if num_labels != 1:
        raise reader.error("id2label", f"one label, whose score is the reward, and not {num_labels}")


def padding_token(path: Path, config_key: str) -> int | None:
    """The token that stands for nothing: transformers scores a text at the last token that is another one."""
    token = ConfigReader(path / CONFIG_FILE, config_key=config_key).values.get("pad_token_id")
    return token if type(token) is int else None

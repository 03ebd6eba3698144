"""Checkpoints in Hugging Face format, read and written through layouts: every rank touches its own share only."""

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import NO_NOTES, replace_checkpoint, save_checkpoint
from rltrain.reshard.layout import hf_layout

__all__ = ["NO_NOTES", "hf_layout", "load_parameters", "replace_checkpoint", "save_checkpoint"]

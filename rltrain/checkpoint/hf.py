"""Checkpoints in Hugging Face format, read and written through layouts: every rank touches its own share only."""

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import hf_layout, save_checkpoint

__all__ = ["hf_layout", "load_parameters", "save_checkpoint"]

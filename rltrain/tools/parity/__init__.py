"""Trainer and engine on the same tokens, stage by stage."""

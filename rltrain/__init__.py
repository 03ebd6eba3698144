"""Reinforcement-learning post-training of language models as one torchrun job."""

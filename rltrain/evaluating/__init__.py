"""Evaluation of a checkpoint without training: the config's sets, by the tasks that evaluate during training."""

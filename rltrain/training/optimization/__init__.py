"""Optimizer steps that are no backend's own: on flat tensors, wherever these lie."""

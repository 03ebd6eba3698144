"""Converting whole checkpoints between formats, tensor by tensor, on one process or many."""

"""Bytes and seconds of a job, foretold from its config and the architectures of its models."""

"""Helpers of several tests: small models and checkpoints, stand-ins, and programs run by test jobs."""

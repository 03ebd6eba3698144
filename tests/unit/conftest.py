"""How property tests run: without a limit of time per example, which a shared machine breaks at random, and with half
of the examples that are usual."""

from hypothesis import settings

settings.register_profile("shared machine", parent=settings(), deadline=None, max_examples=50)
settings.load_profile("shared machine")

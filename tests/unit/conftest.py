"""How property tests run: without a limit of time per example, which a shared machine breaks at random."""

from hypothesis import settings

settings.register_profile("shared machine", parent=settings(), deadline=None)
settings.load_profile("shared machine")

"""Slow shared machines must not fail a property by taking long over one example."""

from hypothesis import settings

settings.register_profile("pocket", deadline=None, database=None)
settings.load_profile("pocket")

"""What holds for every input, searched by Hypothesis."""

from hypothesis import settings

calm = settings(deadline=None)
"""A busy machine is not a counterexample."""

"""Some seconds of what `make fuzz` does 200,000 times, always the same ones."""

from __future__ import annotations

import pytest

from tests.framing.fuzz import fuzz


@pytest.mark.timeout(300)
def test_what_our_parsers_accept_the_model_accepts_with_the_same_boundaries_and_bodies() -> None:
    fuzz(1_000)

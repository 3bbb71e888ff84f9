"""Twenty seconds of what `make soak` does for ten minutes: only a gross leak shows in so little time."""

from __future__ import annotations

from tests.soak import MIB, report, soak


async def test_memory_and_files_do_not_grow_with_the_requests() -> None:
    result = await soak(20, 8, workers=6, pause=0.002, sessions=500)
    assert sum(result.outcomes.values()) > 1_000, result.outcomes
    assert {"first_try", "recovered", "exhausted", "tunnelled", "left early"} <= result.outcomes.keys()
    assert [] == report(result, 15 * MIB)

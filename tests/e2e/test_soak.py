"""Some seconds of what `make soak` does for ten minutes: only a gross leak shows in so little time."""

from __future__ import annotations

from tests.soak import soak
from tests.soak_readings import Stores, report

_MIB_PER_MINUTE = 120.0  # ten kilobytes a request, for example its body; the caches of the store take a third of it


async def test_memory_and_files_do_not_grow_with_the_requests() -> None:
    stores = Stores(sessions=300, workflows=300, keys=300)
    result = await soak(10, 200, workers=6, stores=stores, settling=1)
    assert {"first_try", "recovered", "tunnelled"} <= result.outcomes.keys()
    assert [] == report(result, _MIB_PER_MINUTE)

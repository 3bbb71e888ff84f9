"""Reloads under load, as `make reloads` runs them for longer."""

from __future__ import annotations

from pathlib import Path

from tests import reloads

MOST_GROWTH = 8 * 1024
"""KiB. A leak of one configuration for each reload would be some hundred KiB each; noise of a busy machine is one or
two thousand in all."""


async def test_under_load_every_good_file_is_taken_every_bad_one_refused_and_no_request_notices(tmp_path: Path) -> None:
    found = await reloads.run(40, tmp_path / "run")
    assert {} == dict(found.wrong)
    assert {"taken": 20, "refused": 20} == dict(found.reloads)
    assert found.requests > 500
    assert found.growth < MOST_GROWTH, found.resident

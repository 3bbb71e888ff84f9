"""Some seconds of what `make storm` does for two minutes."""

from __future__ import annotations

from pathlib import Path

from tests.signed import Storm


async def test_under_every_fault_and_reloads_no_app_gets_a_byte_that_was_not_meant_for_it(tmp_path: Path) -> None:
    found = await Storm(seed=13).run(6, 40, tmp_path / "run")
    assert [] == found.wrong, dict(found.examples)
    assert found.reloads > 0
    assert found.read["signed"] > 100, dict(found.read)
    assert min(found.read[kind] for kind in ("cut off", "left while asking", "left while waiting")) > 0, dict(
        found.read
    )
    assert found.sent["surplus answer"] > 10
    assert found.surplus_told > 10

"""When the store is opened, and what a sidecar does that cannot open it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from sidecar.assembly import CannotStart
from sidecar.durable.trouble import Trouble
from tests.conftest import Running, Starter
from tests.test_admin import admin


async def metrics_of(sidecar: Running) -> str:
    return b"".join(sidecar.proxy.metrics.render("")[1]).decode()


async def ready(sidecar: Running) -> dict[str, str]:
    from tests.doubles.app import App

    app = await App.connect(sidecar.admin_address)
    host = "{}:{}".format(*sidecar.admin_address)
    found: dict[str, str] = (await app.ask(f"GET /readyz HTTP/1.1\r\nHost: {host}\r\n\r\n")).json
    app.close()
    return found


async def test_a_sidecar_that_keeps_nothing_makes_no_store(start_sidecar: Starter, tmp_path: Path) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    assert None is sidecar.proxy.kept.durable
    assert not (tmp_path / "state/store.db").exists()
    assert "\nsidecar_dlq_entries" not in await metrics_of(sidecar)


async def test_the_first_need_opens_one_store_for_all_who_ask(start_sidecar: Starter, tmp_path: Path) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    opened = await asyncio.gather(*(sidecar.proxy.kept.open() for _ in range(5)))
    assert 1 == len({id(durable) for durable in opened})
    assert opened[0] is sidecar.proxy.kept.durable
    assert "\nsidecar_dlq_capacity_bytes 1073741824" in await metrics_of(sidecar)


async def test_a_store_that_lies_there_is_opened_before_anything_is_served(
    start_sidecar: Starter, tmp_path: Path
) -> None:
    first = await start_sidecar(state_dir=str(tmp_path / "state"))
    await first.proxy.kept.open()
    await first.stop(grace=0.1)
    assert None is first.proxy.kept.durable
    second = await start_sidecar(state_dir=str(tmp_path / "state"))
    assert second.proxy.kept.durable is not None
    assert {"status": "ready"} == await ready(second)


async def test_a_store_without_its_key_refuses_the_start_with_what_to_do(
    start_sidecar: Starter, tmp_path: Path
) -> None:
    first = await start_sidecar(state_dir=str(tmp_path / "state"))
    await first.proxy.kept.open()
    await first.stop(grace=0.1)
    for key in (tmp_path / "state/keys").glob("seal-*.key"):
        key.unlink()
    with pytest.raises(CannotStart, match="put its file back"):
        await start_sidecar(state_dir=str(tmp_path / "state"))


async def test_a_store_of_a_newer_release_refuses_the_start(start_sidecar: Starter, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    made = sqlite3.connect(tmp_path / "state/store.db")
    made.execute("PRAGMA user_version = 999")
    made.close()
    with pytest.raises(CannotStart, match=r"written by a newer sidecar .* set another `state_dir`"):
        await start_sidecar(state_dir=str(tmp_path / "state"))


async def test_a_store_that_cannot_be_opened_later_is_told_and_tried_again(
    start_sidecar: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    (tmp_path / "state/keys").write_text("in the way")
    with pytest.raises(Trouble):
        await sidecar.proxy.kept.open()
    assert "ready" == (await ready(sidecar))["status"]
    assert "degraded: " in (await ready(sidecar))["store"]
    assert 1 == sidecar.logged.getvalue().count("sidecar.store.degraded")
    (tmp_path / "state/keys").unlink()
    with pytest.raises(Trouble):
        await sidecar.proxy.kept.open()  # not at every request
    monkeypatch.setattr("sidecar.durable.kept._TRY_AGAIN", 0.0)
    sidecar.proxy.kept._try_again_at = 0.0
    assert (await sidecar.proxy.kept.open()).store.health.ok
    assert {"status": "ready"} == await ready(sidecar)


async def test_a_store_that_cannot_be_opened_does_not_remember_everyone_who_asked(
    start_sidecar: Starter, tmp_path: Path
) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    (tmp_path / "state/keys").write_text("in the way")
    depths = []
    for _ in range(4):
        with pytest.raises(Trouble) as refused:
            await sidecar.proxy.kept.open()
        depths.append(len(refused.traceback))
    assert depths[1] == depths[3], "each refusal carries the frames of those before it"


async def test_a_state_dir_that_will_not_last_is_warned_about(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.durable.kept.volatile_file_system", lambda path: "tmpfs")
    sidecar = await start_sidecar()
    assert "mount a volume there" in sidecar.logged.getvalue()


@pytest.mark.parametrize("limit", [{"min_free_bytes": 2**60}, {"max_bytes": 1000}])
async def test_a_store_without_room_for_one_more_says_so(
    start_sidecar: Starter, tmp_path: Path, limit: dict[str, int]
) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    durable = await sidecar.proxy.kept.open()
    await durable.listing.refresh()
    assert {"status": "ready"} == await ready(sidecar)
    durable.letters.settings = durable.letters.settings.model_copy(update=limit)
    told = await ready(sidecar)
    assert ("ready", True) == (told["status"], f"`dead_letter.{next(iter(limit))}`" in told["store"])
    assert told["store"].startswith("degraded: ")
    assert "\nsidecar_store_keeps 0\n" in (await admin(sidecar, "/metrics")).body.decode()

"""`sidecar dlq verify` and `POST /dlq/verify`: what is damaged or missing is named, and mended where that is possible."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from sidecar.durable.bodies import INLINE
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import Moody, keep
from tests.doubles.upstream import Upstream
from tests.test_cli_admin import ask, run, url

LARGE = b"x" * (INLINE + 1)


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter) -> Upstream:
    return await start_upstream(Moody())


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    return await start_sidecar(upstreams={"payments": {"route": "/pay", "endpoints": [upstream.url]}})


def body_file(sidecar: Running) -> Path:
    return next(Path(sidecar.proxy.settings.state_dir, "bodies").iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def test_nothing_kept_is_nothing_wrong(sidecar: Running) -> None:
    ended = await ask(sidecar, "dlq", "verify")
    assert (0, "") == (ended.code, ended.err)
    assert "Nothing is damaged or missing." in ended.out


async def test_a_flipped_body_is_named_until_it_is_put_back(
    sidecar: Running, upstream: Upstream, tmp_path: Path
) -> None:
    damaged = await keep(sidecar, upstream, 1, body=LARGE)
    whole = await keep(sidecar, upstream, 2)
    path = body_file(sidecar)
    good = path.read_bytes()
    flip(path)
    for _ in range(2):  # found, and known
        ended = await ask(sidecar, "dlq", "verify")
        assert 1 == ended.code
        assert f"{damaged} is damaged: the sealed body of {damaged} was changed" in " ".join(ended.out.split())
        assert whole not in ended.out
    path.write_bytes(good)
    ended = await ask(sidecar, "dlq", "verify")
    assert (0, True) == (ended.code, "1 disagreements put right" in ended.out)
    shown = json.loads((await ask(sidecar, "dlq", "show", damaged, "--json")).out)
    assert (True, "repaired") == (shown["body"]["kept"], shown["history"][-1]["event"])


async def test_an_export_of_a_flipped_body_does_not_say_that_all_is_fine(
    sidecar: Running, upstream: Upstream, tmp_path: Path
) -> None:
    damaged = await keep(sidecar, upstream, 1, body=LARGE)
    whole = await keep(sidecar, upstream, 2)
    flip(body_file(sidecar))
    ended = await run("dlq", "export", str(tmp_path / "out"), SIDECAR_ADMIN=url(sidecar))
    assert 1 == ended.code
    assert damaged in ended.out + ended.err
    assert [f"{whole}.json"] == [path.name for path in (tmp_path / "out").rglob("*.json")]


async def test_what_is_missing_is_said_until_somebody_answers_for_it(
    start_sidecar: Starter, upstream: Upstream, tmp_path: Path
) -> None:
    settings = {
        "state_dir": str(tmp_path / "s"),
        "upstreams": {"payments": {"route": "/p", "endpoints": [upstream.url]}},
    }
    first = await start_sidecar(**settings)
    await keep(first, upstream, 1, body=LARGE)
    await first.stop(grace=0.1)
    (tmp_path / "s/store.db").unlink()
    second = await start_sidecar(**settings)
    ended = await ask(second, "dlq", "verify", "--json")
    found = json.loads(ended.out)
    assert (1, 1, 1) == (ended.code, len(found["missing"]), found["unclaimed"]["files"])
    assert "that one held 1 dead letters" in found["missing"][0]["what"]
    refused = await ask(second, "dlq", "verify", "--accept")
    assert (2, True) == (refused.code, "--accept needs --reason" in refused.err)
    assert body_file(second).exists()
    assert 0 == (await ask(second, "dlq", "verify", "--accept", "--reason", "a disk was swapped")).code
    found = json.loads((await ask(second, "dlq", "verify", "--json")).out)
    assert ([], 0) == (found["missing"], found["unclaimed"]["files"])
    assert "a disk was swapped" in (await ask(second, "audit")).out


async def test_a_store_whose_files_are_gone_is_said_to_be_gone(sidecar: Running, upstream: Upstream) -> None:
    await keep(sidecar, upstream)
    shutil.rmtree(sidecar.proxy.settings.state_dir, ignore_errors=True)
    assert sidecar.proxy.kept.durable is not None
    async with asyncio.timeout(5):
        while not sidecar.proxy.kept.gone:
            await asyncio.sleep(0.02)
    ended = await ask(sidecar, "dlq", "verify")
    assert (1, True) == (ended.code, "was removed while the sidecar runs" in ended.err)

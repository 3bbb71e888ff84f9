"""Sessions outlive the process that saw them, without its secrets and without growing."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import orjson
import pytest

from telemetry.earlier import EarlierSessions
from telemetry.redact import Redactor
from telemetry.sessions import Wanted, serialise
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.records import ARRIVED, OFFSET, exhausted, recovered, wall
from tests.doubles.upstream import Talk, answer
from tests.test_admin import admin
from tests.test_cli_admin import here, url

NOW = ARRIVED + OFFSET + 100


def kept(path: Path, run: str = "sidecar-2", ttl: float = 3600.0, **options: Any) -> EarlierSessions:
    ticks = itertools.count()
    return EarlierSessions(path / "sessions.jsonl", run, ttl, lambda: NOW + next(ticks) / 1000, pytest.fail, **options)


def written(earlier: EarlierSessions, *made: Any, run: str = "sidecar-1") -> None:
    for one in made:
        earlier.write(serialise(one, wall, Redactor(), run))
    earlier.file.close()


def ids(earlier: EarlierSessions, limit: int = 100, cursor: str | None = None, **wanted: Any) -> list[str]:
    return [one["session_id"] for one in earlier.page(Wanted(**wanted), limit, cursor).items]


def test_what_an_earlier_run_wrote_is_listed_newest_first_and_narrowed(tmp_path: Path) -> None:
    earlier = kept(tmp_path)
    made = [exhausted(session_id=b"a", upstream="one"), recovered(session_id=b"b"), exhausted(session_id=b"c")]
    written(earlier, *made)
    assert ["c", "b", "a"] == ids(earlier)
    assert ["b"] == ids(earlier, outcome="recovered")
    assert ["a"] == ids(earlier, upstream="one")
    assert ["b"] == ids(earlier, code="TEMPORARY_UNAVAILABLE")
    assert [] == ids(earlier, since=wall(ARRIVED + 50))
    first = earlier.page(Wanted(), 2, None)
    assert ("2", 3) == (first.next_cursor, first.total)
    assert (["a"], None) == (ids(earlier, 2, "2"), earlier.page(Wanted(), 2, "2").next_cursor)
    with pytest.raises(ValueError, match="leave it out"):
        earlier.page(Wanted(), 2, "x")


def test_what_this_run_wrote_and_what_is_too_old_is_not_of_an_earlier_one(tmp_path: Path) -> None:
    written(kept(tmp_path), exhausted(session_id=b"a"))
    written(kept(tmp_path), exhausted(session_id=b"mine"), run="sidecar-2")
    assert ["a"] == ids(kept(tmp_path))
    assert None is kept(tmp_path).find("mine")
    assert [] == ids(kept(tmp_path, ttl=10.0))


def test_the_last_line_of_a_crash_and_a_broken_file_cost_only_themselves(tmp_path: Path) -> None:
    assert [] == ids(kept(tmp_path)), "there is no file yet"
    written(kept(tmp_path), exhausted(session_id=b"a"))
    with (tmp_path / "sessions.jsonl").open("ab") as file:
        file.write(b'{"session_id":"b","upst')
    (tmp_path / "sessions-20260101T000000000000-000.jsonl.gz").write_bytes(b"\x1f\x8b cut off")
    assert ["a"] == ids(kept(tmp_path))


def test_it_does_not_grow_and_the_file_put_aside_is_read_too(tmp_path: Path) -> None:
    earlier = kept(tmp_path, size=20_000)
    written(earlier, *(exhausted(session_id=b"s%04d" % number) for number in range(100)))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) <= 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40_000
    found = ids(earlier)
    assert found == [f"s{number:04d}" for number in range(99, 99 - len(found), -1)]
    in_the_open = len((tmp_path / "sessions.jsonl").read_bytes().splitlines()) if "sessions.jsonl" in files else 0
    aside = next(path for path in tmp_path.iterdir() if path.suffix == ".gz")
    assert len(found) == in_the_open + len(gzip.decompress(aside.read_bytes()).splitlines())


async def test_after_a_restart_an_earlier_session_is_explained_as_before(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    async def broken(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(answer(b"", "404 Not Found") if b"/odd" in head else answer())

    upstream = await start_upstream(broken)
    settings = {"upstreams": route(upstream), "state_dir": str(tmp_path / "state")}
    first = await start_sidecar(**settings)
    app = await first.app()
    await app.ask("GET /u/fine HTTP/1.1\r\nHost: s\r\n\r\n")
    reply = await app.ask("GET /u/odd?token=canary-4711 HTTP/1.1\r\nHost: s\r\nUser-Agent: a\r\n\r\n")
    session_id = reply.get("x-sidecar-session") or ""
    before = (await admin(first, f"/sessions/{session_id}")).json
    told = first.proxy.signals.explain(first.proxy.signals.sessions.find(session_id))  # type: ignore[arg-type]
    await first.stop()
    lines = (tmp_path / "state/logs/sessions.jsonl").read_bytes().splitlines()
    assert [session_id] == [orjson.loads(line)["session_id"] for line in lines]
    assert b"canary" not in lines[0]
    assert 0o600 == (tmp_path / "state/logs/sessions.jsonl").stat().st_mode & 0o777

    second = await start_sidecar(**settings)
    assert [] == (await admin(second, "/sessions")).json["items"]
    listed = (await admin(second, "/sessions?earlier=true&upstream=u")).json
    assert ([session_id], 1) == ([item["session_id"] for item in listed["items"]], listed["total"])
    assert before == (await admin(second, f"/sessions/{session_id}")).json
    shown = await here("explain", session_id, "--admin", url(second))
    assert (0, True) == (shown.code, told.splitlines()[0] in shown.out)
    for part in (session_id[:8], session_id[-8:]):
        shown = await here("explain", part, "--admin", url(second))
        assert (0, True) == (shown.code, told.splitlines()[0] in shown.out), part
    shown = await here("sessions", "--earlier", "--admin", url(second))
    assert (0, True) == (shown.code, session_id[:8] in shown.out)
    assert [] == (await admin(second, "/sessions?earlier=true&upstream=other")).json["items"]

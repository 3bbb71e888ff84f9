"""Which sessions stay when there are too many: the evidence of an outage outlives the flood that follows it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.record import Session
from telemetry.ring import CAUSES_LAST, Ring
from telemetry.sessions import Sessions, Wanted
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.records import ARRIVED, exhausted, recovered, session, wall
from tests.doubles.upstream import Talk, answer
from tests.test_admin import admin


def refused(number: int, upstream: str = "payments", at: float = ARRIVED) -> Session:
    name = b"r%05d" % number
    return session("breaker_open", status=503, session_id=name, code="CIRCUIT_OPEN", upstream=upstream, at=at)


def failed(number: int, upstream: str = "payments", at: float = ARRIVED) -> Session:
    return exhausted(session_id=b"f%05d" % number, upstream=upstream, at=at)


def ids(sessions: Sessions, **wanted: Any) -> list[str]:
    return [made.session_id.decode() for made in sessions.page(Wanted(**wanted), limit=1000).items]


def test_what_an_open_breaker_refuses_is_one_row_with_the_first_the_last_and_a_count() -> None:
    kept = Sessions(100, 3600.0, wall)
    for number in range(20_000):
        kept.keep(refused(number, at=ARRIVED + number / 1000))
    assert ["r00000"] == ids(kept)
    first, last = kept.find("r00000"), kept.find("r19999")
    assert first is not None
    assert last is not None
    assert None is kept.find("r10000")
    row = kept.ring.refusals(first)
    assert row is not None
    assert (20_000, last) == (row.count, row.last)
    assert (0, 19_998) == (kept.retention().pushed_out, kept.retention().folded)


def test_each_open_period_and_each_upstream_has_a_row_of_its_own() -> None:
    kept = Sessions(100, 3600.0, wall)
    kept.keep(refused(1))
    kept.keep(refused(2, upstream="other"))
    kept.keep(refused(3))
    kept.ring.closed("payments")
    kept.keep(refused(4))
    assert ["r00004", "r00002", "r00001"] == ids(kept)


def test_when_all_of_a_kind_were_causes_nothing_is_left_of_the_kind() -> None:
    kept = Sessions(100, 3600.0, wall)
    kept.keep(failed(1))
    kept.ring.opened("payments", ARRIVED + 10)
    assert (None, 1) == (kept.ring.oldest, kept.ring.causes)
    assert ["f00001"] == ids(kept)
    kept.ring.resize(1)
    for number in range(2, 5):
        kept.keep(recovered(session_id=b"f%05d" % number, upstream="other"))
    assert ["f00004", "f00001"] == ids(kept)


def test_a_row_is_as_young_as_its_last_refusal() -> None:
    kept = Sessions(100, 3600.0, wall)
    kept.keep(refused(1))
    kept.keep(failed(1, at=ARRIVED + 1))
    kept.keep(refused(2, at=ARRIVED + 500))
    assert ["r00001"] == ids(kept, since=wall(ARRIVED + 400))


def test_a_flood_of_one_kind_pushes_out_its_own_and_nothing_else() -> None:
    kept = Sessions(100, 3600.0, wall)
    for number in range(5):
        kept.keep(recovered(session_id=b"ok%d" % number, upstream="quiet"))
    for number in range(10_000):
        kept.keep(failed(number, upstream="loud"))
    found = ids(kept)
    assert 100 == len(found)
    assert 5 == sum(name.startswith("ok") for name in found)
    assert 9_905 == kept.retention().pushed_out
    assert "f09999" == found[0]


def test_what_opened_a_breaker_outlives_whatever_fails_after_it() -> None:
    kept = Sessions(500, 3600.0, wall)
    for number in range(30):
        kept.keep(failed(number, at=ARRIVED + number))
    opened_at = ARRIVED + 31
    kept.ring.opened("payments", opened_at)
    under_way = failed(30, at=ARRIVED + 30.5)
    for one in under_way.attempts:
        one.ended = opened_at
    kept.keep(under_way)
    for number in range(100, 5_000):
        kept.keep(failed(number, at=opened_at + number))
    found = set(ids(kept))
    assert {f"f{number:05d}" for number in range(10, 31)} <= found
    assert 21 == kept.retention().causes
    kept.expire(opened_at + 5_000 + 3600 + 10)
    assert {f"f{number:05d}" for number in range(10, 31)} == set(ids(kept))
    kept.expire(opened_at + CAUSES_LAST * 3600 + 10)
    assert [] == ids(kept)


def test_pages_go_through_all_sorts_in_order_and_none_twice() -> None:
    kept = Sessions(1000, 3600.0, wall)
    for number in range(50):
        kept.keep(failed(number))
    kept.ring.opened("payments", ARRIVED)
    for number in range(50, 60):
        kept.keep(refused(number))
        kept.keep(recovered(session_id=b"f%05d" % number, upstream="other"))
    found, cursor = [], None
    while True:
        page = kept.page(limit=7, cursor=cursor)
        found += [made.session_id.decode() for made in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert 61 == len(found) == len(set(found))
    assert [name for name in found if name.startswith("f")] == [f"f{number:05d}" for number in range(59, -1, -1)]


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("frxoc")), max_size=200))
def test_it_is_bounded_and_what_it_counts_is_there(capacity: int, happened: list[tuple[str, str]]) -> None:
    ring, added = Ring(capacity), Counter[str]()
    for number, (upstream, what) in enumerate(happened):
        if what == "o":
            ring.opened(upstream, ARRIVED)
        elif what == "c":
            ring.closed(upstream)
        else:
            made = {"f": failed, "r": refused, "x": lambda n, u: recovered(session_id=b"x", upstream=u)}[what]
            ring.add(number, made(number, upstream))
            added[what] += 1
    listed = list(ring.newest_first())
    assert len(ring) == len(listed)
    assert sorted(listed, key=lambda entry: entry[0], reverse=True) == listed
    periods = sum(one.outcome == "breaker_open" for _, one in listed)
    assert len(listed) - periods <= capacity + max(1, capacity // 10)
    assert added["f"] + added["x"] == len(listed) - periods + ring.pushed_out
    assert ring.oldest is None or ring.oldest in {one.ended for _, one in listed}


def test_the_list_answers_when_an_opening_took_all_of_a_kind_for_its_cause() -> None:
    kept = Sessions(100, 3600.0, wall)
    kept.keep(failed(1))
    kept.ring.opened("payments", ARRIVED)
    assert ["f00001"] == ids(kept)
    assert (None, 1, 1) == (kept.retention().oldest, kept.retention().causes, kept.retention().kept)
    kept.keep(failed(2, at=ARRIVED + 60))
    assert wall(kept.page(limit=1).items[0].ended) == kept.retention().oldest


async def test_an_outage_is_one_row_of_refusals_beside_what_caused_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def broken(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", "500 Internal Server Error"))

    upstream = await start_upstream(broken)
    breaker = {"failure_threshold": 1, "min_volume": 5, "open_for": 60}
    sidecar = await start_sidecar(
        upstreams=route(upstream, breaker=breaker),
        policies={"default": {"max_attempts": 1}},
        telemetry={"sessions": 100},
    )
    app = await sidecar.app()
    for _ in range(60):
        await app.ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")
    shown = (await admin(sidecar, "/sessions")).json
    (row,) = [item for item in shown["items"] if item["outcome"] == "breaker_open"]
    causes = [item for item in shown["items"] if item["outcome"] != "breaker_open"]
    assert 60 == row["refusals"]["count"] + len(causes)
    assert row["session_id"] == row["refusals"]["first_session_id"]
    last = (await admin(sidecar, f"/sessions/{row['refusals']['last_session_id']}")).json
    assert row["refusals"] == last["refusals"]
    told = sidecar.proxy.signals.explain(sidecar.proxy.signals.sessions.find(row["session_id"]))
    assert f"refused {row['refusals']['count']} calls in this open period" in told
    kept = shown["retention"]
    assert (100, 0, row["refusals"]["count"] - 2) == (kept["capacity"], kept["pushed_out"], kept["folded"])
    assert len(causes) == kept["causes"] > 0
    assert {500} == {cause["attempts"][0]["status"] for cause in causes}

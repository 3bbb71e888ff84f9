"""Many dead letters at once, as a person or a program handles them; and what is sealed in one, shown to who may."""

from __future__ import annotations

import json

import pytest

from sidecar.cli.whenever import ago
from sidecar.durable.bodies import INLINE
from sidecar.durable.entry import Answer
from telemetry.record import SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import Moody, keep, send
from tests.doubles.upstream import Upstream
from tests.test_admin import admin
from tests.test_cli_admin import ask, run, url

UNANSWERED = {"code": "NETWORK_TIMEOUT", "phase": SENT}


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter) -> Upstream:
    return await start_upstream(Moody())


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    return await start_sidecar(upstreams={"payments": {"route": "/pay", "endpoints": [upstream.url]}})


async def five(sidecar: Running, upstream: Upstream) -> list[str]:
    """Three that were never sent, of two stages; two that were never answered."""
    return [
        await keep(sidecar, upstream, 1, stage="llm"),
        await keep(sidecar, upstream, 2, stage="llm"),
        await keep(sidecar, upstream, 3, stage="notify"),
        await keep(sidecar, upstream, 4, **UNANSWERED),
        await keep(sidecar, upstream, 5, **UNANSWERED),
    ]


async def test_groups_are_counted_by_any_words(sidecar: Running, upstream: Upstream) -> None:
    assert "No dead letters are kept here.\n" == (await ask(sidecar, "dlq", "groups")).out
    await five(sidecar, upstream)
    shown = await ask(sidecar, "dlq", "groups", "--by", "error_class,stage")
    head, *rows, total = [line.split() for line in shown.out.splitlines()]
    assert ["COUNT", "ERROR", "CLASS", "STAGE", "OLDEST", "NEWEST"] == head
    assert [
        ["2", "CONNECTION_REFUSED", "llm"],
        ["2", "NETWORK_TIMEOUT", "-"],
        ["1", "CONNECTION_REFUSED", "notify"],
    ] == [row[:3] for row in rows]
    assert "5 dead letters in 3 groups." == " ".join(total)
    narrowed = json.loads((await ask(sidecar, "dlq", "groups", "--by", "upstream", "--q", "charg*", "--json")).out)
    assert (5, 1) == (narrowed["entries"], narrowed["total"])
    assert {"upstream": "payments"} == narrowed["items"][0]["group"]
    wrong = await ask(sidecar, "dlq", "groups", "--by", "colour")
    assert (2, True) == (wrong.code, "must be one or more of error_class" in wrong.err)


async def test_many_are_discarded_after_it_was_said_how_many(sidecar: Running, upstream: Upstream) -> None:
    ids = await five(sidecar, upstream)
    filtered = ("dlq", "discard", "--error-class", "NETWORK_TIMEOUT", "--reason", "they have them")
    assert "2 dead letters would be changed.\n" == (await ask(sidecar, *filtered, "--dry-run")).out
    silent = await run(*filtered, SIDECAR_ADMIN=url(sidecar))
    assert (2, True) == (silent.code, "nothing was changed: nobody is there to ask" in silent.err)
    assert "2 of 2 dead letters changed.\n" == (await ask(sidecar, *filtered, "--yes")).out
    listed = json.loads((await ask(sidecar, "dlq", "list", "--status", "discarded", "--json")).out)["items"]
    assert set(ids[3:]) == {item["dlq_id"] for item in listed}
    again = await ask(sidecar, *filtered, "--yes")
    assert (1, True) == (again.code, "2 left as they are: is discarded" in again.out)
    assert "discarded by a filter: 2 dead letters" in " ".join((await ask(sidecar, "audit")).out.split())


async def test_many_are_annotated_with_what_was_fixed(sidecar: Running, upstream: Upstream) -> None:
    ids = await five(sidecar, upstream)
    done = await ask(
        *(sidecar, "dlq", "annotate", "--verdict", "safe", "--yes"),
        *("--kind", "transient", "--evidence", "back since noon", "--note", "see the board"),
    )
    assert (0, "3 of 3 dead letters changed.\n") == (done.code, done.out)
    one = json.loads((await ask(sidecar, "dlq", "show", ids[0], "--json")).out)
    assert ("transient", "see the board") == (one["remediation"]["kind"], one["notes"][0]["text"])
    assert None is json.loads((await ask(sidecar, "dlq", "show", ids[4], "--json")).out)["remediation"]


@pytest.mark.parametrize(
    "words",
    [
        ("annotate", "--note", "x"),
        ("discard", "--reason", "x"),
        ("annotate", "dlq_1", "--all", "--note", "x"),
        ("discard", "dlq_1", "--upstream", "payments", "--reason", "x"),
    ],
)
async def test_either_ids_or_a_filter(sidecar: Running, words: tuple[str, ...]) -> None:
    ended = await ask(sidecar, "dlq", *words)
    assert (2, True) == (ended.code, "say which: either" in ended.err)


async def test_an_empty_filter_is_not_everything_by_accident(sidecar: Running, upstream: Upstream) -> None:
    await five(sidecar, upstream)
    refused = await send(sidecar, "POST", "/dlq/discard", {"reason": "oops"})
    assert (400, True) == (refused.status, "means everything only with `all: true`" in refused.body.decode())
    done = await send(sidecar, "POST", "/dlq/discard", {"reason": "a test", "all": True})
    assert (5, 5) == (done.json["fit"], done.json["changed"])


@pytest.mark.parametrize("size", [10, INLINE + 10])
async def test_a_body_and_a_last_answer_can_be_read_and_that_is_written_down(
    sidecar: Running, upstream: Upstream, size: int
) -> None:
    answered = Answer(503, [(b"Content-Type", b"text/plain")], b"out of stock")
    body = bytes(range(256)) * (size // 256 + 1)
    dlq_id = await keep(sidecar, upstream, 1, body=body, response=answered)
    revealed = await send(sidecar, "POST", f"/dlq/{dlq_id}/reveal", {"part": "body", "reason": "support case"})
    assert (200, body) == (revealed.status, revealed.body)
    shown = await run("dlq", "show", dlq_id, "--response", "--reason", "support case", SIDECAR_ADMIN=url(sidecar))
    assert (0, "out of stock") == (shown.code, shown.out)
    audit = [entry["what"] for entry in (await admin(sidecar, "/audit")).json["items"]]
    assert ["read the response of", "read the body of"] == audit[:2]


async def test_what_is_sealed_is_not_shown_without_a_reason(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, 1)
    refused = await ask(sidecar, "dlq", "show", dlq_id, "--body")
    assert (2, True) == (refused.code, "need --reason" in refused.err)
    missing = await ask(sidecar, "dlq", "show", dlq_id, "--response", "--reason", "why not")
    assert (1, True) == (missing.code, "no body of a last answer was kept" in missing.err)


async def test_one_is_shown_with_its_session_and_how_long_ago(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, 1, context={"request_id": "abc123"})
    shown = " ".join((await ask(sidecar, "dlq", "show", dlq_id)).out.split())
    assert "session abc123: sidecar explain abc123" in shown
    assert "when first 20" in shown


@pytest.mark.parametrize(
    ("later", "told"),
    [(0, "now"), (1, "1 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7_300, "2 h ago"), (-60, "in the future")],
)
def test_moments_are_said_as_people_say_them(later: float, told: str) -> None:
    assert told == ago("2027-01-15T08:00:00.000Z", 1_800_000_000.0 + later)

"""The table of routes: what it promises is what is served, for every row."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast, get_args, get_type_hints

import pytest
from aiohttp import web
from pydantic import BaseModel

from sidecar.admin.api import unmistakable
from sidecar.admin.fields import NoBody, Since, seconds_of
from sidecar.admin.negotiation import preferred
from sidecar.admin.pages import page_of
from sidecar.admin.problem import ErrorAnswer
from sidecar.admin.route import Route
from sidecar.admin.sessions import Outcome, SessionsQuery
from telemetry.record import OUTCOMES
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.letters import keep, send, store
from tests.doubles.upstream import Upstream, always, answer
from tests.test_admin import admin, at_fault, order

ONE_ATTEMPT = True
QUERIES = {"GET /timeseries": "?metric=retries", "DELETE /dlq/{id}": "?reason=not+needed"}
BODIES: dict[tuple[str, str], Any] = {
    ("PATCH", "/dlq/{id}"): {"notes": "looked at it"},
    ("POST", "/interception/clear"): {"all": True},
    ("POST", "/dlq/replay"): {"dry_run": True},
    ("POST", "/dlq/annotate"): {"all": True, "dry_run": True, "notes": "looked at them"},
    ("POST", "/dlq/discard"): {"all": True, "dry_run": True, "reason": "of no use"},
    ("POST", "/dlq/import"): {"files": [{"name": "x.json", "document": ""}]},
    ("POST", "/jobs"): {
        "idempotency_key": "another",
        "subject": "s",
        "deliveries": [{"recipient": "bob", "request": {"url": "http://mail.test/"}}],
    },
}
NOT_JSON = ["/metrics", "/events", "/dlq/export", "/dlq/{id}/reveal"]


class Busy(Running):
    """With the ids of what there is."""

    things: dict[str, str]


@pytest.fixture
async def busy(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any) -> Busy:
    """A sidecar with a session, a breaker, a transition, dead letters, a replay and a job to show."""
    upstream = await start_upstream(always(answer(b"no", "500 No")))
    sidecar = await start_sidecar(upstreams=route(upstream))
    await (await sidecar.app()).ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")
    await order(sidecar, "/breakers/u/force-open", {"ttl": "1m", "reason": "a test"})
    busy = cast(Busy, sidecar)
    busy.things = await things(sidecar, upstream)
    return busy


async def things(sidecar: Running, upstream: Upstream) -> dict[str, str]:
    """What the first part of a path names → the id of such a thing."""
    *_, letter = [await keep(sidecar, upstream, number) for number in range(3)]
    replay = (await order(sidecar, "/dlq/replay", {"rate": 1})).json["replay"]["job_id"]
    delivery = {"recipient": "ann", "request": {"url": f"{upstream.url}/x"}}
    given = {"idempotency_key": "k", "subject": "order 7", "deliveries": [delivery]}
    job = (await order(sidecar, "/jobs", given)).json
    number = job["deliveries"][0]["delivery_id"]
    async with asyncio.timeout(20):
        while not (shown := (await admin(sidecar, f"/jobs/{job['job_id']}")).json["deliveries"][0])["notified_at"]:
            if shown["last_error"] is not None:
                break  # the first attempt is over, the next one far away
            await asyncio.sleep(0.02)
    durable = await store(sidecar)
    statement = "UPDATE deliveries SET state = 'unknown', next_at = NULL, notified_at = NULL WHERE id = ?"
    await durable.store.write(lambda connection: connection.execute(statement, (number,)) and None)
    session = sidecar.proxy.signals.sessions.page().items[0].session_id.decode()
    return {"dlq": letter, "replays": replay, "jobs": job["job_id"], "sessions": session, "deliveries": str(number)}


def address(row: Route, sidecar: Busy) -> str:
    """A path of this row that leads to something."""
    kind = "replays" if row.path.startswith("/dlq/replays") else row.path.split("/")[1]
    filled = row.path.replace("{id}", "default" if kind == "policies" else sidecar.things.get(kind, ""))
    filled = filled.replace("{part}", sidecar.things["sessions"][:6])
    filled = filled.replace("{code}", "NO_ROUTE").replace("{upstream}", "u")
    action = {"breakers": "reset", "retries": "enable", "replays": "pause"}
    return filled.replace("{action}", action.get(kind, "")) + QUERIES.get(f"{row.method} {row.path}", "")


async def asked(row: Route, sidecar: Busy) -> Reply:
    """A request that this row answers well."""
    resolved = {"delivery": int(sidecar.things["deliveries"]), "delivered": True, "reason": "looked"}
    bodies = {**BODIES, ("POST", "/jobs/{id}/resolve"): resolved}
    return await send(sidecar, row.method, address(row, sidecar), bodies.get((row.method, row.path)))


async def test_every_answer_has_the_shape_that_its_row_promises(busy: Busy) -> None:
    assert NOT_JSON == [row.path for row in busy.api.routes if row.answer is None]
    for row in busy.api.routes:
        if row.answer is None:
            continue
        reply = await asked(row, busy)
        assert reply.status in (200, *row.otherwise), (row.method, row.path, reply.body)
        assert "application/json" == (reply.get("content-type") or "").split(";")[0], row.path
        row.answer.model_validate_json(reply.body)


async def test_a_page_of_items_that_are_there_has_their_shape_too(busy: Busy) -> None:
    for path in ("/sessions", "/breakers", "/upstreams", "/policies", "/errors", "/dlq", "/dlq/replays", "/jobs"):
        page = (await admin(busy, path)).json
        assert page["items"], path
        assert "next_cursor" in page


async def test_head_is_answered_like_get_without_a_body(busy: Busy) -> None:
    for row in busy.api.routes:
        if row.method == "GET":
            assert 200 == (await admin(busy, address(row, busy), method="HEAD")).status, row.path


async def test_an_unknown_parameter_is_refused_everywhere_with_the_nearest_known_one(busy: Busy) -> None:
    for row in busy.api.routes:
        path = address(row, busy).partition("?")[0]
        reply = await admin(busy, f"{path}?limt=1", *["Content-Length: 0"] * (row.method != "GET"), method=row.method)
        assert (400, "VALIDATION_ERROR") == (reply.status, reply.json["error_code"]), row.path
        assert "limt" in at_fault(reply)
        near = 'did you mean "limit"?' in reply.json["message"]
        assert near == ("limit" in row.query.model_fields), row.path
        ErrorAnswer.model_validate_json(reply.body)


async def test_rows_say_all_there_is_to_say(busy: Busy) -> None:
    seen = set()
    for row in busy.api.routes:
        assert (row.method, row.path) not in seen
        seen.add((row.method, row.path))
        assert row.summary.endswith(".")
        assert set(re.findall(r"{(\w+)}", row.path)) == set(row.parts), row.path
        assert (row.body is not NoBody) == (row.method in ("POST", "PATCH", "PUT")), row.path
        call = get_type_hints(row.handler)["call"]
        assert (row.query, row.body) == get_args(call), f"{row.path} is handled as {call}"


async def test_every_model_of_the_table_can_be_written_as_a_schema(busy: Busy) -> None:
    models = {model for row in busy.api.routes for model in (row.query, row.body, row.answer) if model is not None}
    for model in models:
        schema = model.model_json_schema(mode="serialization" if model.__name__.endswith("Shown") else "validation")
        assert "description" in schema, model
        undocumented = [key for key, told in schema.get("properties", {}).items() if not told]
        assert [] == undocumented


async def test_the_probes_are_the_rows_that_say_so(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    assert ["/livez", "/readyz", "/metrics"] == [row.path for row in sidecar.api.routes if row.probe]


def test_the_outcomes_that_may_be_asked_for_are_those_there_are() -> None:
    assert set(get_args(Outcome)) == OUTCOMES


# ---- bodies ------------------------------------------------------------------------------------------------------


async def test_a_body_must_be_json_and_say_so(busy: Busy) -> None:
    path = "/retries/disable"
    form = await admin(busy, path, "Content-Type: text/plain", "Content-Length: 2", method="POST", body=b"{}")
    assert (415, "UNSUPPORTED_CONTENT_TYPE") == (form.status, form.json["error_code"])
    broken = await admin(busy, path, "Content-Type: application/json", "Content-Length: 1", method="POST", body=b"{")
    assert (400, "MALFORMED_JSON") == (broken.status, broken.json["error_code"])
    assert busy.proxy.retries_enabled


async def test_a_wrong_body_is_refused_with_the_key_at_fault(busy: Busy) -> None:
    for body, field, words in [
        ([], "body", "JSON object"),
        ("x", "body", "JSON object"),
        ({"reson": "x"}, "reson", 'did you mean "reason"?'),
        ({"reason": 1}, "reason", "must be text"),
        ({"reason": "x" * 501}, "reason", "too long"),
        ({"ttl": "soon"}, "ttl", "90s, 15m"),
        ({"ttl": 0}, "ttl", "greater than 0"),
        ({"ttl": -1}, "ttl", "greater than 0"),
        ({"ttl": "31d"}, "ttl", "at most"),
        ({"ttl": True}, "ttl", "90s, 15m"),
        ({"ttl": []}, "ttl", "90s, 15m"),
    ]:
        reply = await order(busy, "/breakers/u/force-close", body)
        assert (400, [field]) == (reply.status, at_fault(reply))
        assert words in reply.json["message"]
        assert "open" == (await admin(busy, "/breakers?upstream=u")).json["items"][0]["state"]


async def test_a_body_beyond_the_limit_is_refused(busy: Busy) -> None:
    reply = await order(busy, "/retries/disable", {"reason": "x" * 70_000})
    assert (413, "PAYLOAD_TOO_LARGE") == (reply.status, reply.json["error_code"])
    assert busy.proxy.retries_enabled


async def test_a_body_that_breaks_does_not_come_or_is_abandoned_is_no_fault_of_ours(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.admin.route.BODY_PATIENCE", 0.05)
    fields = ("Content-Type: application/json", "Content-Length: 40")
    late = await admin(busy, "/retries/disable", *fields, method="POST", body=b"{")
    assert (408, "CLIENT_ERROR") == (late.status, late.json["error_code"])
    broken = await admin(busy, "/retries/disable", *fields, "Content-Encoding: gzip", method="POST", body=b"x" * 40)
    assert (400, "MALFORMED_REQUEST") == (broken.status, broken.json["error_code"])
    monkeypatch.setattr("sidecar.admin.route.BODY_PATIENCE", 10.0)
    gone = await App.connect(busy.admin_address)
    await gone.send("POST /retries/disable HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n{")
    gone.close()
    assert 200 == (await admin(busy, "/livez")).status
    assert busy.proxy.retries_enabled
    assert 0 == busy.proxy.metrics.internal_errors["admin"]


async def test_odd_things_are_answered_in_our_shape_and_never_with_a_500(busy: Busy) -> None:
    for path, status in [
        ("/sessions?%zz=1", 400),
        ("/sessions?outcome=%ff%fe", 400),
        ("/sessions?limit=%D9%A1", 400),
        ("/sessions?cursor=999999999999999999", 200),
        ("/sessions/%ff%00", 404),
        ("/errors/%0d%0aX:%20y", 404),
        ("/policies/..%2f..%2fconfig", 404),
        ("//livez", 404),
        ("http://evil.test/livez", 400),
        ("/timeseries?metric=retries&window=1e400", 400),
        ("/timeseries?metric=retries&window=999999999d", 400),
        ("/breakers?cursor=" + "%7c" * 100, 200),
        ("/upstreams?cursor=%00", 200),
    ]:
        reply = await admin(busy, path)
        assert status == reply.status
        if status != 200:
            ErrorAnswer.model_validate_json(reply.body)


async def test_several_mistakes_are_told_at_once_and_secrets_in_them_are_hidden(busy: Busy) -> None:
    reply = await admin(busy, "/sessions?limit=0&outcome=lost&since=token%3Dverysecret")
    assert (400, ["outcome", "since", "limit"]) == (reply.status, at_fault(reply))
    assert b"verysecret" not in reply.body


async def test_a_parameter_given_twice_is_refused(busy: Busy) -> None:
    reply = await admin(busy, "/sessions?limit=1&limit=2")
    assert (400, ["limit"]) == (reply.status, at_fault(reply))
    assert "twice" in reply.json["message"]


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90s", 90), ("15m", 900), ("1h", 3600), ("2d", 172_800), ("250ms", 0.25), ("1.5h", 5400), ("7", 7), (2.5, 2.5)],
)
def test_a_duration_is_written_as_people_write_it(given: Any, seconds: float) -> None:
    assert seconds == seconds_of(given)


@pytest.mark.parametrize("given", ["", "h", "1w", "-1s", "1h30m", "1e3", "ten", None, True, [], "9" * 10])
def test_what_is_not_a_duration_is_refused_with_the_forms(given: Any) -> None:
    with pytest.raises(ValueError, match="15m"):
        seconds_of(given)


@pytest.mark.parametrize(
    ("given", "wall"),
    [
        ("15m", 1_000_000 - 900),
        ("1970-01-01T00:01:40Z", 100),
        ("1970-01-01T00:01:40.5Z", 100.5),
        ("1970-01-01T01:01:40+01:00", 100),
        ("1970-01-01T01:01:40 01:00", 100),  # a `+` that was not escaped
    ],
)
def test_a_moment_is_a_time_or_how_long_ago(given: str, wall: float) -> None:
    since = SessionsQuery.model_validate({"since": given}).since
    assert isinstance(since, Since)
    assert wall == since.wall(1_000_000)


@pytest.mark.parametrize(
    ("given", "words"),
    [("2026-01-29T12:00:00", "add Z"), ("2026-01-29", "add Z"), ("3600", "15m"), ("now", "15m"), ("", "15m")],
)
def test_what_is_not_a_moment_is_refused_with_the_forms(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SessionsQuery.model_validate({"since": given})


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text/html"),
        ("text/*", "text/html"),
        ("application/json, text/html", "application/json"),
        ("application/json;q=0.1, text/html;q=0.2", "text/html"),
        ("text/html;q=0, */*", "application/json"),
        ("text/html;q=x", "application/json"),
        ("TEXT/HTML; level=1; q=0.5", "text/html"),
        ("image/png", "application/json"),
    ],
)
def test_the_form_is_the_one_that_was_asked_for(accept: str, chosen: str) -> None:
    assert chosen == preferred(accept, ("application/json", "text/html"))


def test_pages_neither_repeat_nor_hide_when_the_list_changes_in_between() -> None:
    items = [(("b", "1"), 1), (("a", "2"), 2), (("c", "3"), 3), (("a", "1"), 4)]
    first, cursor, total = page_of(items, 2, None)
    assert len(items) == total
    assert ([4, 2], "a|2") == ([item[1] for item in first], cursor)
    changed = [(("a", "3"), 5), *(item for item in items if item[1] not in (2, 3))]
    second, cursor, _ = page_of(changed, 2, cursor)
    assert ([5, 1], None) == ([item[1] for item in second], cursor)
    assert ([], None, 0) == page_of([], 10, None)
    assert [] == page_of(changed, 10, "zzz")[0]


def test_a_refusal_is_a_model_too() -> None:
    assert issubclass(ErrorAnswer, BaseModel)
    assert {"error_code", "message", "details"} <= set(ErrorAnswer.model_json_schema()["required"])


def test_a_part_of_a_path_never_stands_for_a_word_of_another_path() -> None:
    paths = {"/dlq/{id}", "/dlq/replays", "/dlq/replays/{id}", "/dlq/{id}/replay", "/dlq/export"}
    for path, matches, misses in [
        ("/dlq/{id}", ["/dlq/dlq_1", "/dlq/replays2"], ["/dlq/replays", "/dlq/export"]),
        ("/dlq/{id}/replay", ["/dlq/dlq_1/replay", "/dlq/export/replay"], ["/dlq/replays/replay"]),
        ("/dlq/replays/{id}", ["/dlq/replays/rpl_1", "/dlq/replays/replay"], []),
    ]:
        resource = web.UrlDispatcher().add_resource(unmistakable(path, paths))
        assert isinstance(resource, web.DynamicResource)
        assert path == re.sub(r":[^/]*(?=\})", "", resource.canonical)
        assert matches == [found for found in matches + misses if resource._match(found) is not None], path
    assert "/policies/{id}" == unmistakable("/policies/{id}", {"/policies", "/policies/{id}"})

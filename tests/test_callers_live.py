"""What belongs to one caller is given to nobody else: not to who merely says the same name, not to who shows another
credential of any kind. Over real sockets, with a real store."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import orjson
import pytest

from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import Talk, answer
from tests.test_dead_letters_live import QUICK, letters_of
from tests.test_listener_auth import basic as user
from tests.test_listener_auth import kept
from tests.test_replay_live import NEW, OLD, UNAVAILABLE, accepting, parts


def basic(user: str, password: str) -> str:
    return f"Authorization: Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def bearer(algorithm: str, signature: str, **claims: object) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(orjson.dumps(value)).rstrip(b"=").decode()

    return f"Authorization: Bearer {part({'alg': algorithm})}.{part(claims)}.{signature}"


def post(*fields: str, path: str = "/u/pay", key: str | None = "k1") -> str:
    keyed = [] if key is None else [f"Idempotency-Key: {key}"]
    lines = [f"POST {path} HTTP/1.1", "Host: s", "Content-Length: 5", *keyed, *fields]
    return "\r\n".join(lines) + "\r\n\r\nhello"


def query(name: str, value: str) -> str:
    return f"/u/pay?{name}={value}"


# What Alice sends, and what somebody else sends who has none of it but her name.
PAIRS = [
    pytest.param(basic("alice", "right"), basic("alice", "WRONG"), id="the same user, another password"),
    pytest.param(
        bearer("RS256", "c2lnbmF0dXJl", iss="idp", sub="alice"),
        bearer("none", "", iss="idp", sub="alice"),
        id="the same subject, unsigned",
    ),
    pytest.param(
        "Authorization: AWS4-HMAC-SHA256 Credential=AKIDALICE/20260101/eu/s3/aws4_request, Signature=right",
        "Authorization: AWS4-HMAC-SHA256 Credential=AKIDALICE/20260101/eu/s3/aws4_request, Signature=wrong",
        id="the same key id, another signature",
    ),
    *[
        pytest.param(f"{name}: alice-1", f"{name}: bob-1", id=name)
        for name in (
            "Cookie",
            "X-Auth-Token",
            "X-Goog-Api-Key",
            "PRIVATE-TOKEN",
            "Ocp-Apim-Subscription-Key",
            "X-Session",
            "X-Jwt-Assertion",
            "Api-Key",
        )
    ],
    pytest.param(
        "Authorization: Bearer shared\r\nX-Auth-Token: alice",
        "Authorization: Bearer shared\r\nX-Auth-Token: bob",
        id="the same application, another user",
    ),
]


def counting(*fields: str) -> Any:
    """Each execution is answered with its number."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"%d" % len(talk.upstream.bodies), "201 Created", "X-Made: yes", *fields))

    return script


# ---- stored answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alice", "other"), PAIRS)
async def test_a_stored_answer_goes_to_who_shows_the_same_credentials_and_to_nobody_else(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, alice: str, other: str
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    assert b"1" == (await app.ask(post(alice))).body
    forged = await app.ask(post(other))
    assert (b"2", None) == (forged.body, forged.get("idempotent-replayed"))
    assert b"3" == (await app.ask(post())).body, "nor to who shows none"
    again = await app.ask(post(alice))
    assert (b"1", "true") == (again.body, again.get("idempotent-replayed"))


async def test_a_cookie_is_never_set_again_from_the_store(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    fields = ("Set-Cookie: session=alice", "set-cookie2: old=alice", 'Authentication-Info: nextnonce="n"')
    upstream = await start_upstream(counting(*fields))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    first, second = await app.ask(post()), await app.ask(post())
    for name in ("set-cookie", "set-cookie2", "authentication-info"):
        assert (True, None) == (first.get(name) is not None, second.get(name)), name
    assert ("true", "yes") == (second.get("idempotent-replayed"), second.get("x-made"))


async def test_a_field_that_somebody_vouches_for_may_name_the_caller_instead(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream, idempotency={"caller": "X-Consumer-Id"}))
    app = await sidecar.app()
    old, new = "Authorization: Bearer old", "Authorization: Bearer new"
    assert b"1" == (await app.ask(post(old, "X-Consumer-Id: alice"))).body
    assert b"1" == (await app.ask(post(new, "X-Consumer-Id: alice"))).body, "her token was renewed"
    assert b"2" == (await app.ask(post(old, "X-Consumer-Id: bob"))).body
    assert b"3" == (await app.ask(post(old))).body, "without the field the credentials count"
    assert b"4" == (await app.ask(post(new))).body


async def test_users_of_the_listener_who_show_no_other_credential_share_no_answers(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    auth = {"users": {name: kept(name) for name in ("alice", "bob")}}
    sidecar = await start_sidecar(upstreams=route(upstream), listen={"port": 0, "auth": auth})
    app = await sidecar.app()
    alice, bob = [user(name, name).removesuffix("\r\n") for name in ("alice", "bob")]
    assert [b"1", b"2", b"1"] == [(await app.ask(post(who))).body for who in (alice, bob, alice)]


async def test_the_key_of_another_caller_is_no_resend(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    """Who sends a key a second time is retrying, which is counted; two callers with one key are none."""
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream, idempotency={"enabled": False}))
    app = await sidecar.app()
    resends = []
    for who in ("alice", "bob", "alice"):
        await app.ask(post(f"Cookie: {who}"))
        resends.append(
            sidecar.proxy.metrics.registry.get_sample_value("sidecar_caller_resends_total", {"upstream": "u"})
        )
    assert [0, 0, 1] == [count or 0 for count in resends]


# ---- jobs --------------------------------------------------------------------------------------------------------


async def test_a_job_is_shown_to_who_handed_it_in_and_to_nobody_else(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    wanted = "Prefer: respond-async"
    alice, bob, again = [await app.ask(post(f"Cookie: {who}", wanted)) for who in ("alice", "bob", "alice")]
    assert (202, 202, 200) == (alice.status, bob.status, again.status)
    assert (True, False) == (
        alice.json["job_id"] == again.json["job_id"],
        alice.json["job_id"] == bob.json["job_id"],
    )


# ---- the gate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alice", "bob"),
    [
        ((post("X-Auth-Token: alice", key=None)), (post("X-Auth-Token: bob", key=None))),
        ((post("Cookie: s=alice", key=None)), (post("Cookie: s=bob", key=None))),
        (post(path=query("api-key", "alice"), key=None), post(path=query("api-key", "bob"), key=None)),
        (post(basic("shared", "alice"), key=None), post(basic("shared", "bob"), key=None)),
    ],
    ids=["a header", "a cookie", "the query", "the same user"],
)
async def test_who_is_told_to_wait_keeps_nobody_else_waiting(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, alice: str, bob: str
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            limited = b"bob" in head or b"c2hhcmVkOmJvYg" in head
            await talk.send(answer(b"", "429 Too Many Requests", "Retry-After: 120") if limited else answer(b"ok"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}))
    app = await sidecar.app()
    assert 429 == (await app.ask(bob)).status
    async with asyncio.timeout(20):
        assert 200 == (await app.ask(alice)).status
        assert ("RATE_LIMIT_EXCEEDED", 2) == ((await app.ask(bob)).json["error_code"], len(upstream.requests))


# ---- dead letters ------------------------------------------------------------------------------------------------


async def test_the_same_request_of_another_caller_is_another_dead_letter(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(UNAVAILABLE)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    replies = [await app.ask(post(f"Cookie: {who}")) for who in ("alice", "bob", "alice")]
    alice, bob, again = [reply.get("x-sidecar-dlq-id") for reply in replies]
    assert (True, False) == (alice == again, alice == bob)


async def test_a_success_under_the_same_key_and_another_credential_closes_nothing_and_stops_a_replay_unasked(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    """It may be the same caller with a renewed token, whose request must not be executed twice; or somebody else, who
    must not make the work of others disappear."""
    down = True

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(UNAVAILABLE if down else answer(b"ok"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    assert 503 == (await app.ask(post("Authorization: Bearer old"))).status
    down = False
    assert 200 == (await app.ask(post("Authorization: Bearer new"))).status

    async def verdict() -> tuple[str, str]:
        (entry,) = await letters_of(sidecar)
        return entry.status, entry.verdict

    async with asyncio.timeout(15):
        while await verdict() == ("pending", "safe"):
            await asyncio.sleep(0.01)
    assert ("pending", "superseded") == await verdict()


async def test_a_live_credential_goes_to_no_entry_of_who_merely_says_the_same_name(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(accepting(NEW))  # app:new; the entry is of app:old
    rules = {"replay": {"credentials": "live", "require_remediation": "none"}, "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=QUICK)
    app = await sidecar.app()
    failed = await app.ask(post(f"Authorization: {OLD.decode()}"))
    assert 401 == failed.status
    assert 200 == (await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nAuthorization: {NEW.decode()}\r\n\r\n")).status
    settled = await parts(sidecar)[1].one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert ("held_back", 0) == (settled.outcome, sum(h.startswith(b"POST") and NEW in h for h in upstream.requests))
    assert "idempotency.caller" in settled.entry.history[-1]["why"]


async def test_a_replay_with_a_live_credential_still_counts_as_the_first_callers(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(accepting(NEW))
    live = {"credentials": "live", "single_credential": True, "require_remediation": "none"}
    sidecar = await start_sidecar(upstreams=route(upstream, replay=live, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    mine = post(f"Authorization: {OLD.decode()}")
    failed = await app.ask(mine)
    assert 200 == (await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nAuthorization: {NEW.decode()}\r\n\r\n")).status
    settled = await parts(sidecar)[1].one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert "completed" == settled.outcome
    repeated = await app.ask(mine)
    assert (200, "true") == (repeated.status, repeated.get("idempotent-replayed"))

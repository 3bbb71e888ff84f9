"""Who pays for whose fault: what an app does wrong is never held against an upstream, nor the other way round, and
nothing that may have been executed is sent again because somebody else's rules would allow it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, Upstream, always, answer

POST = "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi"
QUICK = {"default": {"base_delay": 0.001, "max_delay": 0.002}}


def unused() -> str:
    return "http://127.0.0.1:1"


def breaker_of(sidecar: Running, name: str = "u") -> Any:
    (endpoint,) = sidecar.proxy.directory.configured[name].endpoints.values()
    return endpoint.breaker.snapshot(asyncio.get_running_loop().time())


# ---- a POST without a key is never sent twice ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        always(answer(b'{"error_code": "RATE_LIMIT_EXCEEDED"}', "500 Oops", "Content-Type: application/json")),
        always(answer(b'{"error_code": "QUOTA_EXCEEDED"}', "503 Busy", "Content-Type: application/json")),
    ],
    ids=["a body that speaks of a rate limit", "a body that speaks of a quota"],
)
async def test_only_a_429_says_that_nothing_was_executed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, script: Any
) -> None:
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    reply = await (await sidecar.app()).ask(POST)
    assert ("not_retryable", 1) == (reply.get("x-sidecar-outcome"), len(upstream.requests))


async def test_a_rule_that_calls_a_reset_a_rate_limit_does_not_make_it_safe(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def resets(talk: Talk) -> None:
        await talk.read_request()
        talk.reset()

    upstream = await start_upstream(resets)
    rule = {"when": {"exception": "CONNECTION_RESET"}, "code": "RATE_LIMIT_EXCEEDED"}
    sidecar = await start_sidecar(upstreams=route(upstream, rules=[rule]), policies=QUICK)
    reply = await (await sidecar.app()).ask(POST)
    assert ("not_retryable", 1) == (reply.get("x-sidecar-outcome"), len(upstream.requests))


async def test_a_fallback_that_would_inject_a_key_gets_one_and_only_then_may_be_asked_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    backup = await start_upstream(always(answer(b"no", "500 Oops")))
    sidecar = await start_sidecar(
        policies=QUICK,
        upstreams={
            "u": {"route": "/u", "endpoints": [unused()], "fallback": "backup", "breaker": {"failure_threshold": 1}},
            "backup": {"endpoints": [backup.url], "idempotency": {"inject": True, "provider_honours": True}},
        },
    )
    await (await sidecar.app()).ask(POST)
    keys = {re.search(rb"(?i)idempotency-key: (\S+)", head)[1] for head in backup.requests}
    assert len(backup.requests) > 1 and len(keys) == 1, "every copy carries the same key"


async def test_an_operation_of_the_first_upstream_has_no_say_at_its_fallback(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    backup = await start_upstream(always(answer(b"no", "500 Oops")))
    careless = {"name": "pay", "methods": ["POST"], "retry_non_idempotent": True}
    sidecar = await start_sidecar(
        policies=QUICK,
        upstreams={
            "u": {
                "route": "/u",
                "endpoints": [unused()],
                "fallback": "backup",
                "breaker": {"failure_threshold": 1},
                "operations": [careless],
            },
            "backup": {"endpoints": [backup.url]},
        },
    )
    reply = await (await sidecar.app()).ask(POST)
    assert (1, "not_retryable") == (len(backup.requests), reply.get("x-sidecar-outcome"))


@pytest.mark.parametrize("off", ["x-sidecar-retry: off\r\n", ""], ids=["the header", "the kill switch"])
async def test_retries_that_are_off_do_not_make_a_post_look_safe_to_repeat(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, off: str
) -> None:
    upstream = await start_upstream(always(answer(b"no", "503 Busy")))
    sidecar = await start_sidecar(upstreams=route(upstream), retries_enabled=bool(off))
    reply = await (await sidecar.app()).ask(POST.replace("Host: s\r\n", "Host: s\r\n" + off))
    assert "not_retryable" == reply.get("x-sidecar-outcome")


# ---- stalled and broken apps -----------------------------------------------------------------------------------------


async def reads_all(talk: Talk) -> None:
    while True:
        await talk.read_request()
        await talk.send(answer())


async def test_apps_that_stop_in_the_middle_of_an_upload_are_told_and_the_breaker_hears_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(reads_all)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.2}))
    head = "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 10\r\n\r\nhello"
    replies = await asyncio.gather(*[(await sidecar.app()).ask(head) for _ in range(6)])
    assert {408} == {reply.status for reply in replies}
    assert ({"denied": 6}, 6) == (sidecar.outcomes, len(upstream.requests))
    assert ("closed", 0) == (breaker_of(sidecar).state, breaker_of(sidecar).failure_count)


async def test_an_app_that_breaks_its_body_while_it_is_answered_is_not_the_upstreams_fault(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def answers_early(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await talk.reader.read()

    upstream = await start_upstream(answers_early)
    sidecar = await start_sidecar(upstreams=route(upstream))
    for _ in range(6):
        app = await sidecar.app()
        await app.send("POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ngood\r\n")
        await app.reader.readuntil(b"one\r\n")
        await app.send("no size\r\n")
        with contextlib.suppress(ConnectionError):
            await app.reader.read()
    assert ("closed", 0) == (breaker_of(sidecar).state, breaker_of(sidecar).failure_count)


# ---- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["X-T: 1\r\n", "x" * 100], ids=["many trailers", "one endless trailer"])
async def test_the_trailers_of_a_request_are_bounded(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, line: str
) -> None:
    async def reads_on(talk: Talk) -> None:
        await talk.read_head()
        await talk.reader.read()

    upstream = await start_upstream(reads_on)
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"head_bytes": 4096})
    app = await sidecar.app()
    await app.send("POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(200):
            await app.send(line * 10)
            await asyncio.sleep(0)
    reply = await app.reply()
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])


@pytest.mark.parametrize("line", [b"X-T: 1\r\n", b"x" * 100], ids=["many trailers", "one endless trailer"])
async def test_the_trailers_of_an_answer_are_bounded(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, line: bytes
) -> None:
    stopped = asyncio.Event()

    async def never_ends(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
        try:
            while True:
                await talk.send(line * 10)
                await asyncio.sleep(0)
        finally:
            stopped.set()

    upstream = await start_upstream(never_ends)
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"head_bytes": 4096})
    reply = await (await sidecar.app()).ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert not reply.complete
    await asyncio.wait_for(stopped.wait(), 5)
    assert {"failed_streaming": 1} == sidecar.outcomes


async def test_a_connection_goes_on_after_a_body_that_had_to_wait(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    """The body crosses the limit of what may wait with its last bytes, and is all here before it is sent."""
    go_on = asyncio.Event()

    async def slow_first(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(answer())

    upstream = await start_upstream(slow_first)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=1, max_queue=5))
    first, second = await sidecar.app(), await sidecar.app()
    await first.send("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    async with asyncio.timeout(5):
        while not upstream.requests:
            await asyncio.sleep(0.01)
    size = 262_144 + 4_000
    await second.send(f"POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(262_144))
    await asyncio.sleep(0.1)
    await second.send(bytes(4_000))
    await asyncio.sleep(0.1)
    go_on.set()
    assert 200 == (await second.reply()).status
    assert 200 == (await second.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status


# ---- other people's credentials ------------------------------------------------------------------------------------


async def test_nothing_that_looks_like_a_credential_goes_to_a_fallback(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    backup: Upstream = await start_upstream(always(answer()))
    sidecar = await start_sidecar(
        policies=QUICK,
        upstreams={
            "u": {"route": "/u", "endpoints": [unused()], "fallback": "backup", "breaker": {"failure_threshold": 1}},
            "backup": {"endpoints": [backup.url]},
        },
    )
    names = "Authorization Cookie X-Goog-Api-Key apikey X-Functions-Key Ocp-Apim-Subscription-Key X-Auth-Key".split()
    fields = "".join(f"{name}: canary\r\n" for name in names)
    app = await sidecar.app()
    reply = await app.ask(
        f"GET /u/x?a=1&key=canary&access_token=canary&b=2 HTTP/1.1\r\nHost: s\r\n{fields}X-Plain: yes\r\nAccept: text/plain\r\n\r\n"
    )
    assert 200 == reply.status
    (head,) = backup.requests
    assert head.startswith(b"GET /x?a=1&b=2 HTTP/1.1\r\n")
    assert (b"canary" in head, b"X-Plain" in head, b"Accept: text/plain" in head) == (False, False, True)


async def test_the_root_of_a_route_is_a_path_for_options_too(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(answer()))
    sidecar = await start_sidecar(upstreams=route(upstream))
    await (await sidecar.app()).ask("OPTIONS /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert upstream.requests[0].startswith(b"OPTIONS / HTTP/1.1\r\n")


@pytest.mark.parametrize("field", ["x-should-retry: false", None], ids=["its verdict", "retries off"])
async def test_a_4xx_is_the_callers_business_whoever_said_no_to_a_retry(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, field: str | None
) -> None:
    upstream = await start_upstream(always(answer(b"no", "409 Conflict", *([field] if field else []))))
    sidecar = await start_sidecar(upstreams=route(upstream), retries_enabled=field is not None)
    reply = await (await sidecar.app()).ask("PUT /u HTTP/1.1\r\nHost: s\r\nIdempotency-Key: k\r\n\r\n")
    assert "rejected" == reply.get("x-sidecar-outcome")


async def test_attempts_before_a_fallback_are_counted_and_told_where_they_went(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    backup = await start_upstream(always(answer()))
    sidecar = await start_sidecar(
        policies=QUICK,
        upstreams={
            "u": {"route": "/u", "endpoints": [unused()], "fallback": "backup", "breaker": {"failure_threshold": 1}},
            "backup": {"endpoints": [backup.url]},
        },
    )
    reply = await (await sidecar.app()).ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (200, "backup") == (reply.status, reply.get("x-sidecar-upstream"))
    tallies = sidecar.proxy.metrics.tallies
    assert ({("first", "CONNECTION_REFUSED"): 1}, 0) == (dict(tallies["u"].attempts), tallies["u"].rejections)
    assert {("retry", "success"): 1} == dict(tallies["backup"].attempts)
    session = sidecar.proxy.signals.sessions.find(reply.get("x-sidecar-session"))
    steps = [step["what"] for step in sidecar.proxy.signals.show(session, explained=True)["explanation"]]
    told = [index for index, what in enumerate(steps) if "Attempt" in what or "fallback" in what]
    assert ["Attempt 1", "Every end", "Attempt 2"] == [steps[index][:9] for index in told]

"""When one place fails there may be another: further endpoints, then the fallback upstream."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import (
    NO_BREAKER,
    QUICK_POLICIES,
    TINY,
    ask,
    at_rest,
    ended,
    field,
    last_session,
    refusing_port,
    request,
    reset_after_request,
    reset_at_once,
    status,
    until,
)
from tests.doubles.upstream import Script, Talk, Upstream, always, answer, echo

GET = request("GET", "/u/x")
POST = request("POST", "/u/x", body=b"hi")
OK = answer(b"ok")
DOWN = status("503 Service Unavailable", body=b"down")
ONE_FAILURE_OPENS = {"failure_threshold": 1, "open_for": 60.0}


def route(*upstreams: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [one.url for one in upstreams], **keys}}


def labels(session: Any) -> list[str]:
    return [attempt.endpoint for attempt in session.attempts]


def sent(*upstreams: Upstream) -> list[int]:
    return [len(one.requests) for one in upstreams]


# ---- endpoints ---------------------------------------------------------------------------------------------------


async def test_each_retry_goes_to_an_endpoint_that_was_not_tried(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstreams = [await start_upstream(DOWN) for _ in range(3)]
    sidecar = await start_sidecar(upstreams=route(*upstreams, **NO_BREAKER), policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(4):
        assert "4" == (await app.ask(GET)).get("x-sidecar-attempts")
    everywhere = {one.url.removeprefix("http://") for one in upstreams}
    for session in ended(sidecar):
        assert everywhere == set(labels(session)[:3])


async def test_a_dead_endpoint_among_others_costs_a_retry_and_nothing_else(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    alive = [await start_upstream(always(OK)) for _ in range(2)]
    with refusing_port() as port:
        upstreams = route(*alive, **NO_BREAKER)
        upstreams["u"]["endpoints"].insert(1, f"http://127.0.0.1:{port}")
        sidecar = await start_sidecar(upstreams=upstreams, policies=QUICK_POLICIES)
        app = await sidecar.app()
        for _ in range(9):
            reply = await app.ask(POST)  # nothing was sent, so a POST may go elsewhere too
            assert (200, b"ok") == (reply.status, reply.body)
    assert {"first_try": 6, "recovered": 3} == sidecar.outcomes
    assert 9 == sum(sent(*alive))


async def test_the_first_pick_takes_turns_whatever_the_retries_do(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """A retry must not use up a turn: of two endpoints the failing one would be asked first every time."""
    failing, alive = await start_upstream(DOWN), await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(failing, alive, **NO_BREAKER), policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(10):
        assert 200 == (await app.ask(GET)).status
    assert {"first_try": 5, "recovered": 5} == sidecar.outcomes
    assert [5, 10] == sent(failing, alive)


async def test_the_first_pick_is_shared_evenly_by_those_that_are_closed(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstreams = [await start_upstream(always(OK)) for _ in range(4)]
    sidecar = await start_sidecar(upstreams=route(*upstreams), policies=QUICK_POLICIES)
    _, second = list(sidecar.proxy.directory.configured["u"].breakers())[:2]
    second[1].force_open(asyncio.get_running_loop().time(), "test")
    app = await sidecar.app()
    for _ in range(30):
        assert 200 == (await app.ask(GET)).status
    assert [10, 0, 10, 10] == sent(*upstreams)


async def test_a_request_that_may_have_been_executed_is_not_sent_elsewhere(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    for script in (reset_after_request, DOWN):
        failing, alive = await start_upstream(script), await start_upstream(always(OK))
        sidecar = await start_sidecar(upstreams=route(failing, alive, **NO_BREAKER), policies=QUICK_POLICIES)
        app = await sidecar.app()
        outcomes = Counter([(await app.ask(POST)).get("x-sidecar-outcome") for _ in range(4)])
        assert {"not_retryable": 2, "first_try": 2} == outcomes
        assert [2, 2] == sent(failing, alive)


async def test_an_open_endpoint_is_passed_over_and_comes_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    flaky, alive = await start_upstream(reset_at_once), await start_upstream(always(OK))
    breaker = {"failure_threshold": 1, "open_for": 0.05, "success_threshold": 1}
    sidecar = await start_sidecar(upstreams=route(flaky, alive, breaker=breaker), policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(4):
        assert 200 == (await app.ask(GET)).status
    flaky.script = always(OK)
    (_, breaker_of_flaky), _ = sidecar.proxy.directory.configured["u"].breakers()
    await until(lambda: breaker_of_flaky.state(asyncio.get_running_loop().time()) == "half_open")
    for _ in range(4):
        assert 200 == (await app.ask(GET)).status
    assert "closed" == breaker_of_flaky.state(asyncio.get_running_loop().time())
    assert len(flaky.requests) >= 2


async def test_a_tunnel_does_not_become_an_endpoint_of_the_upstream_it_is_counted_under(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """The tunnel goes to the host the app named; requests go to the endpoints, and only there."""
    named, endpoint = await start_upstream(always(answer(b"wrong"))), await start_upstream(always(OK))
    upstreams = {"u": {"hosts": ["127.0.0.1"], "endpoints": [endpoint.url]}}
    sidecar = await start_sidecar(upstreams=upstreams, egress={"connect_ports": [named.port]})
    tunnel = await sidecar.app()
    assert 200 == (await tunnel.ask(request("CONNECT", f"127.0.0.1:{named.port}"), to_head=True)).status
    bodies = [
        (await ask(sidecar, request("GET", f"http://127.0.0.1:{port}/x"))).body for port in (8001, 8001, 8002, 8002)
    ]
    assert ([b"ok"] * 4, 0) == (bodies, len(named.requests))


async def test_when_all_are_open_the_call_is_refused_until_the_first_probe_of_any(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstreams = [await start_upstream(always(OK)) for _ in range(2)]
    sidecar = await start_sidecar(upstreams=route(*upstreams))
    now = asyncio.get_running_loop().time()
    for (_, breaker), ttl in zip(sidecar.proxy.directory.configured["u"].breakers(), (100.0, 40.0), strict=True):
        breaker.force_open(now, "test", ttl)
    reply = await ask(sidecar, GET)
    assert (503, "CIRCUIT_OPEN") == (reply.status, reply.json["error_code"])
    assert 38 <= int(reply.get("retry-after") or 0) <= 40
    assert [0, 0] == sent(*upstreams)


# ---- the fallback ------------------------------------------------------------------------------------------------


def with_fallback(
    primary: Upstream, backup: Upstream, backup_keys: dict[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    return {
        "u": {"route": "/u", "endpoints": [primary.url], "fallback": "backup", "breaker": ONE_FAILURE_OPENS, **keys},
        "backup": {"endpoints": [backup.url], **(backup_keys or {})},
    }


def force_open(sidecar: Running, name: str = "u") -> None:
    for _, breaker in sidecar.proxy.directory.configured[name].breakers():
        breaker.force_open(asyncio.get_running_loop().time(), "test")


async def test_when_all_breakers_are_open_the_fallback_answers(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    primary, backup = await start_upstream(always(OK)), await start_upstream(echo)
    sidecar = await start_sidecar(
        upstreams=with_fallback(primary, backup, fallback_headers=["x-a"]), telemetry={"slow_threshold": 0.0001}
    )
    force_open(sidecar)
    reply = await ask(sidecar, request("POST", "/u/v1/charges?a=1", "X-A: b", body=b"hi"))
    assert (200, "backup", "1", "first_try") == (
        reply.status,
        reply.get("x-sidecar-upstream"),
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    head = reply.body
    assert head.startswith(b"POST /v1/charges?a=1 HTTP/1.1\r\n")
    assert f"127.0.0.1:{backup.port}".encode() == field(head.partition(b"\r\n\r\n")[0], b"host")
    assert b"b" == field(head.partition(b"\r\n\r\n")[0], b"x-a")
    assert head.endswith(b"\r\n\r\nhi")
    session = await last_session(sidecar)
    assert ("backup", "u", [f"127.0.0.1:{backup.port}"]) == (session.upstream, session.fallback_from, labels(session))
    shown = sidecar.proxy.signals.show(session)
    assert ("backup", "u") == (shown["upstream"], shown["context"]["fallback_from"])
    rejections = sidecar.proxy.metrics.registry.get_sample_value("sidecar_breaker_rejections_total", {"upstream": "u"})
    assert 1 == rejections
    assert [0, 1] == sent(primary, backup)
    await at_rest(sidecar)


CREDENTIALS = ["Authorization: Bearer s3cret", "Cookie: id=1", "X-Api-Key: k", "X-Auth-Token: t", "X-Client-Secret: c"]


@pytest.mark.parametrize("keep", [False, True], ids=["strip", "keep"])
async def test_credentials_go_to_the_fallback_only_where_somebody_said_so(
    start_sidecar: Starter, start_upstream: UpstreamStarter, keep: bool
) -> None:
    primary, backup = await start_upstream(always(OK)), await start_upstream(echo)
    keys = {"fallback_credentials": "keep"} if keep else {}
    sidecar = await start_sidecar(upstreams=with_fallback(primary, backup, **keys))
    force_open(sidecar)
    fields = [*CREDENTIALS, "Idempotency-Key: k1", "Accept: */*", "X-Request-Id: 7"]
    head = (await ask(sidecar, request("POST", "/u/x", *fields, body=b"hi"))).body.decode()
    assert [keep] * len(CREDENTIALS) == [line in head for line in CREDENTIALS]
    assert [True] * 3 == [line in head for line in fields[len(CREDENTIALS) :]]


UNHEARD_OF = [
    "X-Session: c4n",
    "X-Signature: c4n",
    "X-Jwt-Assertion: c4n",
    "X-Credential: c4n",
    "X-PAT: c4n",
    "X-Own: c4n",
]
NEEDED = ["Accept: */*", "Content-Type: text/plain", "User-Agent: app/1", "Range: bytes=0-1", "X-Request-Id: 7"]
CREDENTIAL_NAMES = """api-key x-api-key subscription-key access_key private_key auth pwd passwd client_assertion sas sig
    token""".split()


async def test_only_what_is_known_to_be_harmless_or_listed_goes_to_the_fallback(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    primary, backup = await start_upstream(always(OK)), await start_upstream(echo)
    sidecar = await start_sidecar(upstreams=with_fallback(primary, backup, fallback_headers=["Api-Version"]))
    force_open(sidecar)
    query = "&".join(f"{name}=c4n" for name in CREDENTIAL_NAMES)
    fields = [*UNHEARD_OF, *NEEDED, "Api-Version: 2", "X-Correlation-Id: sk-abcdefghijklmnop1234"]
    head = (await ask(sidecar, request("GET", f"/u/x?page=2&{query}", *fields))).body.decode()
    assert "GET /x?page=2 HTTP/1.1" in head
    assert [] == [line for line in UNHEARD_OF if line in head]
    assert [] == [line for line in (*NEEDED, "Api-Version: 2") if line not in head]
    assert "sk-abc" not in head, "a harmless name with a credential in it is not harmless"


async def test_a_session_moves_on_to_the_fallback_at_once_when_its_failure_opens_the_last_breaker(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    primary, backup = await start_upstream(DOWN), await start_upstream(always(answer(b"backup")))
    policies = {"default": {"base_delay": 50.0, "max_delay": 50.0, "jitter_type": "none"}}
    sidecar = await start_sidecar(upstreams=with_fallback(primary, backup), policies=policies)
    reply = await ask(sidecar, GET)
    assert (b"backup", "2", "recovered", "backup") == (
        reply.body,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
        reply.get("x-sidecar-upstream"),
    )
    session = await last_session(sidecar)
    assert [0.0, 0.0] == [attempt.delay for attempt in session.attempts]  # nobody has to wait for the backup
    assert [f"127.0.0.1:{primary.port}", f"127.0.0.1:{backup.port}"] == labels(session)
    assert "u" == session.fallback_from


@pytest.mark.parametrize(
    ("name", "script", "data", "reaches_backup"),
    [
        ("GET, answered with an error", DOWN, GET, True),
        ("PUT, reset after it was sent", reset_after_request, request("PUT", "/u/x", body=b"hi"), True),
        ("POST, answered with an error", DOWN, POST, False),
        ("POST, reset after it was sent", reset_after_request, POST, False),
        ("POST with a key, answered with an error", DOWN, request("POST", "/u/x", "Idempotency-Key: k", body=b"hi"), False),
        (
            "POST with a key, reset after it was sent",
            reset_after_request,
            request("POST", "/u/x", "Idempotency-Key: k", body=b"hi"),
            False,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
async def test_a_request_that_may_have_been_executed_never_goes_to_the_fallback(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    name: str,
    script: Script,
    data: bytes,
    reaches_backup: bool,
) -> None:
    """The key of a POST is known to the provider that got it, and to no other."""
    primary, backup = await start_upstream(script), await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=with_fallback(primary, backup), policies=QUICK_POLICIES)
    reply = await ask(sidecar, data)
    assert [1, int(reaches_backup)] == sent(primary, backup)
    if reaches_backup:
        assert (200, "recovered") == (reply.status, reply.get("x-sidecar-outcome"))
    else:
        assert reply.status in (502, 503)
        assert reply.get("x-sidecar-outcome") in ("not_retryable", "breaker_open")
        if script is DOWN:
            assert b"down" == reply.body  # the answer of the upstream, not one of ours


async def test_a_post_of_which_nothing_was_sent_may_go_to_the_fallback(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    backup = await start_upstream(always(OK))
    with refusing_port() as port:
        upstreams = {
            "u": {
                "route": "/u",
                "endpoints": [f"http://127.0.0.1:{port}"],
                "fallback": "backup",
                "breaker": ONE_FAILURE_OPENS,
            },
            "backup": {"endpoints": [backup.url]},
        }
        sidecar = await start_sidecar(upstreams=upstreams, policies=QUICK_POLICIES)
        reply = await ask(sidecar, POST)
    assert (200, "2", [b"hi"]) == (reply.status, reply.get("x-sidecar-attempts"), backup.bodies)


async def test_a_post_whose_user_says_that_twice_does_no_harm_may_go_to_the_fallback(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    primary, backup = await start_upstream(DOWN), await start_upstream(always(OK))
    operations = [{"name": "search", "path": "/x", "retry_non_idempotent": True}]
    sidecar = await start_sidecar(
        upstreams=with_fallback(primary, backup, operations=operations), policies=QUICK_POLICIES
    )
    assert (200, [1, 1]) == ((await ask(sidecar, POST)).status, sent(primary, backup))


async def test_a_tunnel_has_no_fallback(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    """The app speaks to the host it named, with its credentials inside: nobody else may take that call."""
    primary, backup = await start_upstream(always(OK)), await start_upstream(always(OK))
    upstreams = with_fallback(primary, backup, hosts=["127.0.0.1"], endpoints=[])
    del upstreams["u"]["route"], upstreams["u"]["endpoints"]
    sidecar = await start_sidecar(upstreams=upstreams, egress={"connect_ports": [primary.port]})
    connect = request("CONNECT", f"127.0.0.1:{primary.port}")
    first = await sidecar.app()
    assert 200 == (await first.ask(connect, to_head=True)).status
    force_open(sidecar)
    reply = await ask(sidecar, connect)
    assert (503, "CIRCUIT_OPEN") == (reply.status, reply.json["error_code"])
    assert 0 == backup.connections


async def test_a_fallback_that_is_open_too_has_a_fallback_of_its_own_or_refuses(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    primary, backup, last = [await start_upstream(always(answer(name))) for name in (b"1", b"2", b"3")]
    upstreams = with_fallback(primary, backup, {"fallback": "last"}) | {"last": {"endpoints": [last.url]}}
    sidecar = await start_sidecar(upstreams=upstreams)
    force_open(sidecar)
    force_open(sidecar, "backup")
    reply = await ask(sidecar, GET)
    assert (b"3", "last") == (reply.body, reply.get("x-sidecar-upstream"))
    force_open(sidecar, "last")
    reply = await ask(sidecar, GET)
    assert ("CIRCUIT_OPEN", "last") == (reply.json["error_code"], reply.json["details"]["upstream"])
    session = await last_session(sidecar)
    assert ("breaker_open", "u") == (session.outcome, session.fallback_from)
    await at_rest(sidecar)


async def test_the_fallback_is_tried_as_its_own_policy_says(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    primary, backup = await start_upstream(always(OK)), await start_upstream(DOWN)
    operations = [{"name": "read", "path": "/x"}]
    sidecar = await start_sidecar(
        upstreams=with_fallback(primary, backup, {"policy": "twice"}, operations=operations),
        policies={**QUICK_POLICIES, "twice": {**TINY, "max_attempts": 2}},
    )
    force_open(sidecar)
    reply = await ask(sidecar, GET)
    assert ("2", 2) == (reply.get("x-sidecar-attempts"), len(backup.requests))
    assert "twice" == (await last_session(sidecar)).attempts[1].policy_id


async def test_the_fallback_has_its_own_limits_and_the_place_of_the_first_is_free_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(OK)

    primary, backup = await start_upstream(always(OK)), await start_upstream(slow)
    upstreams = with_fallback(primary, backup, {"max_in_flight": 1, "max_queue": 1}, max_in_flight=1)
    sidecar = await start_sidecar(upstreams=upstreams, telemetry={"slow_threshold": 0.0001})
    force_open(sidecar)
    apps: list[App] = []
    states = sidecar.proxy.directory.configured
    for _ in range(2):
        apps.append(await sidecar.app())
        await apps[-1].send(GET)
        await until(lambda: len(backup.requests) + states["backup"].turns.waiting == len(apps))
    bulkhead = states["u"].turns.bulkhead
    assert bulkhead is not None
    assert (0, 0, 2) == (bulkhead.in_flight, states["u"].in_flight, states["backup"].in_flight)
    assert "OVERLOADED" == (await ask(sidecar, GET)).json["error_code"]
    go_on.set()
    assert [200, 200] == [(await app.reply()).status for app in apps]
    waited = ended(sidecar)[-1]
    assert waited.waited > 0.0
    assert waited.attempts[0].started >= waited.started + waited.waited - 0.001
    await at_rest(sidecar)


async def test_an_app_that_leaves_while_it_waits_for_the_fallback_leaves_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await talk.reader.read()

    primary, backup = await start_upstream(always(OK)), await start_upstream(silent)
    sidecar = await start_sidecar(upstreams=with_fallback(primary, backup, {"max_in_flight": 1, "max_queue": 5}))
    force_open(sidecar)
    apps = [await sidecar.app() for _ in range(3)]
    for app in apps:
        await app.send(GET)
    await until(lambda: sidecar.proxy.directory.configured["backup"].turns.waiting == 2)
    for app in apps:
        app.close()
    await at_rest(sidecar)
    assert {"cancelled": 3} == sidecar.outcomes

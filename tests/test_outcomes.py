"""Everything adds up: under a storm of faults and leaving apps, with a flaky upstream, and with a dead one.

Chance is seeded and the seed is in the test's name. Waits are a hundredth of the defaults or less; what is counted
per window (calls, failures, retries) is as large as it would be at full length, because all of it lies in one window.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest

from sidecar.policy.breaker import Breaker
from sidecar.reloading import NotApplied
from telemetry.record import BAD, GOOD, NEUTRAL, PARTLY_SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import TINY, at_rest, ended, refusing_port, request, seen, until
from tests.doubles.upstream import Script, Talk, Upstream, always, answer

OK = answer(b"ok")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
LARGE = answer(b"x" * 200_000)


# ---- the storm ---------------------------------------------------------------------------------------------------


class Weather:
    """A script that reads each request and then does one of many things. `calm` ends it."""

    ANSWERS: ClassVar[dict[str, tuple[int, bytes]]] = {
        "ok": (30, OK),
        "chunked": (5, CHUNKED),
        "large": (5, LARGE),
        "503": (10, answer(b"no", "503 Service Unavailable")),
        "503 with a wait": (3, answer(b"no", "503 Service Unavailable", "retry-after-ms: 5")),
        "500 with a verdict": (3, answer(b"no", "500 Internal Server Error", "x-should-retry: false")),
        "429": (4, answer(b"no", "429 Too Many Requests", "retry-after-ms: 8")),
        "404": (5, answer(b"no", "404 Not Found")),
        "401": (2, answer(b"no", "401 Unauthorized")),
        "409": (2, answer(b"no", "409 Conflict")),
    }
    BROKEN: ClassVar[dict[str, tuple[int, bytes]]] = {
        "reset": (8, b""),
        "garbage": (4, b"\x16\x03\x01 nonsense\r\n\r\n"),
        "half a head": (3, b"HTTP/1.1 200 OK\r\nX-A"),
        "half a small body": (5, OK[:-1]),
        "half a stream": (4, CHUNKED[:-9]),
        "half a large body": (3, LARGE[:-9]),
    }
    SILENCE = ("silence", 2)

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)
        self.calm = False
        kinds = {**self.ANSWERS, **self.BROKEN, self.SILENCE[0]: (self.SILENCE[1], b"")}
        self._kinds, self._weights = list(kinds), [weight for weight, _ in kinds.values()]

    async def __call__(self, talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            (kind,) = self._random.choices(self._kinds, self._weights)
            if self.calm:
                kind = "ok"
            if self._random.random() < 0.3:
                await asyncio.sleep(self._random.uniform(0.0, 0.004))
            if kind in self.ANSWERS:
                data = self.ANSWERS[kind][1]
                await talk.send(data if not head.startswith(b"HEAD ") else data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
                continue
            if kind == self.SILENCE[0]:
                await talk.reader.read()
                return
            await talk.send(self.BROKEN[kind][1])
            talk.reset() if self._random.random() < 0.5 else talk.close()
            return


class Seen:
    """What the apps counted. `left` are requests they did not wait for."""

    def __init__(self) -> None:
        self.sent = self.left = self.malformed = 0
        self.outcomes: Counter[str] = Counter()


async def an_app(sidecar: Running, seed: str, calls: int, counted: Seen, *, leaves: bool) -> None:
    chance = Random(seed)
    app: App | None = None
    for number in range(calls):
        app = app or await App.connect(sidecar.address)
        if chance.random() < 0.02:
            await app.send(b"NOT HTTP\r\n\r\n")
            assert 400 <= (await app.reply()).status
            app.close()
            app, counted.malformed = None, counted.malformed + 1
            continue
        data = a_request(chance, f"{seed}-{number}")
        await app.send(data)
        counted.sent += 1
        if leaves and chance.random() < 0.2:
            await asyncio.sleep(chance.choice((0.0, 0.001, 0.01, 0.05)))
            app.close()
            app, counted.left = None, counted.left + 1
            continue
        reply = await seen(app, to_head=data.startswith(b"HEAD "))
        if reply is None or not reply.complete:
            counted.outcomes["failed_streaming"] += 1
        else:
            counted.outcomes[reply.get("x-sidecar-outcome") or "nothing"] += 1
        if reply is None or not reply.complete or reply.get("connection") == "close":
            app.close()
            app = None
    if app is not None:
        app.close()


def a_request(chance: Random, name: str) -> bytes:
    method = chance.choice(("GET", "GET", "GET", "HEAD", "PUT", "DELETE", "POST", "POST", "PATCH"))
    fields = [f"Authorization: Bearer {chance.choice('abc')}"]
    if chance.random() < 0.2:
        fields.append(f"Idempotency-Key: {name}")
    if chance.random() < 0.1:
        fields.append(chance.choice(("x-sidecar-retry: off", "x-sidecar-max-attempts: 2", "x-sidecar-timeout: 0.03")))
    if chance.random() < 0.03:
        fields.append("x-sidecar-max-attempts: lots")
    if chance.random() < 0.1:
        fields += [f"x-sidecar-workflow: w{chance.randrange(3)}", "x-sidecar-stage: fetch"]
    body = b"" if method in ("GET", "HEAD", "DELETE") else b"x" * chance.choice((1, 100, 40_000))
    path = chance.choice(("/a", "/a", "/c", "/c", "/nowhere")) if chance.random() < 0.1 else chance.choice(("/a", "/c"))
    return request(method, f"{path}/{name}", *fields, body=body)


async def meddle(sidecar: Running, seed: str) -> None:
    """An operator with nervous fingers."""
    chance, loop = Random(seed), asyncio.get_running_loop()
    given = json.loads(sidecar.reloading.loaded.text or b"{}")
    limited = {
        **given["upstreams"]["c"],
        "max_in_flight": 2,
        "timeouts": {"body_idle": 50},
        "retry_budget": {"window": 5},
    }
    texts = [given, {**given, "upstreams": {**given["upstreams"], "c": limited}, "limits": {}}, {"listen": "nonsense"}]
    while True:
        await asyncio.sleep(chance.uniform(0.01, 0.05))
        sidecar.proxy.retries_enabled = chance.random() < 0.9
        state = chance.choice(list(sidecar.proxy.directory.configured.values()))
        _, breaker = chance.choice(list(state.breakers()))
        what = chance.random()
        if what < 0.2:
            breaker.force_open(loop.time(), "a storm", 0.02)
        elif what < 0.4:
            breaker.reset(loop.time(), "a storm")
        elif what < 0.7:
            text = json.dumps(chance.choice(texts)).encode()
            before, sidecar.reloading.loaded = sidecar.reloading.loaded, replace(sidecar.reloading.loaded, text=text)
            try:
                await sidecar.reloading.reload("a storm")
            except NotApplied:
                sidecar.reloading.loaded = before


@pytest.mark.parametrize("leaves", [False, True], ids=["patient apps", "leaving apps"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_after_a_storm_every_request_has_one_outcome_and_nothing_is_left(
    start_sidecar: Starter, start_upstream: UpstreamStarter, seed: int, leaves: bool
) -> None:
    weather = [Weather(f"{seed}-{name}") for name in "abcd"]
    one, two, backup, limited = upstreams = [await start_upstream(each) for each in weather]
    breaker = {"open_for": 0.02, "open_for_max": 0.08, "success_threshold": 1}
    quick = {**TINY, "attempt_timeout": 0.1}
    with refusing_port() as port:
        sidecar = await start_sidecar(
            upstreams={
                "a": {
                    "route": "/a",
                    "endpoints": [one.url, two.url, f"http://127.0.0.1:{port}"],
                    "breaker": breaker,
                    "fallback": "b",
                },
                "b": {"endpoints": [backup.url], "breaker": breaker, "max_in_flight": 3, "max_queue": 5},
                "c": {
                    "route": "/c",
                    "endpoints": [limited.url],
                    "breaker": breaker,
                    "max_in_flight": 8,
                    "max_queue": 50,
                },
            },
            policies=dict.fromkeys(("default", "NETWORK_TIMEOUT", "RATE_LIMIT_EXCEEDED"), quick),
            limits={"buffer_response_bytes": 1000},
        )
        counted = Seen()
        meddling = asyncio.create_task(meddle(sidecar, f"{seed}-operator"))
        apps = (an_app(sidecar, f"{seed}-{number}", 40, counted, leaves=leaves) for number in range(20))
        await asyncio.gather(*apps)
        meddling.cancel()
        await at_rest(sidecar)
        adds_up(sidecar, upstreams, counted)
        await still_works(sidecar, weather)
        await no_connection_is_lost(sidecar, upstreams)


def adds_up(sidecar: Running, upstreams: list[Upstream], counted: Seen) -> None:
    outcomes = Counter(sidecar.outcomes)
    assert counted.sent == sum(outcomes.values())
    assert set(outcomes) <= GOOD | NEUTRAL | BAD
    assert 0 == outcomes["internal"]
    assert counted.malformed == sum(sidecar.proxy.metrics.malformed_requests.values())
    # Whatever an app waited for it counted the same way; of the rest, nobody but the sidecar knows.
    unseen = outcomes.copy()
    unseen.subtract(counted.outcomes)
    assert {} == {word: count for word, count in unseen.items() if count < 0}
    assert counted.left == unseen.total()
    assert outcomes["cancelled"] <= counted.left
    # Attempts: what was written upstream arrived there, but for those whose app left in that moment.
    tallies = sidecar.proxy.metrics.tallies.values()
    made = sum(sum(tally.attempts_made().values()) for tally in tallies)
    kept = [attempt for session in ended(sidecar) for attempt in session.attempts]
    written = made - sum(attempt.phase < PARTLY_SENT for attempt in kept)
    interrupted = sum(attempt.code == "CLIENT_DISCONNECTED" and attempt.phase >= PARTLY_SENT for attempt in kept)
    arrived = sum(len(upstream.requests) for upstream in upstreams)
    assert written - interrupted <= arrived <= written
    if not counted.left:
        assert written == arrived


async def still_works(sidecar: Running, weather: list[Weather]) -> None:
    for each in weather:
        each.calm = True
    sidecar.proxy.retries_enabled = True
    app = await sidecar.app()
    for path in ("/a/x", "/c/x"):
        for _ in range(200):
            if 200 == (await app.ask(request("GET", path))).status:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"{path} does not answer any more")
    app.close()
    await at_rest(sidecar)


async def no_connection_is_lost(sidecar: Running, upstreams: list[Upstream]) -> None:
    def idle() -> int:
        return sum(pool.idle for state in sidecar.proxy.directory.states() for pool in state.pools.values())

    await until(lambda: not sidecar.proxy.downstreams, "a connection of an app is still held")
    sidecar.proxy.directory.sweep(asyncio.get_running_loop().time())  # drops those the upstream closed
    await until(lambda: idle() == sum(len(upstream._tasks) for upstream in upstreams), "a connection has no owner")


# ---- a flaky upstream --------------------------------------------------------------------------------------------

IDEMPOTENT = ("GET", "HEAD", "PUT", "DELETE")


def failing(share: Callable[[], float], seed: int) -> Script:
    """Each request fails with this chance, drawn in the order of arrival."""
    chance = Random(seed)

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            failed = chance.random() < share()
            await talk.send(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % (b"503 No" if failed else b"200 OK"))

    return script


async def test_an_upstream_that_fails_three_times_in_ten_looks_healthy_to_the_app(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """100 calls a second for a minute, without the pauses between them: 6,000 calls one after the other, so that the
    seed alone decides. They lie in one window of the breaker, as they would at full length, and of the retry budget
    there are then six, each with as many retries for as many calls. Four attempts at 30 % leave 0.8 % of failures and
    cost 1.42 times the load; waits are left out, because they change neither."""
    calls = 6_000
    upstream = await start_upstream(failing(lambda: 0.3, seed=1))
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "retry_budget": {"ratio": 0.5}}},
        policies={"default": {"base_delay": 0.0, "max_delay": 0.0}},
    )
    moves = moves_of(breaker_of(sidecar))
    app = await sidecar.app()
    statuses: Counter[int] = Counter()
    for number in range(calls):
        method = IDEMPOTENT[number % len(IDEMPOTENT)]
        data = request(method, "/u/x", body=b"x" if method == "PUT" else b"")
        statuses[(await app.ask(data, to_head=method == "HEAD")).status] += 1
    assert 0.99 * calls <= statuses[200], statuses
    assert len(upstream.requests) <= 1.6 * calls
    assert [] == moves  # the breaker stayed closed
    outcomes = sidecar.outcomes
    assert statuses[200] == outcomes["first_try"] + outcomes["recovered"]
    assert 0 == outcomes.get("budget", 0) + outcomes.get("breaker_open", 0)


# ---- a dead upstream ---------------------------------------------------------------------------------------------


def breaker_of(sidecar: Running) -> Breaker:
    ((_, breaker),) = sidecar.proxy.directory.configured["u"].breakers()
    return breaker


def moves_of(breaker: Breaker) -> list[tuple[str, float]]:
    """Every state it goes to from now on, and when that was due."""
    moves: list[tuple[str, float]] = []
    told = breaker._on_change

    def changed(before: str, after: str, at: float, why: str) -> None:
        moves.append((after, at))
        assert told is not None
        told(before, after, at, why)

    breaker._on_change = changed
    return moves


async def test_a_dead_upstream_gets_probes_only_and_is_back_when_the_settings_say(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """The breaker's open time is 0.1 s instead of 30, and 0.4 instead of 300 at most; everything else is the default."""
    down = [1.0]
    upstream = await start_upstream(failing(lambda: down[0], seed=7))
    settings: dict[str, Any] = {"open_for": 0.1, "open_for_max": 0.4}
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "breaker": settings}},
        policies={"default": TINY},
    )
    moves = moves_of(breaker_of(sidecar))
    stop = asyncio.Event()
    calls = 0

    async def calling() -> None:
        nonlocal calls
        app = await sidecar.app()
        while not stop.is_set():
            await app.ask(request("GET", "/u/x"))
            calls += 1
            await asyncio.sleep(0.005)

    crowd = [asyncio.create_task(calling()) for _ in range(10)]
    await until(lambda: len(moves) == 9)  # open, and four times half open, open again
    down[0] = 0.0
    await until(lambda: moves[-1][0] == "closed")
    stop.set()
    await asyncio.gather(*crowd)
    await at_rest(sidecar)

    states = [state for state, _ in moves]
    assert ["open", *["half_open", "open"] * 4, "half_open", "closed"] == states
    opened = [at for state, at in moves if state == "open"]
    probing = [at for state, at in moves if state == "half_open"]
    assert [0.1, 0.2, 0.4, 0.4, 0.4] == [round(b - a, 6) for a, b in zip(opened, probing, strict=True)]
    # It opened after five failures; those of the ten that were on their way by then arrived as well. After that, probes.
    sessions = ended(sidecar)
    while_down = [attempt for s in sessions for attempt in s.attempts if opened[0] < attempt.started < probing[-1]]
    assert (4, {"probe"}) == (len(while_down), {attempt.kind for attempt in while_down})
    before = [attempt for s in sessions for attempt in s.attempts if attempt.started <= opened[0]]
    assert 5 <= len(before) <= 5 + 10
    # What was sent beyond the calls themselves is within the budget of retries, which is not even needed here.
    retries = sum(attempt.kind == "retry" for session in sessions for attempt in session.attempts)
    assert retries <= max(0.2 * calls, 3.0 * 10.0)
    # Back: two probes, and everything flows again.
    assert "closed" == states[-1]
    probes = sidecar.proxy.metrics.tallies["u"].probes
    assert {"success": 2, "failure": 4} == probes
    assert sum(sidecar.outcomes.values()) == calls
    assert 0 < sidecar.outcomes["breaker_open"] < calls


async def test_the_budget_bounds_what_retries_add_where_no_breaker_does(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(failing(lambda: 1.0, seed=7))
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "breaker": {"enabled": False}}},
        policies={"default": {"base_delay": 0.0, "max_delay": 0.0}},
    )
    app = await sidecar.app()
    for _ in range(500):
        await app.ask(request("GET", "/u/x"))
    assert 500 + 100 == len(upstream.requests)  # a fifth of the requests, which is more than three a second
    assert {"exhausted", "budget"} == set(sidecar.outcomes)


async def test_a_healthy_upstream_gets_every_request_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    counted = Seen()

    async def call(number: int) -> None:
        app = await sidecar.app()
        for _ in range(50):
            reply = await app.ask(request("POST", f"/u/{number}", body=b"hi"))
            counted.outcomes[reply.get("x-sidecar-outcome") or ""] += 1

    await asyncio.gather(*(call(number) for number in range(10)))
    assert {"first_try": 500} == counted.outcomes == sidecar.outcomes
    assert 500 == len(upstream.requests)
    await at_rest(sidecar)

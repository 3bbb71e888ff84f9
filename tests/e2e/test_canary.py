"""Secrets in every place a request, an answer or the configuration has for them, through a process of its own: success,
retry, failure, refusal and reload. Then whatever it wrote, showed or sent to the collector is searched for them."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.faults import NO_BREAKER, field, request
from tests.doubles.otlp import Received
from tests.doubles.prometheus import free_port
from tests.doubles.upstream import Talk, Upstream, answer
from tests.e2e.conftest import Collector, Runner
from tests.e2e.process import Process
from tests.e2e.signs import arrived

CANARY = "c4n4ry"
"""In every secret; what follows says where it was put."""

KEY = f"{CANARY}-idempotency-key"
FIELD_NAMES = "X-Session X-Signature X-Jwt-Assertion X-Credential X-PAT PRIVATE-TOKEN X-Goog-Api-Key".split()
PARAMETERS = """api-key x-api-key subscription-key access_key private_key auth pwd passwd client_assertion sas sig
    client_secret session jwt""".split()
HEADERS = [
    f"Authorization: Bearer {CANARY}-authorization",
    f"Proxy-Authorization: Basic {CANARY}-proxy-authorization",
    f"Cookie: session={CANARY}-cookie; theme={CANARY}-second-cookie",
    f"X-Api-Key: {CANARY}-api-key",
    f"X-Auth-Token: {CANARY}-auth-token",
    f"X-My-Secret: {CANARY}-my-secret",
    *(f"{name}: {CANARY}-{name.lower()}" for name in FIELD_NAMES),
    f"Referer: https://u:{CANARY}-referer@site.test/?token={CANARY}-referer-token",
    f"Idempotency-Key: {KEY}",
    f"X-Unknown: {CANARY}-unknown-header",
]
BODY = json.dumps({"password": f"{CANARY}-body", "card": f"{CANARY}-card"}).encode()
QUERIES = [
    f"token={CANARY}-token&page=1",
    f"X-Amz-Signature={CANARY}-signature&%61pi_key={CANARY}-encoded-name",
    f"ACCESS_TOKEN={CANARY}-upper-case;sig={CANARY}-semicolon",
    f"my_param={CANARY}-configured",
    "&".join(f"{name}={CANARY}-{name}" for name in PARAMETERS),
    f"next=https://joe:{CANARY}-nested@x.test/",
]
PATHS = [f"/hooks/{CANARY}-hook/run", f"/services/T0/B0/{CANARY}-service", f"/h%6Foks/{CANARY}-encoded-path/run"]
PATHS += [f"//hooks//{CANARY}-slashes", f"/./hooks/./{CANARY}-dots", f"/hooks%2F{CANARY}-encoded-slash"]

# What the upstream does, by the last part of its path or by a field of the request.
WORDS = {"fine": "200 OK", "missing": "404 Not Found", "failing": "503 Service Unavailable"}


async def leaky(talk: Talk) -> None:
    """An upstream that repeats secrets wherever an answer has room for them."""
    fields = [
        f"Set-Cookie: s={CANARY}-set-cookie",
        f"X-Token: {CANARY}-answer-token",
        f"Location: https://u:{CANARY}-location@x.test/?code={CANARY}-code",
        f'WWW-Authenticate: Basic realm="{CANARY}-realm"',
    ]
    while True:
        head, _ = await talk.read_request()
        wanted = (field(head, b"x-do") or b"fine").decode()
        if wanted == "once":  # fails, and is fine when it comes again
            again = sum(field(seen, b"x-id") == field(head, b"x-id") for seen in talk.upstream.requests) > 1
            wanted = "fine" if again else "failing"
        body = json.dumps({"error_code": "UPSTREAM_ERROR", "message": f"password={CANARY}-answer-body"}).encode()
        if wanted == "broken off":
            await talk.send(answer(body * 2_000, "200 OK", *fields)[:90_000])
            await asyncio.sleep(0.02)
            return talk.reset()
        if wanted == "reset":
            return talk.reset()
        await talk.send(answer(body, WORDS[wanted], *fields))


def settings(upstream: Upstream, folder: Path) -> dict[str, Any]:
    to = {"endpoints": [upstream.url], **NO_BREAKER}
    quick = {"base_delay": 0.001, "max_delay": 0.002}
    return {
        "upstreams": {
            "u": {"route": "/u", **to},
            "direct": {"hosts": [f"127.0.0.1:{upstream.port}"], **NO_BREAKER},
            "corp": {
                "hosts": ["corp.test"],
                "egress_proxy": f"http://user:{CANARY}-egress@127.0.0.1:{free_port()}",
                **NO_BREAKER,
            },
            "guarded": {"route": "/guarded", "endpoints": [f"http://127.0.0.1:{free_port()}"], "fallback": "backup"},
            "backup": {"endpoints": [upstream.url], **NO_BREAKER},
            "keyed": {"route": "/keyed", **to, "idempotency": {"inject": True}},
        },
        "policies": {"default": quick},
        "dead_letter": {"notify_url": f"{upstream.url}/services/T1/{CANARY}-notify?x=1", "notify_window": 1},
        "egress": {"connect_ports": [upstream.port]},
        "state_dir": str(folder / "state"),
        "telemetry": {
            "healthy_sample": 1,
            "redact_query": ["My_Param"],
            "redact_paths": ["/hooks/{id}", "/services/{**}"],
            "events": {"file": str(folder / "events.jsonl")},
            "log": {"access": True, "level": "debug"},
        },
    }


def requests(upstream: Upstream) -> Iterator[bytes]:
    """Every place for a secret, with every way to end."""
    number = 0
    for do in ("fine", "once", "missing", "failing", "reset", "broken off"):
        for query, path in zip(QUERIES, PATHS, strict=True):
            for method, base in (("GET", "/u"), ("PUT", upstream.url), ("POST", "/keyed")):
                number += 1
                body = BODY if method != "GET" else b""
                marks = [f"x-do: {do}", f"x-id: {number}", f"x-sidecar-correlation-id: token={CANARY}-correlation"]
                # The key of what is kept stays readable, and each is a call of its own.
                headers = HEADERS if method == "GET" else [line.replace(KEY, f"call-{number}") for line in HEADERS]
                yield request(method, f"{base}{path}?{query}", *marks, *headers, body=body)
    yield request("GET", f"http://corp.test/?{QUERIES[0]}", *HEADERS)  # through a parent proxy that is not there
    yield request("GET", f"/nowhere/hooks/{CANARY}-denied?{QUERIES[0]}", *HEADERS)
    yield request("GET", f"http://169.254.169.254/?{QUERIES[0]}", *HEADERS)


async def ordered_by_an_operator(process: Process) -> None:
    """Everything that an operator can write, with a secret in it."""
    reason = f"their key is api_key={CANARY}-reason, see https://u:{CANARY}-in-url@x.test/?token={CANARY}-in-query"
    forced = await process.order("/breakers/guarded/force-open", {"reason": reason, "ttl": 600})
    assert 200 == forced.status, forced.body
    kept = (await process.admin("/dlq?limit=3&verdict=safe")).json["items"]
    one, two, three = (letter["dlq_id"] for letter in kept)
    for path, body in (
        (f"/dlq/{one}/replay", {"force": True, "reason": reason}),
        ("/dlq/replay", {"force": True, "reason": reason, "limit": 1, "ramp": False}),
        ("/policies/default", {"max_attempts": 3}),
        ("/retries/disable", {"reason": reason}),
        ("/retries/enable", {"reason": reason}),
        ("/keys/rotate", {"reason": reason}),
        ("/reload", {"reason": reason}),
    ):
        done = await process.order(path, body, "PUT" if "policies" in path else "POST")
        assert done.status in (200, 202), f"{path}: {done.body.decode()}"
    remediation = {"kind": "data", "evidence": reason, "ticket": f"token={CANARY}-ticket"}
    for body in ({"remediation": remediation}, {"notes": reason}):
        assert 200 == (await process.order(f"/dlq/{two}", body, "PATCH")).status
    assert 200 == (await process.order(f"/dlq/{three}?reason=pwd%3D{CANARY}-discard", None, "DELETE")).status


async def refused_as_malformed(process: Process) -> None:
    for target in (f"http://user:{CANARY}-userinfo@127.0.0.1:1/", f"http://{CANARY}-user@127.0.0.1:1/?token=x"):
        reply = await process.ask(request("GET", target, *HEADERS))
        assert 400 == reply.status
        assert CANARY not in reply.body.decode(), "not even back to the app: somebody logs what it gets"


async def tunnelled(process: Process, upstream: Upstream) -> None:
    app = await process.app()
    await app.send(request("CONNECT", f"127.0.0.1:{upstream.port}", *HEADERS))
    assert 200 == (await app.reply(to_head=True)).status
    await app.send(request("GET", f"/x?{QUERIES[0]}", *HEADERS))
    assert 200 == (await app.reply()).status
    app.close()


async def reloaded(process: Process, keys: dict[str, Any]) -> None:
    """SIGHUP with a file that is fine, and with some that are not and hold secrets just where they are wrong."""
    lines = len(process.lines())

    async def reload(text: str) -> None:
        nonlocal lines
        process.config.write_text(text)
        process.signal(signal.SIGHUP)
        for _ in range(500):
            if len(process.lines()) > lines:
                break
            await asyncio.sleep(0.01)
        assert len(process.lines()) > lines, "it says nothing about a reload"
        lines = len(process.lines())

    await reload(json.dumps({**keys, "shutdown_grace": 7}))
    for wrong in (
        f"htp://user:{CANARY}-wrong-scheme@corp:3128",
        f"http://user:{CANARY}-wrong-port@corp:port",
        f"http://user:{CANARY}-with-path@corp:3128/path?token={CANARY}-with-token",
    ):
        upstreams = {**keys["upstreams"], "corp": {"hosts": ["corp.test"], "egress_proxy": wrong}}
        await reload(json.dumps({**keys, "upstreams": upstreams}))
    wrong_endpoint = {"route": "/u", "endpoints": [f"http://user:{CANARY}-endpoint@127.0.0.1:1"]}
    await reload(json.dumps({**keys, "upstreams": {"u": wrong_endpoint}}))
    await reload(f'upstreams: {{u: {{route: /u, api_token: "{CANARY}-unknown-key"}}}}\n')
    await reload(json.dumps(keys))


async def live_events(process: Process) -> bytes:
    """`GET /events`, from the beginning; it never ends by itself."""
    app = await App.connect(process.admin_address)
    await app.send("GET /events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: evt_0_0\r\n\r\n")
    got = b""
    try:
        while True:
            got += await asyncio.wait_for(app.reader.read(65_536), 0.5)
    except TimeoutError:
        return got
    finally:
        app.close()


async def shown_by_the_admin_port(process: Process) -> dict[str, str]:
    shown: dict[str, str] = {}

    async def look(path: str, *fields: str) -> Reply:
        reply = await process.admin(path, *fields)
        assert 200 == reply.status, f"{path}: {reply.status} {reply.body.decode()}"
        shown[path + "".join(fields)] = reply.body.decode()
        return reply

    await look("/metrics")
    await look("/metrics", "Accept: application/openmetrics-text; version=1.0.0")
    listed = (await look("/sessions?limit=1000")).json["items"]
    for session in listed:
        await look(f"/sessions/{session['session_id']}")
    assert len(listed) > 60
    await look(f"/sessions/{listed[0]['session_id']}", "Accept: text/plain")
    for path in (
        "/config",
        "/audit?limit=1000",
        "/dlq/replays",
        "/jobs",
        "/upstreams",
        "/breakers",
        "/policies",
        "/retry-metrics?window=1h",
        "/errors",
    ):
        await look(path)
    kept = (await look("/dlq?limit=500")).json["items"]
    assert len(kept) > 10, "failed requests are kept, or the search of the store proves nothing"
    for letter in kept[:20]:
        await look(f"/dlq/{letter['dlq_id']}")
    shown["/events"] = (await live_events(process)).decode()
    return shown


def in_files(folder: Path) -> dict[str, str]:
    """Everything it wrote; the configuration was written by us."""
    return {
        str(path.relative_to(folder)): path.read_bytes().decode("latin-1")
        for path in folder.rglob("*")
        if path.is_file() and path.name != "sidecar.yaml"
    }


def at_the_collector(received: Received) -> str:
    return "".join(request.SerializeToString().decode("latin-1") for request in received.requests)


async def test_no_secret_comes_out_of_any_signal(
    http_only: Collector, run: Runner, start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    environ, received = http_only
    upstream = await start_upstream(leaky)
    keys = settings(upstream, tmp_path / "written")
    process = await run({**environ, "OTEL_LOGS_EXPORTER": "otlp"}, **keys)
    outcomes: set[str | None] = set()
    for number, wanted in enumerate(requests(upstream)):
        outcomes.add((await process.ask(wanted)).get("x-sidecar-outcome"))
        if number == 30:
            await reloaded(process, keys)  # in the middle: both halves are served
    assert {"first_try", "recovered", "rejected", "exhausted", "denied"} <= outcomes
    await ordered_by_an_operator(process)
    for query in QUERIES:
        reply = await process.ask(request("GET", f"/guarded/plain?{query}", *HEADERS, "x-do: fine"))
        assert "backup" == reply.get("x-sidecar-upstream")
        told = upstream.requests[-1].replace(KEY.encode(), b"")
        assert CANARY.encode() not in told, "what was for one provider is not for another"
    await refused_as_malformed(process)
    await tunnelled(process, upstream)
    sessions = (await process.metrics()).total("sidecar_sessions_total")
    roots = [span for span in received.spans if span.kind == 2]
    await arrived(
        received, lambda: sum(span.kind == 2 for span in received.spans) >= sessions, f"more than {len(roots)}"
    )
    sinks = await shown_by_the_admin_port(process)
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended()
    sinks |= in_files(process.folder) | in_files(tmp_path / "written")
    sinks["stderr"] = process.stderr
    sinks["collector"] = at_the_collector(received)

    for name in ("stderr", "collector", "/events", "events.jsonl", "/sessions?limit=1000"):
        assert "REDACTED" in sinks[name], f"{name} has nothing in it that had to be hidden, so it proves nothing"
    assert [name for name in sinks if name.endswith("errors.jsonl")], "failed attempts leave error records"
    leaks = {
        name: sorted({text[at : at + 30] for at in range(len(text)) if text.startswith(CANARY, at)})
        for name, text in sinks.items()
        if CANARY in text
    }
    assert {} == leaks
    assert any(f"/services/T1/{CANARY}-notify".encode() in head for head in upstream.requests), "notices were sent"
    assert any(f"{CANARY}-token".encode() in head for head in upstream.requests), "the upstream itself got them all"

"""Secrets sent through a running sidecar, in every place a request has for them, do not come out of any signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from telemetry import explain
from telemetry.events import as_sse
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import Talk, Upstream, answer

CANARY = "c4n4ryc4n4ryc4n4ry"
HEADERS = "".join(
    f"{name}: {CANARY}\r\n"
    for name in ("Authorization", "Cookie", "X-Api-Key", "Proxy-Connection-Token", "X-Auth-Token", "X-My-Password")
)
BODY = f'{{"password": "{CANARY}"}}'


def failing(times: int) -> Callable[[Talk], Any]:
    """503 so often, each with the secret in its own fields, then 200."""
    left = [times]

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            status = "503 Service Unavailable" if left[0] > 0 else "200 OK"
            left[0] -= 1
            await talk.send(answer(BODY.encode(), status, f"Set-Cookie: s={CANARY}", f"X-Token: {CANARY}"))

    return script


def everything(folder: Path) -> dict[str, str]:
    return {str(path): path.read_bytes().decode(errors="replace") for path in (folder / "logs").rglob("*.jsonl")}


@pytest.mark.parametrize("times", [0, 1, 100])
async def test_success_retry_and_failure_let_nothing_out(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    route: Callable[[Upstream], Any],
    tmp_path: Path,
    times: int,
) -> None:
    upstream = await start_upstream(failing(times))
    sidecar = await start_sidecar(
        upstreams=route(upstream),
        policies={"default": {"base_delay": 0.001, "max_delay": 0.001}},
        telemetry={"healthy_sample": 1, "log": {"access": True, "level": "debug"}},
    )
    app = await sidecar.app()
    asked = [
        ("GET", f"/u/x?token={CANARY}&page=1"),
        ("PUT", f"/u/x?X-Amz-Signature={CANARY}&%61pi_key={CANARY}"),
        ("POST", "/u/x"),
        ("GET", f"{upstream.url}/x?access_token={CANARY}"),
    ]
    for method, target in asked:
        body = BODY if method in ("PUT", "POST") else ""
        await app.ask(
            f"{method} {target} HTTP/1.1\r\nHost: s\r\n{HEADERS}User-Agent: app (token={CANARY})\r\n"
            f"x-sidecar-correlation-id: token={CANARY}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )
    refused = await (await sidecar.app()).ask(f"GET http://u:{CANARY}@127.0.0.1:1/ HTTP/1.1\r\nHost: s\r\n\r\n")
    assert 400 == refused.status
    signals = sidecar.proxy.signals
    signals.writer.flush()
    kept = signals.sessions.page().items
    assert len(asked) == len(kept)
    sinks = {
        "refusal": refused.body.decode(),
        "log": sidecar.logged.getvalue(),
        "sessions": orjson.dumps([signals.show(made, explained=True) for made in kept]).decode(),
        "explanations": "".join(explain.as_text(made, signals.redactor) for made in kept),
        "events": b"".join(as_sse(event, signals.redactor) for event in signals.events.recent(1000)).decode(),
        "metrics": b"".join(signals.metrics.render("")[1]).decode(),
        **everything(tmp_path / "state0"),
    }
    assert {} == {name: text.count(CANARY) for name, text in sinks.items() if CANARY in text}
    assert "REDACTED" in sinks["log"] and "REDACTED" in sinks["sessions"]
    if times:
        assert [name for name in sinks if name.endswith("errors.jsonl")], "failed attempts leave error records"

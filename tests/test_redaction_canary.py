"""A secret is put everywhere a request can carry one; then everything telemetry puts out is searched for it."""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from config.telemetry import Telemetry
from telemetry import explain
from telemetry.events import as_line, as_sse
from telemetry.logs import Log
from telemetry.record import PARTLY_SENT, Session
from telemetry.signals import Signals
from tests.doubles.otlp import grpc_collector
from tests.doubles.records import ARRIVED, attempt, retry, session, stop, wall

CANARY = "c4n4ryc4n4ryc4n4ry"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TARGETS = [
    f"http://user:{CANARY}@api.test/v1/x",
    f"/v1/x?token={CANARY}",
    f"/v1/x?TOKEN={CANARY}&%61pi_key={CANARY}&X-Amz-Signature={CANARY}&client_secret={CANARY}",
    f"/hooks/{CANARY}/run?page=1",
    f"https://hooks.test/services/T0/B0/{CANARY}",
    f"/v1/x?my_param={CANARY}",
    f"/v1/x?a=1;sig={CANARY}#code={CANARY}",
]
MESSAGES = [
    f"cannot reach http://u:{CANARY}@a.test/?key={CANARY}: refused",
    f"Authorization: Bearer {CANARY}",
    f'the body said {{"password": "{CANARY}"}}',
    f"Cookie: session={CANARY}; x={CANARY}",
]


def story(outcome: str, target: str, message: str) -> Session:
    """Every text of a record that a peer or the app can fill holds the secret."""
    failed = attempt(
        f"user:{CANARY}@a.test:443",
        code="CONNECTION_RESET",
        phase=PARTLY_SENT,
        message=message,
        egress_proxy=f"http://user:{CANARY}@corp:3128",
        decision=retry("CONNECTION_RESET", 0.1, f"retry-after: 1, token={CANARY}", f"secret={CANARY}"),
    )
    last = attempt("a.test:443", status=200, delay=0.1)
    if outcome not in ("recovered", "first_try"):
        last = attempt(
            f"user:{CANARY}@a.test:443",
            status=503,
            code="TEMPORARY_UNAVAILABLE",
            message=message,
            delay=0.1,
            decision=stop("attempts", f"password={CANARY}"),
        )
    return session(
        outcome,
        failed,
        last,
        target=target,
        forwarded=target,
        message=message,
        code=None if outcome == "recovered" else "TEMPORARY_UNAVAILABLE",
        host="api.test:443",
        client="127.0.0.1",
        user_agent=f"app/1 (token={CANARY})",
        correlation_id=f"token={CANARY}",
        workflow=f"secret={CANARY}",
        api_key_id="k-1",
        dlq_id="dlq_1",
    )


def files(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "outcome", ["recovered", "exhausted", "rejected", "cancelled", "failed_streaming", "first_try"]
)
async def test_no_sink_of_telemetry_lets_a_secret_out(tmp_path: Path, outcome: str) -> None:
    stream = io.StringIO()
    with grpc_collector() as (url, received):
        signals = Signals(
            Telemetry.model_validate(
                {
                    "redact_query": ["My_Param"],
                    "slow_threshold": 0.01,
                    "events": {"file": str(tmp_path / "events.jsonl")},
                    "redact_paths": ["/hooks/{id}", "/services/{**}"],
                }
            ),
            environ={
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_LOGS_EXPORTER": "otlp",
                "OTEL_METRICS_EXPORTER": "otlp",
                "OTEL_BSP_SCHEDULE_DELAY": "10",
                "OTEL_METRIC_EXPORT_INTERVAL": "1",
            },
            monotonic=lambda: ARRIVED,
            wall=wall,
            ids=random.Random(9).getrandbits,
            log=Log(stream),
            state_dir=tmp_path,
        )
        reader = signals.events.subscribe()
        stories = [story(outcome, target, MESSAGES[n % len(MESSAGES)]) for n, target in enumerate(TARGETS)]
        stories += [story(outcome, TARGETS[0], message) for message in MESSAGES]
        for made in stories:
            made.trace = signals.begin(None, f"a={CANARY}".encode(), "participate")
            signals.observe(made)
        signals.breaker_changed("payments", f"user:{CANARY}@a.test:443", "closed", "open", f"token={CANARY}")
        signals.config_changed(
            False, f"sidecar.yaml:1: egress_proxy: http://u:{CANARY}@corp is wrong", token_file=f"secret={CANARY}"
        )
        signals.dead_lettered("payments", "dlq_1", "CONNECTION_RESET", stories[0])
        for second in range(30):
            signals.tick(ARRIVED + second)
        received.until(lambda: len(received.spans) >= 3 * len(stories) and bool(received.metrics))
        shown: list[Any] = [signals.show(made, explained=True) for made in stories]
        texts = [explain.as_text(made, signals.redactor) for made in stories]
        sse = b""
        async with asyncio.timeout(5):
            count = len(signals.events.recent(1000))
            async for event in reader:
                sse += as_sse(event, signals.redactor) + as_line(event, signals.redactor)
                count -= 1
                if not count:
                    break
        signals.close()
    sinks = {
        "log": stream.getvalue(),
        "admin": orjson.dumps(shown).decode(),
        "explanations": "\n".join(texts),
        "events": sse.decode(),
        "collector": "\n".join(str(request) for request in received.requests),
        "metrics": b"".join(signals.metrics.render(OPENMETRICS)[1]).decode(),
        **files(tmp_path),
    }
    assert all(sinks.values()), "an empty sink proves nothing"
    assert len(sinks) >= 8, "the event file and two kinds of error records are among them"
    assert {} == {name: text.count(CANARY) for name, text in sinks.items() if CANARY in text}
    assert "REDACTED" in sinks["log"] and "REDACTED" in sinks["collector"] and "REDACTED" in sinks["admin"]

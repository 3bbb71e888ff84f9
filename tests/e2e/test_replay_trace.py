"""A replay in traces: a root of its own, linked to the request that failed."""

from __future__ import annotations

from tests.conftest import UpstreamStarter
from tests.doubles.faults import NO_BREAKER, request
from tests.doubles.upstream import Talk, answer
from tests.e2e.conftest import Collector, Watcher
from tests.e2e.signs import arrived


async def test_a_replay_is_a_root_that_links_to_the_request_that_failed(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    async def once_down(talk: Talk) -> None:
        while True:
            await talk.read_request()
            down = len(talk.upstream.requests) == 1
            await talk.send(answer(b"", "503 Service Unavailable") if down else answer(b"ok"))

    environ, received = http_only
    upstream = await start_upstream(once_down)
    sidecar = await watch(environ, upstreams={"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER}})
    app = await sidecar.app()
    failed = await app.ask(request("POST", "/u/x", "Idempotency-Key: k", "x-sidecar-retry: off", body=b"hi"))
    dlq_id = failed.get("x-sidecar-dlq-id")
    durable = sidecar.proxy.kept.durable
    assert dlq_id is not None and durable is not None and durable.replayer is not None
    assert "completed" == (await durable.replayer.one(dlq_id, "tester")).outcome
    await arrived(received, lambda: len(received.spans) == 4)
    (root,) = [span for span in received.spans if span.name == "replay u"]
    (original,) = [span for span in received.spans if span.kind == 2]
    (link,) = root.links
    assert (original.trace_id, original.span_id) == (link.trace_id, link.span_id)
    assert (b"", True) == (root.parent_span_id, root.trace_id != original.trace_id)
    told = {item.key: item.value.string_value for item in root.attributes}
    assert dlq_id == told["sidecar.dlq.id"]
    (attempt,) = [span for span in received.spans if span.parent_span_id == root.span_id]
    assert "replay" == {item.key: item.value.string_value for item in attempt.attributes}["sidecar.attempt.kind"]

"""The admin port and the probes: what they answer, to whom, and that the numbers add up."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from config.errors import registry
from sidecar import __version__
from telemetry import names
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.upstream import Talk, Upstream, answer

ONE_ATTEMPT = True

ERROR_KEYS = {"error_code", "message", "details", "request_id", "timestamp", "documentation_url"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


async def ask(
    address: Any, path: str, *fields: str, host: str = "localhost", method: str = "GET", body: bytes = b""
) -> Reply:
    app = await App.connect(tuple(address))
    lines = "".join(f"{field}\r\n" for field in fields)
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{lines}\r\n"
    try:
        return await app.ask(head.encode("latin-1") + body, to_head=method == "HEAD")
    finally:
        app.close()


async def admin(sidecar: Running, path: str, *fields: str, **options: Any) -> Reply:
    return await ask(sidecar.admin_address, path, *fields, **options)


async def order(sidecar: Running, path: str, body: Any = None) -> Reply:
    """POST, with a JSON body if one is given."""
    data = b"" if body is None else json.dumps(body).encode()
    fields = [f"Content-Length: {len(data)}"] + ["Content-Type: application/json"] * (body is not None)
    return await admin(sidecar, path, *fields, method="POST", body=data)


def at_fault(reply: Reply) -> list[str]:
    """The fields that a refusal names."""
    assert ERROR_KEYS == set(reply.json)
    assert len(reply.json["details"]["errors"]) == reply.json["details"]["total_errors"]
    return [error["field"] for error in reply.json["details"]["errors"]]


def samples(text: str, parse: Any = parse_prometheus) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def summed(found: dict[Any, float], name: str) -> float:
    return sum(value for (sample, _), value in found.items() if sample == name)


# ---- answers -----------------------------------------------------------------------------------------------------


async def test_livez_and_readyz_say_so_in_json(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    alive, ready = await admin(sidecar, "/livez"), await admin(sidecar, "/readyz")
    assert (200, {"status": "alive"}) == (alive.status, alive.json)
    assert (200, {"status": "ready"}) == (ready.status, ready.json)
    assert "application/json" in ready.get("content-type")


async def test_readyz_says_why_not_and_livez_stays_alive(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.api.not_ready = "draining"
    reply = await admin(sidecar, "/readyz")
    assert (503, "draining") == (reply.status, reply.json["reason"])
    assert 200 == (await admin(sidecar, "/livez")).status
    assert 0 == samples((await admin(sidecar, "/metrics")).body.decode())["sidecar_ready", ()]


async def test_config_shows_every_setting_with_where_it_came_from(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(shutdown_grace=7, upstreams={"a": {"hosts": ["a.test"]}})
    sidecar.reloading.loaded.origins.update({"shutdown_grace": "sidecar.yaml:1"})
    shown = (await admin(sidecar, "/config")).json
    assert {"file", "settings", "origins", "needs_restart"} == set(shown)
    assert (7, ["a.test"]) == (shown["settings"]["shutdown_grace"], shown["settings"]["upstreams"]["a"]["hosts"])
    assert {"shutdown_grace": "sidecar.yaml:1"} == shown["origins"]


async def test_errors_lists_the_whole_registry_and_each_code_has_its_page(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    listed = (await admin(sidecar, "/errors")).json
    assert (list(registry()), None) == ([item["code"] for item in listed["items"]], listed["next_cursor"])
    page = await admin(sidecar, "/errors/EGRESS_DENIED")
    assert (200, 403, "EGRESS_DENIED") == (page.status, page.json["status"], page.json["code"])
    assert page.json["description"] and page.json["resolution"] and page.json["causes"]
    unknown = await admin(sidecar, "/errors/CIRCUT_OPEN")
    assert (404, "NOT_FOUND", ["code"]) == (unknown.status, unknown.json["error_code"], at_fault(unknown))
    assert 'did you mean "CIRCUIT_OPEN"?' in unknown.json["message"]


async def test_the_documentation_link_of_an_error_leads_to_its_page(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    refused = await (await sidecar.app()).ask("GET /nowhere HTTP/1.1\r\nHost: s\r\n\r\n")
    address, path = re.fullmatch(r"http://([^/]+)(/.+)", refused.json["documentation_url"]).groups()
    assert f"127.0.0.1:{sidecar.admin_address[1]}" == address
    assert refused.json["error_code"] == (await admin(sidecar, path)).json["code"]


async def test_what_is_no_http_gets_a_400_and_leaves_no_stack_in_the_log(
    start_sidecar: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = await start_sidecar()
    for sent in ("GET / HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n", f"GET /{'x' * 70_000} HTTP/1.1\r\n\r\n"):
        app = await App.connect(sidecar.admin_address)
        assert 400 == (await app.ask(sent)).status
        app.close()
    assert 404 == (await admin(sidecar, f"/{'x' * 60_000}")).status
    assert [] == caplog.records


async def test_an_unknown_path_is_a_404_in_json_that_names_the_known_ones(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reply = await admin(sidecar, "/metric")
    assert (404, "NOT_FOUND") == (reply.status, reply.json["error_code"])
    assert 'did you mean "/metrics"?' in reply.json["message"]
    assert "/sessions/{id}" in reply.json["message"]
    assert 404 == (await admin(sidecar, "/")).status


async def test_a_refusal_has_an_id_a_time_and_the_page_of_its_code(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    one, other = (await admin(sidecar, "/nowhere")).json, (await admin(sidecar, "/nowhere")).json
    assert ERROR_KEYS == set(one)
    assert one["request_id"] != other["request_id"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["timestamp"])
    assert f"http://127.0.0.1:{sidecar.admin_address[1]}/errors/NOT_FOUND" == one["documentation_url"]


async def test_a_method_that_a_path_does_not_take_is_told_with_those_it_takes(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        reply = await admin(sidecar, "/config", "Content-Length: 0", method=method)
        assert (405, "CLIENT_ERROR", "GET,HEAD") == (reply.status, reply.json["error_code"], reply.get("allow"))
    reply = await admin(sidecar, "/retries/enable")
    assert (405, "POST") == (reply.status, reply.get("allow"))
    assert "/retries/enable does not take GET; it takes POST" == reply.json["message"]


async def test_a_fault_of_our_own_is_a_500_in_the_same_shape_and_is_counted(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.proxy.signals.aggregates.retry_metrics = None  # type: ignore[assignment,method-assign]  # broken
    reply = await admin(sidecar, "/retry-metrics")
    assert (500, "SIDECAR_INTERNAL", ERROR_KEYS) == (reply.status, reply.json["error_code"], set(reply.json))
    found = samples((await admin(sidecar, "/metrics")).body.decode())
    assert 1 == found["sidecar_internal_errors_total", (("component", "admin"),)]
    sidecar.proxy.signals.writer.flush()
    assert "sidecar.internal_error" in sidecar.logged.getvalue()
    sidecar.logged.truncate(0)  # it was meant


# ---- who may ask -------------------------------------------------------------------------------------------------


async def test_loopback_names_are_answered(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for host in ["localhost", "localhost:4141", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:4141"]:
        assert 200 == (await admin(sidecar, "/config", host=host)).status
        assert 200 == (await admin(sidecar, "/config", f"Origin: http://{host}", host=host)).status


async def test_a_page_whose_name_was_pointed_at_loopback_gets_nothing(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for host in [
        "evil.test",
        "evil.test:4141",
        "localhost.evil.test",
        "127.0.0.1.evil.test",
        "10.0.0.1",
        "localhost@evil",
    ]:
        for path in ("/config", "/livez", "/metrics", "/errors", "/sessions", "/events", "/nowhere"):
            reply = await admin(sidecar, path, host=host)
            assert 403 == reply.status
            assert ERROR_KEYS == set(reply.json)
            assert host in reply.json["message"]
        for path in ("/breakers/u/reset", "/retries/disable"):
            assert 403 == (await admin(sidecar, path, "Content-Length: 0", host=host, method="POST")).status
        assert sidecar.proxy.retries_enabled


async def test_every_origin_counts_and_where_there_is_none_the_site_does(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    ours = "Origin: http://localhost"
    for fields in (
        (ours, "Origin: http://evil.test"),
        ("Origin: http://evil.test", ours),
        ("Sec-Fetch-Site: cross-site",),
        ("Sec-Fetch-Site: same-site",),
        ("Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"),
        (ours, "Sec-Fetch-Site: cross-site"),
    ):
        for path in ("/retries/disable", "/keys/rotate", "/reload"):
            reply = await admin(sidecar, path, "Content-Length: 0", *fields, method="POST")
            assert (403, "INSUFFICIENT_PERMISSIONS") == (reply.status, reply.json["error_code"]), (path, fields)
    assert sidecar.proxy.retries_enabled
    for fields in ((), (ours,), ("Sec-Fetch-Site: same-origin",), ("Sec-Fetch-Site: none",)):
        assert 200 == (await admin(sidecar, "/retries/enable", "Content-Length: 0", *fields, method="POST")).status
    assert 200 == (await admin(sidecar, "/errors", "Sec-Fetch-Site: cross-site")).status, "a link may be followed"


async def test_a_page_of_another_site_gets_nothing(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for origin in [
        *("http://evil.test", "https://localhost.evil.test", "null", ""),
        *("http://localhost:3000", "http://127.0.0.1"),  # another program's page on this machine
    ]:
        reply = await admin(sidecar, "/config", f"Origin: {origin}")
        assert 403 == reply.status
        assert "Origin" in reply.json["message"]
        assert 403 == (await admin(sidecar, "/retries/disable", f"Origin: {origin}", method="POST")).status
        assert sidecar.proxy.retries_enabled
        assert None is reply.get("access-control-allow-origin")


async def test_the_probes_listener_serves_its_three_paths_to_any_name_and_nothing_else(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(probes={"host": "127.0.0.1", "port": 0})
    for path in ("/livez", "/readyz", "/metrics"):
        reply = await ask(sidecar.probes_address, path, host="10.1.2.3:4142")
        assert (200, None) == (reply.status, reply.get("server")), "what answers is nobody's business"
    for path in ("/config", "/errors", "/errors/NO_ROUTE", "/", "/openapi.json"):
        assert 404 == (await ask(sidecar.probes_address, path)).status


async def test_the_proxy_listener_serves_none_of_the_admin_paths(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for path in ("/livez", "/config", "/metrics"):
        reply = await ask(sidecar.address, path, host=f"127.0.0.1:{sidecar.admin_address[1]}")
        assert (404, "NO_ROUTE") == (reply.status, reply.json["error_code"])


async def test_the_admin_port_is_not_reachable_through_the_proxy(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    port = sidecar.admin_address[1]
    for name in ("127.0.0.1", "localhost", "0.0.0.0", "127.1"):
        reply = await (await sidecar.app()).ask(f"GET http://{name}:{port}/config HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])


# ---- metrics -----------------------------------------------------------------------------------------------------


async def test_metrics_are_readable_in_both_formats(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    await (await sidecar.app()).ask("GET /nowhere HTTP/1.1\r\nHost: s\r\n\r\n")
    plain = await admin(sidecar, "/metrics")
    opened = await admin(sidecar, "/metrics", f"Accept: {OPENMETRICS}")
    assert plain.get("content-type").startswith("text/plain; version=")
    assert opened.get("content-type").startswith("application/openmetrics-text; version=1.0.0")
    for reply, parse in ((plain, parse_prometheus), (opened, parse_openmetrics)):
        found = samples(reply.body.decode(), parse)
        assert 1 == found["sidecar_sessions_total", (("outcome", "denied"), ("upstream", "_none"))]
        assert found["process_resident_memory_bytes", ()] > 0
        assert found["process_open_fds", ()] > 0
        assert 1 == found["sidecar_ready", ()]
        build = next(dict(labels) for name, labels in found if name == "sidecar_build_info")
        assert __version__ == build["version"]


async def test_every_metric_has_a_help_text_and_its_kind(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    text = (await admin(sidecar, "/metrics")).body.decode()
    told = {family.name: family for family in parse_prometheus(text)}
    known = [value for value in vars(names).values() if isinstance(value, names.Metric)]
    assert known
    for metric in known:
        assert (metric.kind, metric.help) == (told[metric.name].type, told[metric.name].documentation), metric.name


if shutil.which("promtool"):

    async def test_promtool_finds_nothing_to_complain_about(start_sidecar: Starter) -> None:
        sidecar = await start_sidecar()
        await (await sidecar.app()).ask("GET /nowhere HTTP/1.1\r\nHost: s\r\n\r\n")
        body = (await admin(sidecar, "/metrics")).body
        # The process and Python metrics are the client library's, with names of their own tradition.
        ours = b"".join(line + b"\n" for line in body.splitlines() if b"sidecar_" in line)
        pipe = asyncio.subprocess.PIPE
        tool = await asyncio.create_subprocess_exec(
            "promtool", "check", "metrics", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(tool.communicate(ours), 10)
        assert (0, b"") == (tool.returncode, said)


async def many_things(talk: Talk) -> None:
    """Does what the path says."""
    while True:
        head, _ = await talk.read_request()
        what = head.split()[1]
        if what == b"/ok":
            await talk.send(answer())
        elif what.startswith(b"/status/"):
            await talk.send(answer(b"no", f"{what[8:].decode()} Said So"))
        elif what == b"/reset":
            return talk.reset()
        elif what == b"/garbage":
            return await talk.send(b"this is not HTTP\r\n\r\n")
        elif what == b"/half":
            return await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nonly this")
        elif what == b"/never":
            await asyncio.sleep(60)


async def mixed_bag(sidecar: Running, upstream: Upstream) -> dict[str, int]:
    """One request of each kind; what was expected of them."""
    dead = _unused_port()
    paths = ["ok", "ok", "status/404", "status/429", "status/500", "reset", "garbage", "half"]
    asked = [f"GET /u/{path} HTTP/1.1\r\nHost: s\r\n\r\n" for path in paths]
    asked += [
        "GET /u/never HTTP/1.1\r\nHost: s\r\nx-sidecar-attempt-timeout: 0.3\r\n\r\n",
        "POST /u/status/503 HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi",
        "POST /u/reset HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi",
        f"GET http://127.0.0.1:{dead}/ HTTP/1.1\r\nHost: s\r\n\r\n",
        "GET http://169.254.169.254/ HTTP/1.1\r\nHost: s\r\n\r\n",
        "GET /nowhere HTTP/1.1\r\nHost: s\r\n\r\n",
        "CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: s\r\n\r\n",
    ]
    replies = await asyncio.gather(*(_one(sidecar, text) for text in asked))
    assert 15 == len(replies)
    tunnel = await sidecar.app()
    await tunnel.ask(f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: s\r\n\r\n", to_head=True)
    tunnel.close()
    impatient = await sidecar.app()
    seen = len(upstream.requests)
    await impatient.send("GET /u/never HTTP/1.1\r\nHost: s\r\n\r\n")
    async with asyncio.timeout(5):
        while len(upstream.requests) == seen:
            await asyncio.sleep(0.01)
    impatient.close()
    assert 400 == (await _one(sidecar, "GET /u/ok HTTP/1.1\r\nHost: a b\r\n\r\n")).status
    return {
        "first_try": 2,
        "rejected": 1,
        "exhausted": 6,  # 429, 500, reset, garbage, never (its time ran out), nobody listening
        "failed_streaming": 1,
        "not_retryable": 2,
        "denied": 3,
        "tunnelled": 1,
        "cancelled": 1,
    }


async def _one(sidecar: Running, text: str) -> Reply:
    return await (await sidecar.app()).ask(text)


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_outcomes_add_up_to_requests_after_a_mixed_bag(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(many_things)
    sidecar = await start_sidecar(upstreams=route(upstream), egress={"connect_ports": [443]})
    expected = await mixed_bag(sidecar, upstream)
    async with asyncio.timeout(5):
        while sum(sidecar.outcomes.values()) < sum(expected.values()):
            await asyncio.sleep(0.01)
    assert expected == sidecar.outcomes
    found = samples((await admin(sidecar, "/metrics")).body.decode())
    assert 17 == summed(found, "sidecar_sessions_total") == summed(found, "sidecar_requests_total")
    assert 16 == summed(found, "sidecar_request_duration_seconds_count")  # all but the tunnel
    assert 1 == summed(found, "sidecar_malformed_requests_total")
    assert 3 == summed(found, "sidecar_denied_total")
    assert 0 == summed(found, "sidecar_requests_in_flight")
    assert 0 == summed(found, "sidecar_internal_errors_total")

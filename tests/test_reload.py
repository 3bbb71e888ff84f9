"""Another configuration while requests are under way: all of it at once, or nothing; and what survives it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from telemetry.record import SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import TINY, at_rest, until
from tests.doubles.letters import keep
from tests.doubles.upstream import Talk, always, answer
from tests.test_admin import admin, order

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
OK = always(answer(b"ok"))
NO = always(answer(b"no", "503 Service Unavailable"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder / "sidecar.yaml"


def rewrite(file: Path, **keys: Any) -> None:
    """The file with other values for some of its keys, replaced as an editor does it."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    new.rename(file)


def replaced(file: Path, text: str) -> str:
    """What it held before."""
    before = file.read_text()
    file.write_text(text)
    return before


async def reload(sidecar: Running, file: Path, **keys: Any) -> dict[str, Any]:
    rewrite(file, **keys)
    reply = await order(sidecar, "/reload")
    assert 200 == reply.status, reply.body
    return reply.json


def metric(sidecar: Running, name: str, **labels: str) -> float | None:
    return sidecar.proxy.metrics.registry.get_sample_value(f"sidecar_{name}", labels)


# ---- what changes ------------------------------------------------------------------------------------------------


async def test_a_reload_puts_the_file_in_force_and_says_what_changed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    old, new = await start_upstream(always(answer(b"old"))), await start_upstream(always(answer(b"new")))
    sidecar = await start_sidecar(file=file, upstreams={"u": {"route": "/u", "endpoints": [old.url]}})
    app = await sidecar.app()
    assert b"old" == (await app.ask(GET)).body
    told = await reload(sidecar, file, upstreams={"u": {"route": "/u", "endpoints": [new.url]}}, shutdown_grace=3)
    changed = {one["key"]: (one["before"], one["after"]) for one in told["changed"]}
    assert {"shutdown_grace": (20.0, 3.0), "upstreams.u.endpoints": ([old.url], [new.url])} == changed
    assert [] == told["needs_restart"]
    assert b"new" == (await app.ask(GET)).body
    shown = (await admin(sidecar, "/config")).json
    assert (3.0, "file") == (shown["settings"]["shutdown_grace"], shown["origins"]["shutdown_grace"])
    assert 1.0 == metric(sidecar, "config_reloads_total", result="success")
    assert 1.0 == metric(sidecar, "config_last_reload_successful")
    assert "config_changed" in [event.type for event in sidecar.proxy.signals.events.recent()]


async def test_an_upstream_that_is_taken_out_has_no_route_any_more_and_its_connections_are_closed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    upstream = await start_upstream(OK)
    sidecar = await start_sidecar(file=file, upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    await app.ask(GET)
    await reload(sidecar, file, upstreams={})
    assert 404 == (await app.ask(GET)).status
    await until(lambda: not upstream._tasks, "a connection to an upstream that is gone is still open")


async def test_limits_hold_for_connections_that_are_open_already(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    upstream = await start_upstream(OK)
    sidecar = await start_sidecar(file=file, upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    await app.ask(GET)
    await reload(sidecar, file, limits={"head_bytes": 1024})
    assert 431 == (await app.ask(f"GET /u/x HTTP/1.1\r\nHost: s\r\nX: {'x' * 2000}\r\n\r\n")).status


async def test_egress_rules_hold_for_connections_that_are_open_already(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    upstream = await start_upstream(OK)
    sidecar = await start_sidecar(file=file)
    app = await sidecar.app()
    data = f"GET {upstream.url}/x HTTP/1.1\r\nHost: s\r\n\r\n"
    assert 200 == (await app.ask(data)).status
    await reload(sidecar, file, egress={"deny": ["127.0.0.0/8"]})
    assert 403 == (await app.ask(data)).status


async def test_what_is_read_at_the_start_only_is_told_as_needing_a_restart(start_sidecar: Starter, file: Path) -> None:
    sidecar = await start_sidecar(file=file)
    before = sidecar.proxy.settings.listen.port
    told = await reload(sidecar, file, listen={"port": 4999}, shutdown_grace=4)
    assert (["listen.port"], ["shutdown_grace"]) == (told["needs_restart"], [one["key"] for one in told["changed"]])
    ready = (await admin(sidecar, "/readyz")).json
    assert ("ready", {"needs_restart": ["listen.port"], "refused": None}) == (ready["status"], ready["configuration"])
    shown = (await admin(sidecar, "/config")).json
    assert (before, ["listen.port"]) == (shown["settings"]["listen"]["port"], shown["needs_restart"])
    assert "restart the sidecar to put listen.port in force" in sidecar.logged.getvalue()
    assert [] == (await reload(sidecar, file, listen={"port": 0}))["needs_restart"]
    assert {"status": "ready"} == (await admin(sidecar, "/readyz")).json


async def test_settings_that_are_safe_only_after_a_restart_are_refused_until_then(
    start_sidecar: Starter, file: Path
) -> None:
    sidecar = await start_sidecar(file=file, listen={"host": "0.0.0.0", "port": 0}, egress={"mode": "configured_only"})
    rewrite(file, listen={"host": "127.0.0.1", "port": 0}, egress={"mode": "open"})
    reply = await order(sidecar, "/reload")
    assert (409, "CONFLICT") == (reply.status, reply.json["error_code"])
    assert "open proxy" in reply.json["message"] and "restart" in reply.json["message"]
    assert sidecar.proxy.egress.configured_only


# ---- a bad file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("upstreams: {u: {rote: /u}}", "rote"),
        ("listen: [", "not valid YAML"),
        ("upstreams: {u: {hosts: [a.test], policy: nothing}}", "nothing"),
        ('version: "2.0.0"', "version"),
        ("", "the file is empty now"),
    ],
)
async def test_a_bad_file_changes_nothing_and_says_why(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path, text: str, told: str
) -> None:
    upstream = await start_upstream(OK)
    sidecar = await start_sidecar(
        file=file,
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}},
        probes={"host": "127.0.0.1", "port": 0},
    )
    settings, directory = sidecar.proxy.settings, sidecar.proxy.directory
    good = replaced(file, text)
    reply = await order(sidecar, "/reload")
    assert (409, "CONFLICT") == (reply.status, reply.json["error_code"])
    assert told in reply.json["message"] and "nothing has changed" in reply.json["message"]
    assert (settings, directory) == (sidecar.proxy.settings, sidecar.proxy.directory)
    assert 200 == (await (await sidecar.app()).ask(GET)).status
    ready = (await admin(sidecar, "/readyz")).json
    assert "ready" == ready["status"] and told in ready["configuration"]["refused"]
    public = await App.connect(sidecar.probes_address)
    seen = await public.ask("GET /readyz HTTP/1.1\r\nHost: s\r\n\r\n")
    public.close()
    assert told not in seen.json["configuration"]["refused"]  # others than operators reach that listener
    assert told in sidecar.logged.getvalue()
    assert (1.0, 0.0) == (
        metric(sidecar, "config_reloads_total", result="failure"),
        metric(sidecar, "config_last_reload_successful"),
    )
    replaced(file, good)
    assert 200 == (await order(sidecar, "/reload")).status
    assert {"status": "ready"} == (await admin(sidecar, "/readyz")).json
    assert 1.0 == metric(sidecar, "config_last_reload_successful")


async def test_certificates_that_cannot_be_read_change_nothing(
    start_sidecar: Starter, file: Path, tmp_path: Path
) -> None:
    sidecar = await start_sidecar(file=file, upstreams={"u": {"hosts": ["a.test"]}})
    (tmp_path / "ca.pem").write_text("no certificate")
    directory = sidecar.proxy.directory
    rewrite(file, upstreams={"u": {"hosts": ["a.test"], "ca_bundle": str(tmp_path / "ca.pem")}})
    reply = await order(sidecar, "/reload")
    assert 409 == reply.status and "upstreams.u" in reply.json["message"]
    assert directory is sidecar.proxy.directory


# ---- what survives -----------------------------------------------------------------------------------------------


async def test_connections_breakers_budget_and_counts_survive(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    script = [OK]

    async def flaky(talk: Talk) -> None:
        await script[0](talk)

    upstream = await start_upstream(flaky)
    route = {"route": "/u", "endpoints": [upstream.url]}
    sidecar = await start_sidecar(file=file, upstreams={"u": route}, policies={"default": TINY})
    app = await sidecar.app()
    await app.ask(GET)
    before = sidecar.proxy.directory.configured["u"]
    ((_, breaker),) = before.breakers()
    await order(sidecar, "/breakers/u/force-open", {"reason": "a test"})
    await reload(
        sidecar, file, upstreams={"u": {**route, "timeouts": {"body_idle": 7}, "breaker": {"failure_threshold": 9}}}
    )
    after = sidecar.proxy.directory.configured["u"]
    assert before is not after
    ((_, kept),) = after.breakers()
    assert breaker is kept and "open" == kept.state(asyncio.get_running_loop().time())
    assert before.budget is after.budget
    assert (0, 1) == after.connections
    shown = (await admin(sidecar, "/breakers")).json["items"][0]
    assert ("open", 9) == (shown["state"], shown["thresholds"]["failure_threshold"])
    await order(sidecar, "/breakers/u/reset")
    assert 200 == (await app.ask(GET)).status
    assert 1 == upstream.connections
    assert (1, 0) == after.connects


async def test_a_request_under_way_ends_with_the_settings_it_began_with(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(talk: Talk) -> None:
        while True:
            await talk.read_request()
            asked.set()
            await go_on.wait()
            await talk.send(answer(b"no", "503 Service Unavailable"))

    old, new = await start_upstream(slow), await start_upstream(OK)
    retry = {"default": {**TINY, "max_attempts": 3}}
    sidecar = await start_sidecar(file=file, upstreams={"u": {"route": "/u", "endpoints": [old.url]}}, policies=retry)
    app = await sidecar.app()
    await app.send(GET)
    await asyncio.wait_for(asked.wait(), 10)
    await reload(
        sidecar,
        file,
        upstreams={"u": {"route": "/u", "endpoints": [new.url]}},
        policies={"default": {"max_attempts": 1}},
        error_codes={"TEMPORARY_UNAVAILABLE": {"retry": "fatal"}},
    )
    assert 200 == (await (await sidecar.app()).ask(GET)).status
    shown = (await admin(sidecar, "/upstreams")).json["items"][0]
    assert (1, 1) == (shown["in_flight"], shown["connections"]["active"])
    go_on.set()
    reply = await app.reply()
    assert (503, "3", "exhausted") == (reply.status, reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    assert (3, 1) == (len(old.requests), len(new.requests))
    await at_rest(sidecar)


async def test_a_fallback_is_that_of_the_settings_a_request_began_with(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(talk: Talk) -> None:
        await talk.read_request()
        asked.set()
        await go_on.wait()
        await talk.send(answer(b"no", "503 Service Unavailable"))

    first, backup, other = [await start_upstream(one) for one in (slow, always(answer(b"b")), always(answer(b"o")))]

    def keys(fallback: str) -> dict[str, Any]:
        breaker = {"failure_threshold": 1, "open_for": 60}
        return {
            "u": {"route": "/u", "endpoints": [first.url], "fallback": "b", "breaker": breaker},
            "b": {"endpoints": [fallback]},
        }

    sidecar = await start_sidecar(file=file, upstreams=keys(backup.url), policies={"default": TINY})
    app = await sidecar.app()
    await app.send(GET)
    await asyncio.wait_for(asked.wait(), 10)
    await reload(sidecar, file, upstreams=keys(other.url))
    go_on.set()
    assert b"b" == (await app.reply()).body
    assert b"o" == (await app.ask(GET)).body


async def test_whoever_waits_for_a_place_keeps_their_turn_under_other_limits(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(answer(b"ok"))

    upstream = await start_upstream(slow)

    def keys(**limits: int) -> dict[str, Any]:
        return {"u": {"route": "/u", "endpoints": [upstream.url], **limits}}

    sidecar = await start_sidecar(file=file, upstreams=keys(max_in_flight=1, max_queue=10))
    apps = [await sidecar.app() for _ in range(6)]
    for app in apps:
        await app.send(GET)
    await until(lambda: sidecar.proxy.directory.configured["u"].turns.waiting == 5, "nobody waits")
    await reload(sidecar, file, upstreams=keys(max_in_flight=3, max_queue=10))
    await until(lambda: len(upstream.requests) == 3, "a raised limit lets nobody in")
    await reload(sidecar, file, upstreams=keys())
    await until(lambda: len(upstream.requests) == 6, "a removed limit lets nobody in")
    await reload(sidecar, file, upstreams=keys(max_in_flight=1, max_queue=10))
    go_on.set()
    assert [200] * 6 == [(await app.reply()).status for app in apps]
    assert 200 == (await apps[0].ask(GET)).status
    await at_rest(sidecar)


async def test_what_was_in_force_is_gone_when_its_last_request_is(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    """By counting references alone: the collector looks at old objects only now and then."""
    upstream, backup = await start_upstream(OK), await start_upstream(OK)
    keys = {
        "u": {"route": "/u", "endpoints": [upstream.url], "fallback": "b"},
        "b": {"endpoints": [backup.url]},
    }
    sidecar = await start_sidecar(file=file, upstreams=keys)
    app = await sidecar.app()
    await reload(sidecar, file, shutdown_grace=9)  # what a sidecar starts with it remembers
    gc.collect()
    gc.disable()
    try:
        for grace in (1, 2, 3):
            await app.ask(GET)
            gone = [weakref.ref(sidecar.proxy.directory.router), weakref.ref(sidecar.proxy.settings)]
            await reload(sidecar, file, shutdown_grace=grace)
            sidecar.proxy.directory.sweep(asyncio.get_running_loop().time())
            await until(lambda gone=gone: [None, None] == [one() for one in gone], "the old configuration is held")
    finally:
        gc.enable()


# ---- noticed by itself -------------------------------------------------------------------------------------------


async def test_a_changed_file_is_noticed(start_sidecar: Starter, file: Path) -> None:
    sidecar = await start_sidecar(file=file)
    await asyncio.sleep(0.3)  # the watch begins after the start; should it miss this one it looks again anyway
    rewrite(file, shutdown_grace=3)
    await until_within(lambda: 3 == sidecar.proxy.settings.shutdown_grace)
    replaced(file, "nonsense: 1")
    await until_within(lambda: sidecar.reloading.refused is not None)


async def test_a_kubernetes_swap_of_links_is_noticed(start_sidecar: Starter, tmp_path: Path) -> None:
    """A ConfigMap: `sidecar.yaml` → `..data/sidecar.yaml`, `..data` → a directory that is new each time."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def publish(version: int, text: str) -> None:
        folder = mount / f"..2026_{version}"
        folder.mkdir()
        (folder / "sidecar.yaml").write_text(text)
        link = mount / "..data_tmp"
        link.symlink_to(folder.name)
        os.rename(link, mount / "..data")

    keys: dict[str, Any] = {"listen": {"port": 0}, "admin": {"port": 0}, "state_dir": str(tmp_path / "state")}
    publish(1, json.dumps(keys))
    (mount / "sidecar.yaml").symlink_to("..data/sidecar.yaml")
    sidecar = await start_sidecar(file=mount / "sidecar.yaml", **keys)
    await asyncio.sleep(0.3)
    for version, grace in ((2, 5), (3, 6)):
        publish(version, json.dumps({**keys, "shutdown_grace": grace}))
        await until_within(lambda grace=grace: grace == sidecar.proxy.settings.shutdown_grace)


async def until_within(condition: Any) -> None:
    """Watching takes its time on a busy machine."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_dead_letters_are_judged_by_the_new_settings(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path
) -> None:
    upstream = await start_upstream(OK)
    keys = {"hosts": ["api.test"], "endpoints": [upstream.url]}
    sidecar = await start_sidecar(file=file, upstreams={"payments": keys})
    facts = {"method": "PUT", "code": "UPSTREAM_ERROR", "status": 500, "phase": SENT}
    await keep(sidecar, upstream, 1, **facts)
    assert "safe" == (await admin(sidecar, "/dlq")).json["items"][0]["verdict"]
    await reload(sidecar, file, upstreams={"payments": {**keys, "replay": {"stale_after": 1}}})
    await until_verdict(sidecar, "stale")


async def until_verdict(sidecar: Running, verdict: str) -> None:
    async with asyncio.timeout(20):
        while verdict != (await admin(sidecar, "/dlq")).json["items"][0]["verdict"]:
            await asyncio.sleep(0.02)

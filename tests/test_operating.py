"""What an operator changes while the sidecar runs, what a restart remembers of it, and who is written down for it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable.trouble import NotKept
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.faults import TINY
from tests.doubles.upstream import always, answer
from tests.test_admin import admin, at_fault, order
from tests.test_admin_access import OPERATOR, READER, bearer, token_file  # noqa: F401  # a fixture
from tests.test_reload import rewrite

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
NO = always(answer(b"no", "503 Service Unavailable"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sidecar.yaml"


async def put(sidecar: Running, path: str, body: Any, *fields: str, method: str = "PUT") -> Reply:
    data = json.dumps(body).encode()
    lines = (f"Content-Length: {len(data)}", "Content-Type: application/json", *fields)
    return await admin(sidecar, path, *lines, method=method, body=data)


async def delete(sidecar: Running, path: str) -> Reply:
    return await admin(sidecar, path, method="DELETE")


async def audit(sidecar: Running, query: str = "") -> list[dict[str, Any]]:
    reply = await admin(sidecar, f"/audit{query}")
    assert 200 == reply.status, reply.body
    items: list[dict[str, Any]] = reply.json["items"]
    return items


async def attempts(app: App) -> str | None:
    return (await app.ask(GET)).get("x-sidecar-attempts")


# ---- policies ----------------------------------------------------------------------------------------------------


async def test_a_policy_set_at_run_time_holds_over_the_file_and_a_restart_until_it_is_removed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, file: Path, tmp_path: Path
) -> None:
    upstream = await start_upstream(NO)
    keys: dict[str, Any] = {
        "upstreams": {
            "u": {
                "route": "/u",
                "endpoints": [upstream.url],
                "policy": "mine",
                "breaker": {"enabled": False},
                "dead_letter": {"enabled": False},
            }
        },
        "policies": {"mine": {**TINY, "max_attempts": 2, "jitter_type": "none"}},
        "state_dir": str(tmp_path / "state"),
    }
    sidecar = await start_sidecar(file=file, **keys)
    app = await sidecar.app()
    assert "2" == await attempts(app)
    reply = await put(sidecar, "/policies/mine?reason=a+test", {**TINY, "max_attempts": 3})
    assert (200, "runtime", 3) == (reply.status, reply.json["origin"], reply.json["policy"]["max_attempts"])
    assert "full" == reply.json["policy"]["jitter_type"]  # the whole policy, not a change of the file's
    assert "3" == await attempts(app)
    origins = (await admin(sidecar, "/config")).json["origins"]
    assert ("runtime", "default") == (origins["policies.mine.max_attempts"], origins["policies.mine.jitter_type"])
    rewrite(file, shutdown_grace=3)
    assert 200 == (await order(sidecar, "/reload")).status
    assert "3" == await attempts(app)
    await sidecar.stop(grace=0.1)
    again = await start_sidecar(file=file, **keys)
    assert "3" == await attempts(await again.app())
    removed = await delete(again, "/policies/mine")
    assert (200, "file", 2) == (
        removed.status,
        removed.json["policy"]["origin"],
        removed.json["policy"]["policy"]["max_attempts"],
    )
    assert "2" == await attempts(await again.app())
    await again.stop(grace=0.1)
    last = await start_sidecar(file=file, **keys)
    assert "2" == await attempts(await last.app())
    entries = [(one["what"], one["about"], one["reason"]) for one in await audit(last, "?about=policy")]
    assert [("removed", "policy mine, set at run time", None), ("set", "policy mine", "a test")] == entries


async def test_a_policy_may_exist_at_run_time_only(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    assert 200 == (await put(sidecar, "/policies/brave", {"max_attempts": 9})).status
    assert "brave" in [one["id"] for one in (await admin(sidecar, "/policies")).json["items"]]
    assert (200, None) == ((removed := await delete(sidecar, "/policies/brave")).status, removed.json["policy"])
    assert 404 == (await admin(sidecar, "/policies/brave")).status
    assert 404 == (await delete(sidecar, "/policies/brave")).status
    refused = await delete(sidecar, "/policies/patient")
    assert 409 == refused.status and "PUT /policies/patient" in refused.json["message"]


@pytest.mark.parametrize(
    ("name", "body", "field", "words"),
    [
        ("mine", {"max_atempts": 3}, "max_atempts", "max_attempts"),
        ("mine", {"max_attempts": 99}, "max_attempts", "10"),
        ("mine", {"max_attempts": "3"}, "max_attempts", "number"),
        (
            "mine",
            {"base_delay": 5, "max_delay": 1},
            "max_delay",
            "max_delay: must be at least base_delay (5); raise it, or lower base_delay (value: 1.0)",
        ),
        ("_mine", {}, "id", "reserved"),
        ("a%20b", {}, "id", "letters"),
    ],
)
async def test_a_wrong_policy_is_refused_with_the_key_at_fault_and_nothing_changes(
    start_sidecar: Starter, name: str, body: Any, field: str, words: str
) -> None:
    sidecar = await start_sidecar()
    before = sidecar.proxy.settings
    reply = await put(sidecar, f"/policies/{name}", body)
    assert (400, "VALIDATION_ERROR") == (reply.status, reply.json["error_code"])
    assert field == at_fault(reply)[0] and words in reply.json["message"]
    assert before is sidecar.proxy.settings and not sidecar.reloading.runtime


async def test_a_policy_can_be_set_while_the_file_on_disk_is_broken(start_sidecar: Starter, file: Path) -> None:
    sidecar = await start_sidecar(file=file, shutdown_grace=7)
    rewrite(file, nonsense=1)
    assert 409 == (await order(sidecar, "/reload")).status
    assert 200 == (await put(sidecar, "/policies/default", {"max_attempts": 1})).status
    settings = sidecar.proxy.settings
    assert (7, 1) == (settings.shutdown_grace, settings.policies["default"].max_attempts)
    assert sidecar.reloading.refused is not None
    metric = sidecar.proxy.metrics.registry.get_sample_value
    assert 0.0 == metric("sidecar_config_last_reload_successful")  # the file is as broken as before
    assert "config_changed" == sidecar.proxy.signals.events.recent()[-1].type


# ---- kill switch and breakers ------------------------------------------------------------------------------------


async def test_the_kill_switch_outlives_a_restart_and_a_reload(
    start_sidecar: Starter, file: Path, tmp_path: Path
) -> None:
    keys = {"state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(file=file, **keys)
    told = (await order(sidecar, "/retries/disable", {"reason": "a storm"})).json
    assert {"retries_enabled": False, "configured": True, "until": None, "lasting": True} == told
    assert "runtime" == (await admin(sidecar, "/config")).json["origins"]["retries_enabled"]
    await order(sidecar, "/reload")
    assert not sidecar.proxy.retries_enabled
    await sidecar.stop(grace=0.1)
    again = await start_sidecar(file=file, **keys)
    assert not again.proxy.retries_enabled
    await order(again, "/retries/enable")
    assert again.proxy.retries_enabled
    assert "default" == (await admin(again, "/config")).json["origins"]["retries_enabled"]
    await again.stop(grace=0.1)
    assert (await start_sidecar(file=file, **keys)).proxy.retries_enabled


async def test_the_kill_switch_works_where_nothing_can_be_kept(start_sidecar: Starter, tmp_path: Path) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    (tmp_path / "state" / "store.db").mkdir()  # no place for a database
    told = (await order(sidecar, "/retries/disable")).json
    assert (False, False) == (told["retries_enabled"], told["lasting"])
    assert not sidecar.proxy.retries_enabled
    assert "sidecar.audit.lost" in sidecar.logged.getvalue()
    assert 503 == (await put(sidecar, "/policies/mine", {})).status
    assert not sidecar.reloading.runtime.policies


async def test_forced_breakers_are_forced_after_a_restart_for_the_rest_of_their_time(
    start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    upstream, other = await start_upstream(NO), await start_upstream(NO)
    keys: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "upstreams": {
            "u": {"route": "/u", "endpoints": [upstream.url]},
            "v": {"route": "/v", "endpoints": [other.url]},
        },
    }
    sidecar = await start_sidecar(**keys)
    await (await sidecar.app()).ask(f"GET {other.url}/x HTTP/1.1\r\nHost: s\r\nx-sidecar-retry: off\r\n\r\n")
    automatic = other.url.removeprefix("http://")
    for name, action in (("u", "force-open"), ("v", "force-close"), (automatic, "force-open")):
        assert 200 == (await order(sidecar, f"/breakers/{name}/{action}", {"ttl": "10m", "reason": "a test"})).status
    await order(sidecar, "/breakers/v/reset")
    await sidecar.stop(grace=0.1)
    again = await start_sidecar(**keys)
    shown = {one["upstream"]: one for one in (await admin(again, "/breakers")).json["items"]}
    assert ("open", "a test") == (shown["u"]["state"], shown["u"]["forced"]["reason"])
    assert shown["u"]["forced"]["until"] is not None
    assert ("closed", None) == (shown["v"]["state"], shown["v"]["forced"])
    app = await again.app()
    assert 503 == (await app.ask(GET)).status
    assert "breaker_open" == (await app.ask(f"GET {other.url}/x HTTP/1.1\r\nHost: s\r\n\r\n")).get("x-sidecar-outcome")
    assert not upstream.requests


# ---- audit -------------------------------------------------------------------------------------------------------


async def test_every_change_is_in_the_audit_with_who_from_where_before_after_and_why(
    start_sidecar: Starter,
    file: Path,
    token_file: Path,  # noqa: F811
) -> None:
    sidecar = await start_sidecar(file=file, admin={"port": 0, "token_file": str(token_file)})
    operator = bearer(OPERATOR)
    await put(
        sidecar, "/retries/disable", {"reason": "token=abc123secret"}, operator, "x-sidecar-user: ann", method="POST"
    )
    rewrite(file, shutdown_grace=3)
    async with asyncio.timeout(30):
        while sidecar.proxy.settings.shutdown_grace != 3:
            await sidecar.reload("the file changed")
    reply = await admin(sidecar, "/audit", bearer(READER))
    reloaded, switched = reply.json["items"]
    assert ("file", "reloaded", {"shutdown_grace": 20.0}, {"shutdown_grace": 3.0}) == tuple(
        reloaded[key] for key in ("who", "what", "before", "after")
    )
    assert (True, False, "disabled", "retries", "127.0.0.1", "ann") == tuple(
        switched[key] for key in ("before", "after", "what", "about", "client", "claimed_user")
    )
    assert "abc123secret" not in switched["reason"]
    assert switched["who"] not in ("local", "file", "signal")
    page = (await admin(sidecar, "/audit?limit=1", operator)).json
    assert [reloaded] == page["items"]
    rest = (await admin(sidecar, f"/audit?limit=1&cursor={page['next_cursor']}", operator)).json
    assert ([switched], None) == (rest["items"], rest["next_cursor"])
    for query, found in [("who=file", 1), ("about=retries", 1), ("since=1h", 2), ("until=1h", 0), ("what=reload", 1)]:
        assert found == len((await admin(sidecar, f"/audit?{query}", operator)).json["items"]), query
    assert 400 == (await admin(sidecar, "/audit?cursor=x", operator)).status


async def test_an_audit_where_nothing_was_changed_is_empty_and_opens_no_store(
    start_sidecar: Starter, tmp_path: Path
) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    assert [] == await audit(sidecar)
    assert sidecar.proxy.kept.durable is None


async def test_the_audit_cannot_be_changed_even_by_hand(start_sidecar: Starter, tmp_path: Path) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"))
    await order(sidecar, "/retries/disable")
    with sqlite3.connect(tmp_path / "state" / "store.db") as connection:
        for statement in ("DELETE FROM audit", "UPDATE audit SET who = 'nobody'"):
            with pytest.raises(sqlite3.IntegrityError, match="only ever added to"):
                connection.execute(statement)
    connection.close()
    assert 1 == len(await audit(sidecar))


async def test_who_looks_at_sessions_is_in_the_audit_when_that_is_wanted(start_sidecar: Starter) -> None:
    quiet, noting = await start_sidecar(), await start_sidecar(admin={"port": 0, "audit_reads": True})
    for sidecar in (quiet, noting):
        for _ in range(3):
            await admin(sidecar, "/sessions")
        await admin(sidecar, "/retry-metrics")
        await admin(sidecar, "/sessions/nothing")
    assert [] == await audit(quiet)
    looked = [(one["what"], one["about"]) for one in await audit(noting)]
    assert [("looked at", "session nothing"), ("looked at", "retry metrics"), ("looked at", "sessions")] == looked


async def test_a_file_that_what_was_set_at_run_time_does_not_go_with_is_refused_and_after_a_start_told(
    start_sidecar: Starter, file: Path, tmp_path: Path
) -> None:
    keys = {"state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(file=file, **keys)
    assert 200 == (await put(sidecar, "/policies/brave", {"base_delay": 5})).status
    rewrite(file, global_defaults={"max_delay": 2, "base_delay": 0.1})
    reply = await order(sidecar, "/reload")
    assert 409 == reply.status and "sidecar policies remove" in reply.json["message"]
    assert "brave" in reply.json["message"]
    await sidecar.stop(grace=0.1)
    again = await start_sidecar(file=file, **keys, global_defaults={"max_delay": 2, "base_delay": 0.1})
    assert 2 == again.proxy.settings.global_defaults.max_delay
    assert "brave" not in again.proxy.settings.policies
    assert "brave" in (await admin(again, "/readyz")).json["configuration"]["refused"]
    assert 200 == (await delete(again, "/policies/brave")).status
    assert 200 == (await order(again, "/reload")).status
    assert {"status": "ready"} == (await admin(again, "/readyz")).json


async def test_the_kill_switch_can_be_turned_for_a_while(
    start_sidecar: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.reloading._LOOK_AGAIN", 0.02)
    state = str(tmp_path / "kept")
    sidecar = await start_sidecar(state_dir=state)
    told = (await order(sidecar, "/retries/disable", {"ttl": "10m", "reason": "a storm"})).json
    assert (False, True) == (told["retries_enabled"], told["until"] is not None)
    await sidecar.stop(grace=0.1)
    again = await start_sidecar(state_dir=state)
    shown = (await admin(again, "/retries")).json
    assert (False, told["until"]) == (shown["retries_enabled"], shown["until"]), "it outlives a restart"
    await order(again, "/retries/disable", {"ttl": 0.1})
    async with asyncio.timeout(5):
        while not again.proxy.retries_enabled:
            await asyncio.sleep(0.01)
    shown = (await admin(again, "/retries")).json
    assert (True, None) == (shown["retries_enabled"], shown["until"])
    entry = ("sidecar", "let the order run out for", "retries")
    async with asyncio.timeout(5):
        while entry not in [
            (item["who"], item["what"], item["about"]) for item in (await admin(again, "/audit")).json["items"]
        ]:
            await asyncio.sleep(0.01)


async def test_a_policy_can_be_set_for_a_while_which_outlives_a_restart_and_whose_end_is_written_down(
    start_sidecar: Starter, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.reloading._LOOK_AGAIN", 0.02)
    keys: dict[str, Any] = {"policies": {"mine": {"max_attempts": 2}}, "state_dir": str(tmp_path / "kept")}
    sidecar = await start_sidecar(file=file, **keys)
    told = (await put(sidecar, "/policies/mine?ttl=10m&reason=a+test", {"max_attempts": 7})).json
    assert ("runtime", True) == (told["origin"], told["until"] is not None)
    assert 200 == (await put(sidecar, "/policies/other?ttl=10m", {"max_attempts": 1})).status
    await sidecar.stop(grace=0.1)
    again = await start_sidecar(file=file, **keys)
    shown = {one["id"]: one["until"] for one in (await admin(again, "/policies")).json["items"]}
    assert (told["until"], None) == (shown["mine"], shown["default"]), "it outlives a restart"
    assert None is (await put(again, "/policies/other", {"max_attempts": 1})).json["until"], "set anew, for good"
    assert 200 == (await put(again, "/policies/mine?ttl=0.1", {"max_attempts": 8})).status
    async with asyncio.timeout(5):
        while "let the order run out for" not in [one["what"] for one in await audit(again)]:
            await asyncio.sleep(0.01)
    mine = (await admin(again, "/policies/mine")).json
    assert ("file", None, 2) == (mine["origin"], mine["until"], mine["policy"]["max_attempts"])
    assert "other" in again.proxy.settings.policies
    entry = next(one for one in await audit(again) if one["what"] == "let the order run out for")
    assert ("sidecar", "policy mine, set at run time", {"max_attempts": 8}, {"max_attempts": 2}) == (
        entry["who"],
        entry["about"],
        entry["before"],
        entry["after"],
    )


async def test_what_was_set_for_a_while_stays_until_its_end_can_be_written_down(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.reloading._LOOK_AGAIN", 0.02)
    sidecar = await start_sidecar()
    assert 200 == (await put(sidecar, "/policies/brave?ttl=10m", {"max_attempts": 9})).status
    durable = sidecar.proxy.kept.durable
    assert durable is not None
    full, keep = True, durable.orders.keep_runtime

    async def keep_runtime(*given: Any) -> None:
        if full:
            raise NotKept("the disk is full", "make room")
        await keep(*given)

    monkeypatch.setattr(durable.orders, "keep_runtime", keep_runtime)
    reloading = sidecar.reloading
    reloading.runtime = replace(reloading.runtime, until={"policies.brave": 1.0})
    reloading.end()
    await asyncio.sleep(0)
    reloading._watch_expiry()
    async with asyncio.timeout(5):
        while "sidecar.runtime.not_taken_away" not in sidecar.logged.getvalue():
            await asyncio.sleep(0.01)
    assert "brave" in sidecar.proxy.settings.policies
    full = False
    async with asyncio.timeout(5):
        while "brave" in sidecar.proxy.settings.policies:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ttl", ["0", "31d", "soon"])
async def test_a_time_that_cannot_be_is_refused_before_anything_changes(start_sidecar: Starter, ttl: str) -> None:
    sidecar = await start_sidecar()
    reply = await put(sidecar, f"/policies/brave?ttl={ttl}", {"max_attempts": 9})
    assert (400, "ttl") == (reply.status, at_fault(reply)[0])
    assert "brave" not in sidecar.proxy.settings.policies

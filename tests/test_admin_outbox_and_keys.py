"""Jobs, keys and exports over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
from typing import Any

import orjson
import pytest

from sidecar.durable.trouble import Trouble
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import Moody, keep, send, store
from tests.doubles.upstream import Upstream
from tests.test_admin import admin, at_fault


@pytest.fixture
def mood() -> Moody:
    return Moody()


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter, mood: Moody) -> Upstream:
    return await start_upstream(mood)


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    address = upstream.url.removeprefix("http://")
    return await start_sidecar(
        upstreams={
            "payments": {"hosts": [address], "policy": "once", "breaker": {"enabled": False}},
            "direct": {"hosts": ["direct.test"], "outbox": {"enabled": False}},
        }
    )


def job(upstream: Upstream, key: str = "k1", **changed: Any) -> dict[str, Any]:
    request = {"method": "POST", "url": f"{upstream.url}/notify?token=canary", "headers": {"X-A": "b"}, "body": "hello"}
    delivery = {"recipient": "canary@mail.test", "request": request}
    return {"idempotency_key": key, "subject": "order 7", "version": 1, "deliveries": [delivery], **changed}


async def state_of(sidecar: Running, job_id: str, *states: str) -> Any:
    async with asyncio.timeout(20):
        while (shown := (await admin(sidecar, f"/jobs/{job_id}")).json)["state"] not in states:
            await asyncio.sleep(0.02)
    return shown


# ---- jobs --------------------------------------------------------------------------------------------------------


async def test_a_job_is_taken_over_and_delivered_and_the_same_key_returns_it(
    sidecar: Running, upstream: Upstream
) -> None:
    await store(sidecar)
    reply = await send(sidecar, "POST", "/jobs", job(upstream))
    assert (202, 1) == (reply.status, len(reply.json["deliveries"]))
    done = await state_of(sidecar, reply.json["job_id"], "succeeded")
    assert ("payments", "sent") == (done["deliveries"][0]["upstream"], done["deliveries"][0]["state"])
    again = await send(sidecar, "POST", "/jobs", job(upstream))
    assert (200, reply.json["job_id"]) == (again.status, again.json["job_id"])
    listed = (await admin(sidecar, "/jobs?state=succeeded")).json
    assert ([reply.json["job_id"]], None) == ([item["job_id"] for item in listed["items"]], listed["next_cursor"])
    assert [] == (await admin(sidecar, "/jobs?state=unknown")).json["items"]
    log = sidecar.logged.getvalue()
    assert 1 == log.count("handed in job")
    assert "canary" not in log


async def test_the_answer_to_a_delivery_can_be_read_when_there_is_one(sidecar: Running, upstream: Upstream) -> None:
    await store(sidecar)
    reply = await send(sidecar, "POST", "/jobs", job(upstream))
    await state_of(sidecar, reply.json["job_id"], "succeeded")
    found = (await admin(sidecar, f"/jobs/{reply.json['job_id']}/result")).json
    assert ("succeeded", "sent", 200) == (
        found["state"],
        found["results"][0]["state"],
        found["results"][0]["answer"]["status"],
    )
    (listed,) = (await admin(sidecar, "/jobs")).json["items"]
    assert ("payments", "POST", f"{upstream.url}/notify?token=REDACTED", 1) == (
        listed["upstream"],
        listed["method"],
        listed["url"],
        listed["delivery_count"],
    )
    assert 404 == (await admin(sidecar, "/jobs/job_0/result")).status


async def test_an_upstream_that_has_only_a_route_is_named_and_the_url_is_a_path_there(
    start_sidecar: Starter, upstream: Upstream
) -> None:
    routed = {"route": "/pay", "endpoints": [upstream.url], "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams={"routed": routed})
    request = {"upstream": "routed", "url": "/v1/charges?a=b", "body": "hello"}
    reply = await send(sidecar, "POST", "/jobs", job(upstream, deliveries=[{"recipient": "a", "request": request}]))
    assert 202 == reply.status, reply.json
    done = await state_of(sidecar, reply.json["job_id"], "succeeded")
    assert ("routed", f"{upstream.url}/v1/charges?a=b") == (
        done["deliveries"][0]["upstream"],
        done["deliveries"][0]["url"],
    )
    assert b"POST /v1/charges?a=b HTTP/1.1" == upstream.requests[-1].split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("request_given", "field", "words"),
    [
        ({"upstream": "paymnts", "url": "/"}, "upstream", "there is: routed"),
        ({"upstream": "listed", "url": "/"}, "upstream", "no upstream with endpoints or a route"),
        ({"upstream": "routed", "url": "http://routed.test/"}, "url", "must be a path"),
        ({"upstream": "routed", "url": "//evil.test/"}, "url", "must be a path"),
        ({"url": "/v1/charges"}, "url", "or give `upstream`"),
    ],
)
async def test_an_upstream_that_cannot_be_named_like_this_is_refused(
    start_sidecar: Starter, upstream: Upstream, request_given: Any, field: str, words: str
) -> None:
    sidecar = await start_sidecar(
        upstreams={
            "routed": {"route": "/pay", "endpoints": [upstream.url]},
            "listed": {"hosts": ["listed.test"]},
        }
    )
    given = job(upstream, deliveries=[{"recipient": "a", "request": request_given}])
    reply = await send(sidecar, "POST", "/jobs", given)
    assert (400, [f"deliveries.0.request.{field}"]) == (reply.status, at_fault(reply))
    assert words in reply.json["message"]


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"subject": ""}, "subject", "at least 1"),
        ({"version": -1}, "version", "at least 0"),
        ({"deliveries": []}, "deliveries", "1 to 1000 items"),
        ({"subjet": "x"}, "subjet", 'did you mean "subject"?'),
        ({"idempotency_key": "x" * 201}, "idempotency_key", "too long"),
    ],
)
async def test_a_job_that_makes_no_sense_is_refused_and_makes_no_store(
    sidecar: Running, upstream: Upstream, changed: Any, field: str, words: str
) -> None:
    reply = await send(sidecar, "POST", "/jobs", {**job(upstream), **changed})
    assert (400, [field]) == (reply.status, at_fault(reply))
    assert words in reply.json["message"]
    assert None is sidecar.proxy.kept.durable


@pytest.mark.parametrize(
    ("request_given", "field", "words"),
    [
        ({"url": "/relative"}, "deliveries.0.request.url", "absolute http or https url"),
        ({"url": "ftp://a.test/"}, "deliveries.0.request.url", "absolute http or https url"),
        ({"url": "http://bad host/"}, "deliveries.0.request.url", "without spaces"),
        ({"url": "http://a..test/"}, "deliveries.0.request.url", "is not a valid target"),
        ({"url": "http://direct.test/"}, "deliveries.0.request.url", "`outbox.enabled: false`"),
        ({"method": "post", "url": "http://a.test/"}, "deliveries.0.request.method", "pattern"),
        ({"url": "http://a.test/", "headers": {"X": "a\nb"}}, "deliveries.0.request.headers", "cannot carry"),
        ({"url": "http://a.test/", "body": "a", "body_base64": "YQ=="}, "deliveries.0.request", "either `body`"),
        ({"uri": "http://a.test/", "url": "http://a.test/"}, "deliveries.0.request.uri", 'did you mean "url"?'),
    ],
)
async def test_a_delivery_that_makes_no_sense_is_refused_by_its_place(
    sidecar: Running, upstream: Upstream, request_given: Any, field: str, words: str
) -> None:
    given = job(upstream, deliveries=[{"recipient": "ann", "request": request_given}])
    reply = await send(sidecar, "POST", "/jobs", given)
    assert (400, [field]) == (reply.status, at_fault(reply))
    assert words in reply.json["message"]


async def test_what_is_missing_is_named_and_the_name_of_a_key_is_no_secret(sidecar: Running) -> None:
    reply = await send(sidecar, "POST", "/jobs", {})
    assert "idempotency_key: is required; subject: is required; deliveries: is required" == reply.json["message"]


async def test_the_same_recipient_twice_is_refused(sidecar: Running, upstream: Upstream) -> None:
    given = job(upstream)
    reply = await send(sidecar, "POST", "/jobs", {**given, "deliveries": given["deliveries"] * 2})
    assert (400, ["deliveries[1].recipient"]) == (reply.status, at_fault(reply))


async def test_a_delivery_whose_fate_is_unknown_is_resolved_by_hand(sidecar: Running, upstream: Upstream) -> None:
    durable = await store(sidecar)
    await send(sidecar, "POST", "/jobs", job(upstream, "other", subject="another"))
    job_id = (await send(sidecar, "POST", "/jobs", job(upstream))).json["job_id"]
    number = (await state_of(sidecar, job_id, "succeeded"))["deliveries"][0]["delivery_id"]
    path, looked = f"/jobs/{job_id}/resolve", {"delivery": number, "reason": "in their dashboard"}
    early = await send(sidecar, "POST", path, {**looked, "delivered": True})
    assert (409, "CONFLICT") == (early.status, early.json["error_code"])
    assert "only unknown and failed ones are resolved by hand" in early.json["message"]
    await durable.store.write(
        lambda connection: (
            connection.execute("UPDATE deliveries SET state = 'unknown', notified_at = NULL WHERE id = ?", (number,))
            and connection.execute("UPDATE jobs SET state = 'unknown' WHERE job_id = ?", (job_id,))
            and None
        )
    )
    for body, field in [
        ({**looked, "delivered": True, "reason": " "}, "reason"),
        ({**looked, "delivered": False, "notification_id": "m1"}, "notification_id"),
        ({"delivered": True, "reason": "x"}, "delivery"),
    ]:
        reply = await send(sidecar, "POST", path, body)
        assert (400, [field]) == (reply.status, at_fault(reply))
    other = await send(sidecar, "POST", path, {**looked, "delivery": 9999, "delivered": True})
    assert 404 == other.status
    done = await send(sidecar, "POST", path, {**looked, "delivered": True, "notification_id": "m1"})
    assert ("succeeded", "m1") == (done.json["state"], done.json["deliveries"][0]["notification_id"])
    assert "resolved as delivered" in sidecar.logged.getvalue()


# ---- keys --------------------------------------------------------------------------------------------------------


async def test_a_rotated_key_seals_everything_anew_and_a_replay_still_works(
    sidecar: Running, upstream: Upstream
) -> None:
    dlq_id = await keep(sidecar, upstream, body=b"x" * 400_000)
    old = (await admin(sidecar, "/keys")).json
    assert ([old["active"]], None) == (old["needed"], old["resealing"])
    rotated = await send(sidecar, "POST", "/keys/rotate", {"reason": "every quarter"})
    assert 200 == rotated.status
    assert old["active"] != rotated.json["active"]
    async with asyncio.timeout(20):
        while (shown := (await admin(sidecar, "/keys")).json)["resealing"]["state"] == "running":
            await asyncio.sleep(0.02)
    assert ("done", 1, 0) == tuple(shown["resealing"][name] for name in ("state", "files", "damaged"))
    assert [rotated.json["active"]] == shown["needed"]
    assert "completed" == (await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})).json["outcome"]
    assert b"x" * 400_000 == upstream.bodies[-1]
    assert "rotated the sealing key: every quarter" in sidecar.logged.getvalue()


async def test_a_key_from_the_environment_is_not_rotated_here(sidecar: Running, upstream: Upstream) -> None:
    await keep(sidecar, upstream)
    (await store(sidecar)).letters.keyring.from_environment = True
    reply = await send(sidecar, "POST", "/keys/rotate", {})
    assert (409, "CONFLICT") == (reply.status, reply.json["error_code"])
    assert "set SIDECAR_SEAL_KEY to `new,old`, restart and rotate again" in reply.json["message"]
    assert None is (await admin(sidecar, "/keys")).json["resealing"]


# ---- files -------------------------------------------------------------------------------------------------------


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def given(files: dict[str, bytes]) -> dict[str, Any]:
    """An import of what an export gave."""
    listed = []
    for name in (name for name in files if name.startswith("create_charge/") and name.endswith(".json")):
        beside = {"body_file": ".body", "original_body_file": ".original.body"}
        file = {"name": name, "document": base64.b64encode(files[name]).decode()}
        for key, suffix in beside.items():
            if content := files.get(name.removesuffix(".json") + suffix):
                file[key] = base64.b64encode(content).decode()
        listed.append(file)
    return {"files": listed}


async def test_an_export_is_a_tar_of_files_and_goes_in_again_where_the_keys_are(
    sidecar: Running, upstream: Upstream, start_sidecar: Starter
) -> None:
    first = await keep(sidecar, upstream, 1)
    large = await keep(sidecar, upstream, 2, body=b"canary" * 100_000)
    reply = await admin(sidecar, "/dlq/export?status=pending")
    assert ("application/x-tar", "2") == (reply.get("content-type"), reply.get("x-sidecar-entries"))
    files = members(reply.body)
    assert [
        f"create_charge/{first}.json",
        f"create_charge/{large}.body",
        f"create_charge/{large}.json",
        "sidecar-export.json",
    ] == list(files)
    assert {"entries": 2, "damaged": []} == orjson.loads(files["sidecar-export.json"])
    assert b"canary" not in reply.body

    stranger = await send(await start_sidecar(), "POST", "/dlq/import", given(files))
    assert ["refused", "refused"] == [item["result"] for item in stranger.json["items"]]
    assert all(f"{item['name']}: " in item["why"] and "needs key" in item["why"] for item in stranger.json["items"])
    known = await send(sidecar, "POST", "/dlq/import", given(files))
    assert ["known", "known"] == [item["result"] for item in known.json["items"]]
    await (await store(sidecar)).store.write(
        lambda connection: (
            connection.execute("DELETE FROM dead_letters")
            and connection.execute("DELETE FROM payloads")
            and connection.execute("DELETE FROM body_files")
            and None
        )
    )
    added = await send(sidecar, "POST", "/dlq/import", given(files))
    assert ["added", "added"] == [item["result"] for item in added.json["items"]]
    assert reply.body == (await admin(sidecar, "/dlq/export")).body
    assert 1 == sidecar.logged.getvalue().count("imported dead letters")


async def test_an_edited_or_cut_file_is_refused_with_its_line_and_the_others_are_taken(
    sidecar: Running, upstream: Upstream
) -> None:
    for number in range(3):
        await keep(sidecar, upstream, number)
    files = members((await admin(sidecar, "/dlq/export")).body)
    cut, edited, _, _ = files
    files[cut] = files[cut][:300]
    files[edited] = files[edited].replace(b'"status": "pending"', b'"status": "failed"')
    line = files[edited].split(b"\n").index(b'"status": "failed",') + 1
    before = (await admin(sidecar, "/dlq")).json
    items = (await send(sidecar, "POST", "/dlq/import", given(files))).json["items"]
    assert ["refused", "refused", "known"] == [item["result"] for item in items]
    lines = len(files[cut].split(b"\n"))
    assert items[0]["why"].startswith(f"{cut}:{lines}: is cut off here")
    assert items[1]["why"].startswith(f"{edited}:{line}: was changed since it was written")
    assert before == (await admin(sidecar, "/dlq")).json


async def test_an_export_of_nothing_is_whole_too(sidecar: Running) -> None:
    reply = await admin(sidecar, "/dlq/export")
    assert {"sidecar-export.json": b'{"entries":0,"damaged":[]}'} == members(reply.body)
    assert None is sidecar.proxy.kept.durable


async def test_an_export_that_breaks_off_has_no_end(sidecar: Running, upstream: Upstream) -> None:
    for number in range(3):
        await keep(sidecar, upstream, number)
    durable = await store(sidecar)
    files, calls = durable.files.files, 0

    async def failing(dlq_id: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Trouble("the disk cannot be read", "look at it")
        return await files(dlq_id)

    durable.files.files = failing  # type: ignore[method-assign]  # a disk that fails in the middle
    reply = await admin(sidecar, "/dlq/export")
    assert (200, False) == (reply.status, reply.complete)
    assert b"sidecar-export.json" not in reply.body
    assert "an export broke off: the disk cannot be read" in sidecar.logged.getvalue()


async def test_who_looks_is_in_the_audit_when_that_is_wanted(start_sidecar: Starter, upstream: Upstream) -> None:
    sidecar = await start_sidecar(admin={"port": 0, "audit_reads": True})
    dlq_id = await keep(sidecar, upstream)
    for path in ("/dlq", f"/dlq/{dlq_id}", "/dlq/export", "/jobs"):
        assert 200 == (await admin(sidecar, path)).status
    noted = (await admin(sidecar, "/audit")).json["items"]
    assert {"dead letters", f"dead letter {dlq_id}", "an export of dead letters", "jobs"} == {
        item["about"] for item in noted if item["what"] == "looked at"
    }


async def test_an_export_with_a_wrong_filter_is_refused_before_it_begins(sidecar: Running) -> None:
    reply = await admin(sidecar, "/dlq/export?verdict=save")
    assert (400, ["verdict"]) == (reply.status, at_fault(reply))


async def test_an_import_beyond_the_limit_is_refused(sidecar: Running) -> None:
    file = {"name": "x", "document": "A" * (33 * 1024 * 1024)}
    reply = await send(sidecar, "POST", "/dlq/import", {"files": [file]})
    assert (413, "PAYLOAD_TOO_LARGE") == (reply.status, reply.json["error_code"])
    assert None is sidecar.proxy.kept.durable

"""`sidecar dlq`, `jobs` and `keys` as a person runs them, against a running sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from telemetry.record import SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import DENIED, Moody, keep, send, store
from tests.doubles.upstream import Upstream
from tests.test_admin import admin
from tests.test_cli_admin import Ended, ask, on_terminal, run, started, terminal, url

UNANSWERED = {"code": "NETWORK_TIMEOUT", "phase": SENT}


@pytest.fixture
def mood() -> Moody:
    return Moody()


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter, mood: Moody) -> Upstream:
    return await start_upstream(mood)


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    payments = {"route": "/pay", "endpoints": [upstream.url], "policy": "once", "breaker": {"enabled": False}}
    return await start_sidecar(upstreams={"payments": {**payments, "replay": {"rate": 1000}}})


def told(ended: Ended) -> str:
    """What was said, in one line; it has to have gone well."""
    assert (0, "") == (ended.code, ended.err)
    return " ".join(ended.out.split())


# ---- list and show -----------------------------------------------------------------------------------------------


async def test_dead_letters_are_a_table_and_json(sidecar: Running, upstream: Upstream) -> None:
    assert "No dead letters are kept here.\n" == (await ask(sidecar, "dlq", "list")).out
    safe = await keep(sidecar, upstream, 1)
    unsafe = await keep(sidecar, upstream, 2, **UNANSWERED)
    listed = await run("dlq", "list", SIDECAR_ADMIN=url(sidecar))
    head, *rows = listed.out.splitlines()
    assert ["KEPT (UTC)", "ID", "UPSTREAM", "REQUEST", "ERROR CLASS", "VERDICT", "STATUS", "SEEN"] == re.split(
        r"  +", head
    )
    assert [[unsafe, "NETWORK_TIMEOUT", "unsafe"], [safe, "CONNECTION_REFUSED", "safe"]] == [
        [cells[1], cells[4], cells[5]] for cells in (re.split(r"  +", row) for row in rows)
    ]
    assert "canary" not in listed.out
    assert safe not in (await ask(sidecar, "dlq", "list", "--verdict", "unsafe,stale")).out
    assert "No such dead letters.\n" == (await ask(sidecar, "dlq", "list", "--status", "failed")).out
    as_json = json.loads((await ask(sidecar, "dlq", "list", "--json", "--limit", "1")).out)
    assert [unsafe] == [item["dlq_id"] for item in as_json["items"]]
    assert as_json["next_cursor"] is not None
    assert 2 == as_json["total"]
    assert "1 of 2; --limit 2 shows all.\n" == (await ask(sidecar, "dlq", "list", "--limit", "1")).err
    assert unsafe in (await ask(sidecar, "dlq", "list", "--code", "NETWORK_TIMEOUT")).out
    for part in (unsafe[-8:], unsafe[-5:]):
        assert unsafe == json.loads((await ask(sidecar, "dlq", "show", part, "--json")).out)["dlq_id"]


async def test_to_have_nothing_to_send_again_is_no_failure(sidecar: Running) -> None:
    for arguments in (["replay", "--all", "--yes"], ["replays"], ["replays", "--since", "1h"], ["list"]):
        assert 0 == (await ask(sidecar, "dlq", *arguments)).code, arguments
    for arguments in (["jobs"], ["jobs", "--since", "1h", "--status", "failed"]):
        assert 0 == (await ask(sidecar, *arguments)).code, arguments


async def test_a_wrong_filter_is_wrong_use_and_names_the_nearest(sidecar: Running) -> None:
    ended = await ask(sidecar, "dlq", "list", "--status", "pendin")
    assert (2, "") == (ended.code, ended.out)
    assert "status: 'pendin' is not one of pending" in ended.err
    assert 'did you mean "pending"?' in ended.err


async def test_one_is_told_with_why_and_with_what_to_do_next(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, 1, **DENIED)
    shown = told(await ask(sidecar, "dlq", "show", dlq_id))
    for words in [
        f"POST {upstream.url}/v1/charges?order=1&token=REDACTED id {dlq_id}",
        "status pending, in triage",
        "verdict safe: the upstream refused it without executing it (INVALID_API_KEY)",
        "failed INVALID_API_KEY (CRITICAL): no answer within 30 s",
        "upstream payments at 127.0.0.1:",
        "headers content-type: application/json; sealed: authorization, x-kind",
        "next not replayed as it is: INVALID_API_KEY needs evidence of what was fixed",
        f"sidecar dlq annotate {dlq_id} --kind {{transient,data,auth_config,code_defect}} --evidence TEXT",
        f"sidecar dlq discard {dlq_id} --reason TEXT",
    ]:
        assert words in shown
    assert "canary" not in shown
    assert dlq_id == json.loads((await ask(sidecar, "dlq", "show", dlq_id, "--json")).out)["dlq_id"]
    unknown = await ask(sidecar, "dlq", "show", "dlq_x/../y")
    assert (1, "") == (unknown.code, unknown.out)
    assert "there is no dead letter 'dlq_x/../y'; list them with `sidecar dlq list`" in unknown.err


# ---- the operator's way ------------------------------------------------------------------------------------------


async def test_from_remediation_over_replay_to_closed(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, **DENIED)
    early = await ask(sidecar, "dlq", "replay", dlq_id)
    assert (1, 0) == (early.code, len(upstream.requests))
    assert "needs evidence of what was fixed" in early.err
    assert f"sidecar dlq annotate {dlq_id} --kind" in early.err
    fixed = await ask(
        *(sidecar, "dlq", "annotate", dlq_id, "--kind", "auth_config", "--evidence", "key rotated"),
        *("--ticket", "OPS-1", "--note", "asked the provider"),
    )
    assert "remediation auth_config (OPS-1): key rotated, by local" in told(fixed)
    dry = told(await ask(sidecar, "dlq", "replay", dlq_id, "--dry-run"))
    assert dry.endswith("It would be sent.")
    assert "in validated" in told(await ask(sidecar, "dlq", "annotate", dlq_id, "--state", "validated"))
    done = told(await ask(sidecar, "dlq", "replay", dlq_id))
    assert f"{dlq_id} succeeded at 20" in done
    assert f"then sidecar dlq annotate {dlq_id} --state verified --note TEXT" in done
    again = await ask(sidecar, "dlq", "replay", dlq_id)
    assert (1, 1) == (again.code, len(upstream.requests))
    assert "it already succeeded at 20" in again.err
    assert "in verified" in told(await ask(sidecar, "dlq", "annotate", dlq_id, "--state", "verified"))
    closed = await ask(sidecar, "dlq", "annotate", dlq_id, "--state", "closed", "--note", "told the customer")
    assert "status completed, in closed" in told(closed)


async def test_a_replay_that_fails_is_exit_code_one_with_the_next_step(
    sidecar: Running, upstream: Upstream, mood: Moody
) -> None:
    dlq_id = await keep(sidecar, upstream)
    mood.status = "503 Busy"
    ended = await ask(sidecar, "dlq", "replay", dlq_id)
    assert 1 == ended.code
    assert f"{dlq_id} failed again and stays pending (TEMPORARY_UNAVAILABLE" in ended.out
    assert f"sidecar dlq replay {dlq_id} --force --reason TEXT" in ended.out
    mood.status = "200 OK"
    forced = await ask(sidecar, "dlq", "replay", dlq_id, "--force", "--reason", "not executed", "--json")
    assert (0, "completed") == (forced.code, json.loads(forced.out)["outcome"])


async def test_a_request_is_corrected_before_it_is_sent_again(
    sidecar: Running, upstream: Upstream, tmp_path: Path
) -> None:
    dlq_id = await keep(sidecar, upstream)
    body = tmp_path / "body.json"
    body.write_bytes(b'{"amount": 1}\xff')
    edited = await ask(
        *(sidecar, "dlq", "edit", dlq_id, "--url", f"{upstream.url}/v2/charges", "--header", "X-Kind: b"),
        *("--drop-header", "Content-Type", "--body", str(body), "--note", "v2"),
    )
    assert "edited yes; the original is kept" in told(edited)
    assert 0 == (await ask(sidecar, "dlq", "replay", dlq_id)).code
    head = upstream.requests[0].lower()
    assert head.startswith(b"post /v2/charges http/1.1")
    assert b"x-kind: b" in head
    assert b"content-type" not in head
    assert b"authorization: bearer canary-credential" in head
    assert body.read_bytes() == upstream.bodies[0]


async def test_discarding_needs_a_reason(sidecar: Running, upstream: Upstream) -> None:
    ids = [await keep(sidecar, upstream, number) for number in range(2)]
    assert 2 == (await ask(sidecar, "dlq", "discard", *ids)).code
    done = await ask(sidecar, "dlq", "discard", *ids, "--reason", "duplicates")
    assert 2 == told(done).count("is discarded: it stays to be looked at and is never sent.")
    assert 2 == len((await admin(sidecar, "/dlq?status=discarded")).json["items"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["annotate", "x"], "say what to note"),
        (["annotate", "x", "--kind", "data"], "needs both --kind and --evidence"),
        (["annotate", "x", "--ticket", "1"], "needs both --kind and --evidence"),
        (["annotate", "x", "--kind", "dat", "--evidence", "e"], "invalid choice: 'dat'"),
        (["edit", "x"], "say what to correct"),
        (["edit", "x", "--header", "nothing"], "write it as NAME: VALUE"),
        (["edit", "x", "--body", "/nonexistent"], "cannot be read: No such file"),
        (["replay"], "say which: an ID, a filter as in --upstream NAME, or --all"),
        (["replay", "x", "--all"], "either one ID or a filter"),
        (["replay", "--all", "--force"], "--force needs --reason"),
        (["replay", "--all", "--rate", "fast"], "invalid float value"),
        (["replay", "--all", "--rate", "0"], "rate: must be greater than 0"),
        (["replay", "--limit", "0", "--all"], "is not a number from 1 up"),
        (["import", "/nonexistent"], "has no files {operation}/{dlq_id}.json"),
        (["lst"], "invalid choice: 'lst'"),
    ],
)
async def test_wrong_use_is_exit_code_two(sidecar: Running, arguments: list[str], words: str) -> None:
    ended = await ask(sidecar, "dlq", *arguments)
    assert (2, "") == (ended.code, ended.out)
    assert words in ended.err


async def test_without_a_sidecar_every_command_says_so(tmp_path: Path) -> None:
    for arguments in (["dlq", "list"], ["dlq", "export", str(tmp_path / "out")], ["jobs"], ["keys", "rotate"]):
        ended = await run(*arguments, "--admin", "http://127.0.0.1:1")
        assert (1, "") == (ended.code, ended.out)
        assert "no sidecar answers at http://127.0.0.1:1 (--admin): Connection refused" in ended.err
    assert not (tmp_path / "out").exists()


# ---- many --------------------------------------------------------------------------------------------------------


async def test_many_are_shown_before_they_are_sent_and_nobody_asked_means_no(
    sidecar: Running, upstream: Upstream
) -> None:
    for number in range(5):
        await keep(sidecar, upstream, number)
    await keep(sidecar, upstream, 9, **UNANSWERED)
    dry = told(await ask(sidecar, "dlq", "replay", "--upstream", "payments", "--dry-run"))
    assert dry.startswith("6 waiting entries fit: 5 safe, 1 unsafe. 5 would go out. It pauses after 10 failures")
    silent = await run("dlq", "replay", "--all", SIDECAR_ADMIN=url(sidecar))
    assert (2, 0) == (silent.code, len(upstream.requests))
    assert "nothing was sent: nobody is there to ask, so say --yes" in silent.err
    done = await run("dlq", "replay", "--all", "--yes", "--reason", "they are back", SIDECAR_ADMIN=url(sidecar))
    assert (0, "", 5) == (done.code, done.err, len(upstream.requests))
    assert re.search(r"rpl_\w+ is done: 5 completed\.", done.out)
    assert "5 completed" in (await ask(sidecar, "dlq", "replays")).out
    nothing = await ask(sidecar, "dlq", "replay", "--all", "--yes")
    assert 1 == nothing.code
    assert "nothing would be sent, so nothing was started" in nothing.err


async def test_a_replay_that_paused_is_exit_code_one_and_can_be_resumed(
    sidecar: Running, upstream: Upstream, mood: Moody
) -> None:
    for number in range(4):
        await keep(sidecar, upstream, number)
    mood.next = ["503 Busy"]
    paused = await ask(sidecar, "dlq", "replay", "--all", "--yes")
    assert 1 == paused.code
    assert "is paused (the first replay failed; look at it, then resume or cancel): 1 failed." in paused.out
    (job_id,) = re.findall(r"(rpl_\w+) resume\|cancel", paused.out)
    assert f"{job_id} is running" in told(await ask(sidecar, "dlq", "replays", job_id, "resume"))
    followed = await ask(sidecar, "dlq", "replays", job_id)
    assert (1, True) == (followed.code, "is done: 1 failed, 3 completed." in followed.out)
    late = await ask(sidecar, "dlq", "replays", job_id, "cancel")
    assert 1 == late.code
    assert "there is nothing left to cancel" in late.err
    listed = json.loads((await ask(sidecar, "dlq", "replays", "--json")).out)
    assert [job_id] == [item["job_id"] for item in listed["items"]]


async def answered_on_terminal(reply: bytes, *arguments: str, **environ: str) -> tuple[int, str]:
    """A command with all three streams on a terminal, and a person who answers its question."""
    with terminal(100) as (master, slave):
        process = await started(*arguments, stdin=slave, stdout=slave, stderr=slave, environ=environ)
        os.close(slave)
        shown, answered = b"", False
        with contextlib.suppress(OSError):  # how the end of a terminal is told
            while data := await asyncio.to_thread(os.read, master, 65_536):
                shown += data
                if b"[y/N]" in shown and not answered:
                    answered = True
                    os.write(master, reply)
        code = await asyncio.wait_for(process.wait(), 20)
    return code, shown.decode()


async def test_on_a_terminal_it_asks_and_shows_how_far_it_is(sidecar: Running, upstream: Upstream) -> None:
    for number in range(3):
        await keep(sidecar, upstream, number)
    code, shown = await answered_on_terminal(b"\n", "dlq", "replay", "--all", SIDECAR_ADMIN=url(sidecar))
    assert (1, 0) == (code, len(upstream.requests))
    assert "Replay 3 of them? [y/N]" in shown
    assert "nothing was sent" in shown
    asked = ("dlq", "replay", "--all", "--rate", "2")
    code, shown = await answered_on_terminal(b"y\n", *asked, SIDECAR_ADMIN=url(sidecar))
    assert (0, 3) == (code, len(upstream.requests)), shown
    assert re.search(r"\r\[█*·+\] \d of 3 ", shown)
    assert "is done: 3 completed." in shown


async def test_verdicts_have_colours_on_a_terminal_and_lines_fit(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream)
    shown = await on_terminal(90, "dlq", "list", SIDECAR_ADMIN=url(sidecar))
    assert "\x1b[32msafe\x1b[0m" in shown
    assert dlq_id[-8:] in shown
    assert 90 >= max(map(len, re.sub(r"\x1b\[\d*m", "", shown).splitlines()))
    one = await on_terminal(60, "dlq", "show", dlq_id, SIDECAR_ADMIN=url(sidecar))
    assert "\x1b[2mverdict      \x1b[0msafe: nothing was sent" in one


# ---- files -------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


async def test_an_export_is_imported_again_to_the_byte(
    sidecar: Running, upstream: Upstream, tmp_path: Path, start_sidecar: Starter
) -> None:
    small = await keep(sidecar, upstream, 1)
    large = await keep(sidecar, upstream, 2, body=b"canary" * 100_000, operation="send_mail")
    out, again = tmp_path / "out", tmp_path / "again"
    done = await run("dlq", "export", str(out), SIDECAR_ADMIN=url(sidecar))
    assert (0, "") == (done.code, done.err)
    assert f"2 dead letters in {out}; secrets are sealed with the keys of this sidecar.\n" == done.out
    files = content(out)
    assert {f"create_charge/{small}.json", f"send_mail/{large}.json", f"send_mail/{large}.body"} == set(files)
    assert all(b"canary" not in data for data in files.values())
    assert {0o600} == {stat.S_IMODE((out / name).stat().st_mode) for name in files}
    known = await ask(sidecar, "dlq", "import", str(out))
    assert "0 dead letters added, 2 were there already." == told(known)

    source, target = Path(sidecar.settings.state_dir), tmp_path / "other"
    (target / "keys").mkdir(parents=True)
    for key in (source / "keys").iterdir():
        (target / "keys" / key.name).write_bytes(key.read_bytes())
    other = await start_sidecar(state_dir=str(target))
    assert "2 dead letters added, 0 were there already." == told(await ask(other, "dlq", "import", str(out)))
    as_json = json.loads((await ask(other, "dlq", "export", str(again), "--json")).out)
    assert {"folder": str(again), "entries": 2, "damaged": []} == as_json
    assert files == content(again)


async def test_of_many_files_refused_the_first_are_told(sidecar: Running, upstream: Upstream, tmp_path: Path) -> None:
    dlq_id = await keep(sidecar, upstream)
    out = tmp_path / "out"
    assert 0 == (await ask(sidecar, "dlq", "export", str(out))).code
    whole = out / "create_charge" / f"{dlq_id}.json"
    for number in range(25):
        whole.with_name(f"dlq_20260129_120000_{number:08d}.json").write_bytes(whole.read_bytes()[:200])
    ended = await ask(sidecar, "dlq", "import", str(out))
    assert (1, 21) == (ended.code, len(ended.err.splitlines()))
    assert "sidecar dlq: refused: 5 more; --json tells of each" == ended.err.splitlines()[-1]
    assert 25 == len(json.loads((await ask(sidecar, "dlq", "import", str(out), "--json")).out)["refused"])


async def test_files_that_were_cut_or_edited_are_refused_by_line_and_the_rest_goes_in(
    sidecar: Running, upstream: Upstream, tmp_path: Path
) -> None:
    ids = [await keep(sidecar, upstream, number) for number in range(3)]
    out = tmp_path / "out"
    assert 0 == (await ask(sidecar, "dlq", "export", str(out), "--status", "pending")).code
    cut, edited, _ = (out / "create_charge" / f"{dlq_id}.json" for dlq_id in sorted(ids))
    cut.write_bytes(cut.read_bytes()[:200])
    edited.write_bytes(edited.read_bytes().replace(b'"method":"POST"', b'"method":"PUT"'))
    ended = await ask(sidecar, "dlq", "import", str(out))
    assert (1, "0 dead letters added, 1 were there already.\n") == (ended.code, ended.out)
    first, second = ended.err.splitlines()
    assert re.fullmatch(rf"sidecar dlq: refused: {cut}:\d+: is cut off here.*export it again", first)
    assert re.fullmatch(rf"sidecar dlq: refused: {edited}:4: was changed since it was written; export it again", second)


async def test_what_is_damaged_on_disk_is_named_by_an_export(
    sidecar: Running, upstream: Upstream, tmp_path: Path
) -> None:
    dlq_id = await keep(sidecar, upstream, 1, body=b"x" * 400_000)
    await keep(sidecar, upstream, 2)
    durable = await store(sidecar)
    request = await durable.letters.request(dlq_id)
    os.unlink(durable.letters.bodies.folder / str(request.body_file))
    ended = await ask(sidecar, "dlq", "export", str(tmp_path / "out"))
    assert (1, f"sidecar dlq: {dlq_id} is damaged on disk and was left out\n") == (ended.code, ended.err)
    assert 1 == len(content(tmp_path / "out"))


async def test_an_export_that_breaks_off_is_not_taken_for_whole(
    start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    async def cut_off(talk: Any) -> None:
        await talk.read_request()
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n\r\n"
        await talk.send(f"{head}200\r\n{'x' * 100}".encode())

    async def strange(talk: Any) -> None:
        await talk.read_request()
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("../escape/dlq_20270115_080000_ffffffff.json"))
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/x-tar\r\nContent-Length: {len(data.getvalue())}\r\n\r\n"
        await talk.send(head.encode() + data.getvalue())

    for script in (cut_off, strange):
        liar = await start_upstream(script)
        ended = await run("dlq", "export", str(tmp_path / "out"), "--admin", liar.url)
        assert (1, "") == (ended.code, ended.out)
        assert "the export broke off after 0 dead letters" in ended.err
    assert not (tmp_path / "escape").exists()


# ---- jobs and keys -----------------------------------------------------------------------------------------------


async def test_jobs_are_listed_shown_and_resolved(sidecar: Running, upstream: Upstream) -> None:
    assert "No jobs: nothing has been handed in.\n" == (await ask(sidecar, "jobs")).out
    durable = await store(sidecar)
    delivery = {"recipient": "ann@mail.test", "request": {"url": f"{upstream.url}/x", "body": "hello"}}
    given = {"idempotency_key": "k", "subject": "order 7", "deliveries": [delivery]}
    job = (await send(sidecar, "POST", "/jobs", given)).json
    async with asyncio.timeout(20):
        while (await admin(sidecar, f"/jobs/{job['job_id']}")).json["state"] != "succeeded":
            await asyncio.sleep(0.02)
    assert "succeeded" in (await ask(sidecar, "jobs", "--state", "succeeded")).out
    statement = "UPDATE deliveries SET state = 'unknown', notified_at = NULL"
    await durable.store.write(lambda connection: connection.execute(statement) and None)
    number = job["deliveries"][0]["delivery_id"]
    shown = await ask(sidecar, "jobs", "show", job["job_id"])
    assert f"sidecar jobs resolve {job['job_id']} {number} --delivered|--not-delivered --reason TEXT" in shown.out
    assert "ann@mail.test" in shown.out
    resolve = ("jobs", "resolve", job["job_id"], str(number))
    assert 2 == (await ask(sidecar, *resolve, "--reason", "x")).code
    another = await ask(sidecar, *resolve[:3], "99", "--delivered", "--reason", "x")
    assert (1, True) == (another.code, f"`sidecar jobs show {job['job_id']}` tells theirs" in another.err)
    done = await ask(sidecar, *resolve[:3], "--delivered", "--notification-id", "m7", "--reason", "in their list")
    assert "m7" in told(done)
    again = await ask(sidecar, *resolve[:3], "--delivered", "--reason", "x")
    assert (1, True) == (again.code, f"say which delivery of {job['job_id']}: {number} is sent" in again.err)
    listed = json.loads((await ask(sidecar, "jobs", "list", "--json", "--limit", "1")).out)
    assert [job["job_id"]] == [item["job_id"] for item in listed["items"]]
    assert 1 == (await ask(sidecar, "jobs", "show", "job_x")).code


async def test_keys_are_rotated_and_everything_is_sealed_anew(sidecar: Running, upstream: Upstream) -> None:
    assert "No keys yet" in (await ask(sidecar, "keys")).out
    early = await ask(sidecar, "keys", "rotate")
    assert (1, "") == (early.code, early.out)
    dlq_id = await keep(sidecar, upstream)
    before = (await ask(sidecar, "keys")).out
    rotated = told(await ask(sidecar, "keys", "rotate", "--reason", "every quarter"))
    assert re.fullmatch(r"Key \w{8} seals\. Sealing anew: done, \d+ values and 0 files\.", rotated)
    assert before.split()[1] != rotated.split()[1]
    assert "completed" == (await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})).json["outcome"]


# ---- from the app to the operator and back -----------------------------------------------------------------------


async def test_what_an_app_lost_is_found_fixed_and_sent_again_once(
    sidecar: Running, upstream: Upstream, mood: Moody
) -> None:
    mood.status = "401 Unauthorized"
    app = await sidecar.app()
    lost = await app.ask(
        "POST /pay/v1/charges?token=canary HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer canary-credential\r\n"
        'Content-Type: application/json\r\nContent-Length: 13\r\n\r\n{"amount": 7}'
    )
    assert 401 == lost.status
    dlq_id = lost.get("x-sidecar-dlq-id") or ""
    listed = await ask(sidecar, "dlq", "list", "--status", "pending")
    assert dlq_id in listed.out
    shown = told(await ask(sidecar, "dlq", "show", dlq_id))
    assert "failed INVALID_API_KEY (CRITICAL)" in shown
    assert "canary" not in listed.out + shown
    refused = await ask(sidecar, "dlq", "replay", dlq_id)
    assert (1, 1) == (refused.code, len(upstream.requests))
    assert "needs evidence of what was fixed" in refused.err
    mood.status = "200 OK"
    fixed = ("--kind", "auth_config", "--evidence", "the key is good again")
    assert 0 == (await ask(sidecar, "dlq", "annotate", dlq_id, *fixed)).code
    assert "It would be sent." in told(await ask(sidecar, "dlq", "replay", dlq_id, "--dry-run"))
    assert f"{dlq_id} succeeded at" in told(await ask(sidecar, "dlq", "replay", dlq_id))
    assert b"authorization: bearer canary-credential" in upstream.requests[1].lower()
    assert b'{"amount": 7}' == upstream.bodies[1]
    again = await ask(sidecar, "dlq", "replay", dlq_id)
    assert (1, 2) == (again.code, len(upstream.requests))
    assert "it already succeeded at" in again.err
    assert "No such dead letters." in (await ask(sidecar, "dlq", "list", "--status", "pending")).out
    assert "canary" not in sidecar.logged.getvalue()

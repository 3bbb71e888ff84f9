"""The commands that ask a running sidecar, as a person runs them: real processes, a real sidecar, a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import pwd
import re
import signal
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from config.model import Settings
from sidecar import __version__
from sidecar.__main__ import main
from sidecar.cli.admin import find_address
from sidecar.cli.parser import parser
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.records import exhausted, recovered, session
from tests.doubles.upstream import Talk, Upstream, always, answer
from tests.test_admin import admin

REPOSITORY = Path(__file__).resolve().parent.parent
NOWHERE = {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}
Captured = pytest.CaptureFixture[str]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    dropped = ("SIDECAR", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**clean, **NOWHERE, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "USER": "ops", **more}


async def started(*arguments: str, environ: dict[str, str] | None = None, **streams: Any) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", *arguments),
        **{"stdout": pipe, "stderr": pipe, **streams},
        env=environment(**(environ or {})),
    )


async def run(*arguments: str, **environ: str) -> Ended:
    process = await started(*arguments, environ=environ)
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert b"Traceback" not in err, err.decode()
    return Ended(process.returncode or 0, out.decode(), err.decode())


def url(sidecar: Running) -> str:
    return f"http://127.0.0.1:{sidecar.admin_address[1]}"


async def ask(sidecar: Running, *arguments: str, **environ: str) -> Ended:
    return await here(*arguments, SIDECAR_ADMIN=url(sidecar), **environ)


async def here(*arguments: str, **environ: str) -> Ended:
    """The same in this process, in a thread: for the many cases where only the words differ."""
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, environment(**environ), clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            code = await asyncio.to_thread(main, list(arguments))
        except SystemExit as wrong_use:
            code = int(wrong_use.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


async def fails_twice(talk: Talk) -> None:
    """503 and a closed connection, 502, then 200."""
    while True:
        await talk.read_request()
        number = len(talk.upstream.requests)
        if number == 1:
            return await talk.send(answer(b"", "503 Busy", "Connection: close"))
        await talk.send(answer(b"", "502 Bad Gateway") if number == 2 else answer())


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter) -> Upstream:
    return await start_upstream(fails_twice)


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    pay = {"route": "/pay", "endpoints": [upstream.url], "policy": "steady"}
    steady = {"max_attempts": 3, "base_delay": 0.02, "jitter_type": "none"}
    return await start_sidecar(upstreams={"payments": pay}, policies={"steady": steady})


async def get(sidecar: Running, path: str) -> str:
    reply = await (await sidecar.app()).ask(f"GET {path} HTTP/1.1\r\nHost: s\r\n\r\n")
    return reply.get("x-sidecar-session") or ""


def keep(sidecar: Running, count: int, **facts: Any) -> list[str]:
    """Sessions as if there had been traffic; their ids, newest first."""
    ids = [f"{number:024x}" for number in range(count)]
    for session_id in ids:
        session = recovered(session_id=session_id.encode(), at=sidecar.proxy.loop.time(), **facts)
        sidecar.proxy.signals.observe(session)
    return ids[::-1]


# ---- explain -----------------------------------------------------------------------------------------------------

STORY = """\
GET to payments recovered after 3 attempts, TIME (200)
DAY CLOCK to CLOCK UTC, session ID

TIME  GET /pay/charges?token=REDACTED arrived for upstream payments, under policy steady.
TIME  Attempt 1 to 127.0.0.1:PORT was answered with 503 after TIME: TEMPORARY_UNAVAILABLE.
TIME  Retried after 20 ms: TEMPORARY_UNAVAILABLE is worth a retry, and the request may be sent again (GET is idempotent).
            decided by: policies.steady: attempt 2 of 3
TIME  Attempt 2 to 127.0.0.1:PORT was answered with 502 after TIME: BAD_GATEWAY.
TIME  Retried after 40 ms: BAD_GATEWAY is worth a retry, and the request may be sent again (GET is idempotent).
            decided by: policies.steady: attempt 3 of 3
TIME  Attempt 3 to 127.0.0.1:PORT on a kept-alive connection was answered with 200 after TIME.
TIME  The app got 200 and saw nothing of the 2 failures.
"""


def without_chance(text: str, port: int) -> str:
    """What differs from run to run, replaced: times that were measured, and the port."""
    text = text.replace(f":{port}", ":PORT")
    text = re.sub(r"^\d{4}-\d\d-\d\d ", "DAY ", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d\d:\d\d:\d\d\.\d{3}\b", "CLOCK", text)
    text = re.sub(r"session [0-9a-f]{24}$", "session ID", text, flags=re.MULTILINE)
    text = re.sub(r"^ *\+[\d.]+ m?s", "TIME", text, flags=re.MULTILINE)
    return re.sub(r"(?<=after )(?!20 ms|40 ms)[\d.]+ m?s|(?<=attempts, )[\d.]+ m?s", "TIME", text)


async def test_a_request_that_failed_twice_is_explained_step_by_step(sidecar: Running, upstream: Upstream) -> None:
    session_id = await get(sidecar, "/pay/charges?token=verysecret")
    ended = await run("explain", session_id, "--admin", url(sidecar))
    assert (0, "") == (ended.code, ended.err)
    assert STORY.splitlines() == without_chance(ended.out, upstream.port).splitlines()


async def test_an_explanation_fits_the_width_and_says_the_same(sidecar: Running) -> None:
    session_id = await get(sidecar, "/pay/charges")
    wide, narrow = await ask(sidecar, "explain", session_id), await ask(sidecar, "explain", session_id, COLUMNS="60")
    assert wide.out.split() == narrow.out.split()
    assert 60 >= max(map(len, narrow.out.splitlines()))
    assert max(map(len, wide.out.splitlines())) > 100


async def test_an_explanation_is_json_for_programs(sidecar: Running) -> None:
    session_id = await get(sidecar, "/pay/charges")
    told = json.loads((await ask(sidecar, "explain", session_id, "--json")).out)
    assert (await admin(sidecar, f"/sessions/{session_id}")).json == told
    assert 7 == len(told["explanation"])


async def test_a_session_that_is_not_known_is_a_failure_that_says_which_are(sidecar: Running) -> None:
    ended = await ask(sidecar, "explain", "../../config?x")
    assert (1, "") == (ended.code, ended.out)
    assert "sidecar explain: session '../../config?x' is not known" in ended.err


# ---- sessions ----------------------------------------------------------------------------------------------------


async def test_sessions_are_a_table(sidecar: Running) -> None:
    session_id = await get(sidecar, "/pay/charges")
    await get(sidecar, "/nowhere")
    ended = await run("sessions", "--admin", url(sidecar))
    head, denied, saved = ended.out.splitlines()
    assert ["SESSION", "UPSTREAM", "REQUEST", "OUTCOME", "RESULT", "TRIES", "TOOK"] == head.split()[2:]
    assert [session_id, "payments", "GET", "/pay/charges", "recovered", "200", "3"] == saved.split()[2:9]
    assert ["_none", "GET", "/nowhere", "denied", "NO_ROUTE", "0"] == denied.split()[3:9]
    assert (0, "2 in all.\n", "\x1b") == (ended.code, ended.err, "\x1b" if "\x1b" not in ended.out else "")


async def test_sessions_can_be_filtered_and_limited(sidecar: Running) -> None:
    kept = keep(sidecar, 5)
    sidecar.proxy.signals.observe(exhausted(session_id=b"ff", upstream="other", at=sidecar.proxy.loop.time()))
    listed = await ask(
        sidecar, "sessions", "--outcome", "recovered", "--upstream", "payments", "--limit", "2", "--json"
    )
    answer = json.loads(listed.out)
    assert kept[:2] == [one["session_id"] for one in answer["items"]]
    assert answer["next_cursor"]
    listed = await ask(sidecar, "sessions", "--code", "CONNECTION_REFUSED", "--since", "1h", "--json")
    assert ["ff"] == [one["session_id"] for one in json.loads(listed.out)["items"]]
    table = await ask(sidecar, "sessions", "--limit", "2")
    assert "2 of 6; --limit 6 shows all.\n" == table.err
    nothing = await ask(sidecar, "sessions", "--upstream", "payments", "--error-class", "DNS_FAILURE")
    assert (0, True) == (nothing.code, nothing.out.startswith("No such sessions."))
    for command in (["sessions"], ["dlq", "list"], ["breakers", "reset"]):
        given = ["paiments"] if command[0] == "breakers" else ["--upstream", "paiments"]
        mistaken = await ask(sidecar, *command, *given)
        assert (2, True) == (mistaken.code, 'did you mean "payments"?' in mistaken.err), command


async def test_a_part_of_an_id_is_enough_where_it_can_mean_one_only(sidecar: Running) -> None:
    whole = await get(sidecar, "/pay/charges")
    other = await get(sidecar, "/nowhere")
    assert whole[:4] != other[:4]
    for part in (whole, whole[:6]):
        assert whole == json.loads((await ask(sidecar, "explain", part, "--json")).out)["session_id"]
    many = await ask(sidecar, "explain", whole[-6:])  # what all sessions of a process share
    assert (1, True, True) == (many.code, whole in many.err, other in many.err)
    short = await ask(sidecar, "explain", whole[:3])
    assert (1, True) == (short.code, "is not known" in short.err)


async def test_a_request_is_found_by_being_the_last_or_by_its_trace(sidecar: Running) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    first = keep(sidecar, 1)[0]
    for path in ("/nowhere/a", "/nowhere/b"):
        field = f"traceparent: 00-{trace}-b7ad6b7169203331-01"
        await (await sidecar.app()).ask(f"GET {path} HTTP/1.1\r\nHost: s\r\n{field}\r\n\r\n")
    last = (await ask(sidecar, "explain", "--last")).out
    assert "GET /nowhere/b arrived" in last
    assert f", trace {trace}" in last.splitlines()[1]
    for given in (trace, f"00-{trace.upper()}-b7ad6b7169203331-01"):
        told = (await ask(sidecar, "explain", "--trace", given)).out
        assert told.index("/nowhere/a arrived") < told.index("/nowhere/b arrived")
    assert trace == json.loads((await ask(sidecar, "explain", "--trace", trace, "--json")).out)["items"][0]["trace_id"]
    for arguments, code in (
        ([], 2),
        ([first, "--last"], 2),
        ([first, "--upstream", "payments"], 2),
        (["--trace", "12"], 2),
        (["--trace", "f" * 32], 1),
        (["--last", "--upstream", "paiments"], 2),
    ):
        ended = await ask(sidecar, "explain", *arguments)
        assert (code, "") == (ended.code, ended.out), arguments


async def test_the_last_request_may_be_one_that_an_open_breaker_has_refused_again(sidecar: Running) -> None:
    def refuse(session_id: bytes) -> None:
        now = sidecar.proxy.loop.time()
        made = session("breaker_open", status=503, session_id=session_id, code="CIRCUIT_OPEN", upstream="other", at=now)
        sidecar.proxy.signals.observe(made)

    async def last(*arguments: str) -> str:
        return str(json.loads((await ask(sidecar, "explain", "--last", *arguments, "--json")).out)["session_id"])

    refuse(b"aa")
    await asyncio.sleep(0.005)
    denied = await get(sidecar, "/nowhere")
    assert denied == await last()
    await asyncio.sleep(0.005)
    refuse(b"bb")
    assert ("bb", "bb", denied) == (await last(), await last("--upstream", "other"), await last("--upstream", "_none"))


@pytest.mark.parametrize(
    ("given", "command"),
    [("job_718832c9ec4a0a0a", "jobs show"), ("dlq_20261118_213410_c5f12acc", "dlq show"), ("rpl_1a2b", "dlq replays")],
)
async def test_an_id_of_something_else_says_who_tells_its_story(sidecar: Running, given: str, command: str) -> None:
    ended = await ask(sidecar, "explain", given)
    assert (2, True) == (ended.code, f"`sidecar {command} ID`" in ended.err)


async def test_the_version_is_told_to_whoever_asks_as_is_the_custom(sidecar: Running) -> None:
    ended = await here("--version")
    assert (0, f"sidecar {__version__}\n") == (ended.code, ended.out)


async def test_more_than_a_page_is_read_to_the_end(sidecar: Running) -> None:
    kept = keep(sidecar, 1_200)
    listed = json.loads((await ask(sidecar, "sessions", "--limit", "1100", "--json")).out)
    assert kept[:1_100] == [one["session_id"] for one in listed["items"]]


async def test_a_table_fits_the_width_and_never_cuts_an_id(sidecar: Running) -> None:
    (session_id,) = keep(sidecar, 1, target="/pay/" + "long/" * 40)
    for width in [40, 60, 80, 100, 140, 400]:
        ended = await ask(sidecar, "sessions", COLUMNS=str(width))
        assert width >= max(map(len, ended.out.splitlines()))
        assert (session_id if width == 400 else session_id[:8]) in ended.out
        assert "recovered" in ended.out
    eighty = (await ask(sidecar, "sessions", COLUMNS="80")).out
    assert re.search(r"^\d\d:\d\d:\d\d  .*GET …\S*long/long/  recovered .* 401 ms$", eighty, re.MULTILINE)


async def test_a_url_cannot_command_the_terminal(sidecar: Running) -> None:
    keep(sidecar, 1, target="/pay/\x1b[2J\x07evil\nline", operation="pay\x1b]0;x\x07")
    ended = await ask(sidecar, "sessions")
    assert 2 == len(ended.out.splitlines())
    assert "\\x1b[2J" in ended.out
    assert not set("\x1b\x07") & set(ended.out)
    told = await ask(sidecar, "explain", "0" * 24)
    assert not set("\x1b\x07") & set(told.out)


async def test_following_shows_what_comes_each_once_until_it_is_interrupted(sidecar: Running) -> None:
    keep(sidecar, 2)
    process = await started("sessions", "--follow", "--json", environ={"SIDECAR_ADMIN": url(sidecar)})
    assert process.stdout is not None

    async def line() -> dict[str, Any]:
        return json.loads(await asyncio.wait_for(process.stdout.readline(), 10))

    assert [f"{0:024x}", f"{1:024x}"] == [(await line())["session_id"] for _ in range(2)]
    for session_id in (b"aa", b"bb"):
        sidecar.proxy.signals.observe(exhausted(session_id=session_id, at=sidecar.proxy.loop.time()))
    assert ["aa", "bb"] == [(await line())["session_id"] for _ in range(2)]
    process.send_signal(signal.SIGINT)
    rest, err = await asyncio.wait_for(process.communicate(), 10)
    assert (0, b"", b"") == (process.returncode, rest, err)


@pytest.mark.parametrize("options", [["--json"], []])
async def test_following_reads_on_page_by_page_however_much_came(
    sidecar: Running, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    keep(sidecar, 3)
    loop, waits = asyncio.get_running_loop(), iter(range(3))

    async def traffic(wait: int) -> None:
        for number in range(500 if wait else 1_500):
            session_id = b"s%dx%d" % (wait, number)
            sidecar.proxy.signals.observe(exhausted(session_id=session_id, at=sidecar.proxy.loop.time()))

    def sleep(seconds: float) -> None:
        """Traffic while the command waits; the third time it is interrupted."""
        if (wait := next(waits)) == 2:
            raise KeyboardInterrupt
        asyncio.run_coroutine_threadsafe(traffic(wait), loop).result(5)

    monkeypatch.setattr("sidecar.cli.sessions.sleep", sleep)
    ended = await ask(sidecar, "sessions", "--follow", "--limit", "2", *options)
    assert (0, "") == (ended.code, ended.err)
    came = [f"s0x{number}" for number in range(500, 1_500)]  # of a flood the last thousand
    came += [f"s1x{number}" for number in range(500)]
    shown = ended.out.splitlines()
    ids = [json.loads(line)["session_id"] if options else line.split()[2] for line in shown[not options :]]
    assert [f"{1:024x}", f"{2:024x}", *came] == ids  # the oldest of the three was beyond the limit, and is not new


async def test_following_a_table_that_is_still_empty_begins_with_its_head(sidecar: Running) -> None:
    process = await started("sessions", "-f", environ={"SIDECAR_ADMIN": url(sidecar), "COLUMNS": "100"})
    assert process.stdout is not None
    assert b"SESSION" in await asyncio.wait_for(process.stdout.readline(), 10)
    keep(sidecar, 1)
    assert b"  00000000  " in await asyncio.wait_for(process.stdout.readline(), 10)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 10)
    assert 0 == process.returncode


# ---- a terminal --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    try:
        yield master, slave
    finally:
        os.close(master)


async def on_terminal(columns: int, *arguments: str, **environ: str) -> str:
    with terminal(columns) as (master, slave):
        process = await started(*arguments, stdout=slave, environ=environ)
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # how the end of a terminal is told
            while data := await asyncio.to_thread(os.read, master, 65_536):
                shown += data
        await asyncio.wait_for(process.communicate(), 10)
    return shown.decode().replace("\r\n", "\n")


async def test_on_a_terminal_there_are_colours_and_lines_fit(sidecar: Running) -> None:
    (session_id,) = keep(sidecar, 1, target="/pay/a/rather/long/path/of/a/request")
    shown = await on_terminal(90, "sessions", SIDECAR_ADMIN=url(sidecar))
    assert "\x1b[32mrecovered\x1b[0m" in shown
    plain = re.sub(r"\x1b\[\d*m", "", shown)
    assert 90 >= max(map(len, plain.splitlines()))
    told = await on_terminal(70, "explain", session_id, SIDECAR_ADMIN=url(sidecar))
    assert "\x1b[2mdecided by:\x1b[0m" in told
    assert 70 >= max(map(len, re.sub(r"\x1b\[\d*m", "", told).splitlines()))
    asked = await ask(sidecar, "explain", session_id)
    assert asked.out.split() == re.sub(r"\x1b\[\d*m", "", told).split()


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_whoever_wants_no_colours_gets_none(sidecar: Running, environ: dict[str, str]) -> None:
    keep(sidecar, 1)
    assert "\x1b" not in await on_terminal(90, "sessions", SIDECAR_ADMIN=url(sidecar), **environ)


# ---- breakers ----------------------------------------------------------------------------------------------------


async def test_breakers_are_a_table_with_their_last_changes(sidecar: Running, upstream: Upstream) -> None:
    ended = await ask(sidecar, "breakers")
    head, row = ended.out.splitlines()
    assert ["UPSTREAM", "ENDPOINT", "STATE", "FAILED"] == head.split()[:4]
    assert ["payments", f"127.0.0.1:{upstream.port}", "closed", "0", "of", "0", "-", "-"] == row.split()
    await ask(sidecar, "breakers", "force-open", "payments", "--ttl", "10m", "--reason", "a deploy")
    shown = (await ask(sidecar, "breakers")).out
    assert "Last changes, newest first:" in shown
    assert shown.rstrip().endswith("closed → open, forced open: a deploy")
    assert 100 >= max(map(len, (await ask(sidecar, "breakers", COLUMNS="100")).out.splitlines()))


async def test_orders_to_breakers_are_followed(sidecar: Running, upstream: Upstream) -> None:
    endpoint = f"127.0.0.1:{upstream.port}"
    ended = await ask(sidecar, "breakers", "force-open", "payments", "--endpoint", endpoint, "--reason", "a deploy")
    assert (0, True) == (ended.code, ended.out.rstrip().endswith("open until reset: a deploy"))
    refused = await (await sidecar.app()).ask("GET /pay/x HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (503, []) == (refused.status, upstream.requests)
    ended = await ask(sidecar, "breakers", "force-close", "payments", "--ttl", "90s", "--json")
    assert ["closed"] == [one["forced"]["state"] for one in json.loads(ended.out)["items"]]
    ended = await ask(sidecar, "breakers", "--json", "reset", "payments")
    assert [None] == [one["forced"] for one in json.loads(ended.out)["items"]]
    user = pwd.getpwuid(os.getuid()).pw_name
    asked = f'"who":"local","user":"{user}","client":"127.0.0.1","user_agent":"sidecar-cli/{__version__}"'
    assert asked in sidecar.logged.getvalue()


async def test_an_order_that_cannot_be_followed_says_why(sidecar: Running) -> None:
    for arguments, code, words in [
        (["reset", "paiments"], 2, 'did you mean "payments"?'),
        (["reset", "payments", "--endpoint", "a:1"], 2, "no endpoint 'a:1'"),
        (["force-open", "payments", "--ttl", "soon"], 2, "ttl: is not a duration"),
        (["reset"], 2, "UPSTREAM"),
        (["reset", "payments", "--ttl", "1m"], 2, "--ttl"),
        (["opn", "payments"], 2, "invalid choice"),
    ]:
        ended = await ask(sidecar, "breakers", *arguments)
        assert (code, "") == (ended.code, ended.out)
        assert words in ended.err


async def test_without_endpoints_there_are_no_breakers_yet(start_sidecar: Starter) -> None:
    ended = await ask(await start_sidecar(), "breakers")
    assert (0, True) == (ended.code, ended.out.startswith("No breakers yet"))


async def test_more_breakers_than_a_page_holds_are_all_shown(start_sidecar: Starter) -> None:
    endpoints = [f"http://127.0.0.1:{port}" for port in range(1, 1_011)]
    sidecar = await start_sidecar(upstreams={"many": {"hosts": ["many.test"], "endpoints": endpoints}})
    listed = json.loads((await ask(sidecar, "breakers", "--json")).out)
    assert (1_010, None) == (len({one["endpoint"] for one in listed["items"]}), listed["next_cursor"])


# ---- where it is asked -------------------------------------------------------------------------------------------


async def test_the_address_is_taken_from_flag_variable_or_configuration_in_this_order(
    sidecar: Running, tmp_path: Path
) -> None:
    keep(sidecar, 1)
    port, file = sidecar.admin_address[1], tmp_path / "s.yaml"
    file.write_text(f"admin: {{port: {port}}}\n")
    wrong = {"SIDECAR_ADMIN": "127.0.0.1:1"}
    assert 0 == (await here("sessions", "--admin", f"127.0.0.1:{port}", **wrong)).code
    assert 0 == (await here("sessions", "--admin", f"http://localhost:{port}/", **wrong)).code
    assert 0 == (await here("sessions", "-c", str(file))).code
    assert 0 == (await here("sessions", SIDECAR_CONFIG=str(file))).code
    assert 0 == (await here("sessions", SIDECAR__ADMIN__PORT=str(port))).code
    assert 1 == (await here("sessions", "-c", str(file), **wrong)).code


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_when_no_sidecar_runs_it_says_where_it_looked_and_what_to_do(tmp_path: Path) -> None:
    port = unused_port()
    for command in (["sessions"], ["explain", "x"], ["breakers"], ["breakers", "reset", "u"]):
        ended = await (run if command == ["sessions"] else here)(*command, "--admin", f"127.0.0.1:{port}")
        assert (1, "") == (ended.code, ended.out)
        first, second = ended.err.splitlines()
        assert f"sidecar {command[0]}: no sidecar answers at http://127.0.0.1:{port} (--admin): " in first
        assert "refused" in first
        assert "Start one with `sidecar run`, or say where it is with --admin URL or SIDECAR_ADMIN." == second
    file = tmp_path / "s.yaml"
    file.write_text(f"admin: {{port: {port}}}\n")
    assert f"(admin in {file})" in (await here("sessions", "-c", str(file))).err
    assert "(the environment)" in (await here("sessions", SIDECAR__ADMIN__PORT=str(port))).err


async def test_an_answer_that_does_not_come_is_not_waited_for_without_end(
    start_upstream: UpstreamStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.cli.admin._PATIENCE", 0.05)

    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await asyncio.sleep(60)

    stuck = await start_upstream(silent)
    ended = await here("sessions", "--admin", f"127.0.0.1:{stuck.port}")
    assert (1, True) == (ended.code, "no answer within 0.05 s" in ended.err)


async def test_the_default_address_is_that_of_the_default_configuration() -> None:
    address = find_address(parser().parse_args(["sessions"]), {})
    assert (f"http://127.0.0.1:{Settings().admin.port}", "the default") == (address.url, address.named_by)
    assert "http://[::1]:99" == find_address(parser().parse_args(["sessions", "--admin", "[::1]:99"]), {}).url


async def test_another_program_or_the_proxys_own_port_is_not_taken_for_an_admin_port(
    sidecar: Running, start_upstream: UpstreamStarter
) -> None:
    proxy = await here("sessions", "--admin", f"127.0.0.1:{sidecar.address[1]}")
    assert (1, True) == (proxy.code, "is a sidecar's proxy port, not its admin port" in proxy.err)
    for reply in (
        answer(b"<html>", "200 OK", "Content-Type: text/html"),
        answer(b"{not json", "200 OK", "Content-Type: application/json"),
        answer(b"gone", "404 Not Found"),
        answer(b"[]", "500 No"),
        answer(b"{}", "200 OK", "Content-Type: application/json"),
        answer(b"[1]", "200 OK", "Content-Type: application/json"),
        b"SSH-2.0-OpenSSH\r\n",
    ):
        stranger = await start_upstream(always(reply))
        ended = await here("sessions", "--admin", f"127.0.0.1:{stranger.port}")
        assert (1, "") == (ended.code, ended.out)
        assert f"http://127.0.0.1:{stranger.port}" in ended.err
        assert "--admin URL or SIDECAR_ADMIN" in ended.err


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SIDECAR")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    "wrong", ["ftp://x", "http://", "http://a:b@c", "127.0.0.1:x", "127.0.0.1:99999", "http://h/p"]
)
def test_an_address_that_makes_no_sense_is_wrong_use(wrong: str, capsys: Captured) -> None:
    assert 2 == main(["sessions", "--admin", wrong])
    assert "--admin" in (said := capsys.readouterr().err)
    assert "http://127.0.0.1:4141" in said


@pytest.mark.usefixtures("_bare")
def test_a_configuration_that_cannot_be_used_is_told_with_the_way_around(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("admn: {}\n")
    assert 2 == main(["sessions", "-c", str(file)])
    said = capsys.readouterr().err
    assert "use --admin URL" in said
    assert f"{file}:1: admn" in said
    for wrong in ("admin: {port: x}\n", "admin:\n  port: [1\n", "{admin: {port: 1}, a: [}\n", "- admin\n"):
        file.write_text(wrong)
        assert 2 == main(["sessions", "-c", str(file)])
        assert "use --admin URL" in capsys.readouterr().err
    file.write_text("admin: {port: 0}\n")
    assert 2 == main(["sessions", "-c", str(file)])
    assert "any free one" in capsys.readouterr().err


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    "broken",
    [
        "admin: {port: PORT}\nupstreams: {a: {braker: {}}}\n",
        "listn: {}\nadmin:\n  port: PORT\n  # of the tests\n",
        "admin:\n  port: PORT\nupstreams:\n  a: [\n",
        'version: "2.0.0"\nadmin: {port: PORT}\n',
    ],
)
async def test_a_mistake_elsewhere_in_the_file_does_not_hide_the_sidecar_that_runs_on(
    broken: str, sidecar: Running, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(broken.replace("PORT", str(sidecar.admin_address[1])))
    assert (0, "Retries are on.\n") == (ended := await here("retries", "-c", str(file)))[:2], ended
    assert (0, "ready\n", "") == await here("health", "-c", str(file))


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize("limit", ["0", "-1", "10001", "x", "1.5"])
def test_a_limit_that_makes_no_sense_is_wrong_use(limit: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sessions", f"--limit={limit}"])
    assert 2 == ended.value.code
    assert "is not a number from 1 to 10000" in capsys.readouterr().err


async def test_a_filter_that_makes_no_sense_is_wrong_use_with_the_nearest_word(sidecar: Running) -> None:
    ended = await ask(sidecar, "sessions", "--outcome", "recoverd")
    assert (2, True) == (ended.code, 'did you mean "recovered"?' in ended.err)


async def test_version_loads_nothing_that_takes_time() -> None:
    program = (
        "import sys; from sidecar.__main__ import main; main(['version']); "
        "print(sorted({'pydantic', 'aiohttp', 'yaml', 'uvloop', 'asyncio', 'http'} & set(sys.modules)))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE, env=environment()
    )
    out, _ = await process.communicate()
    assert [f"sidecar {__version__}", "[]"] == out.decode().splitlines()

"""Interception and programs that do not say who they are: each is judged by itself, as HTTP libraries come."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sidecar.socket_owner import SocketOwners
from tests.doubles.authority import Authority
from tests.doubles.faults import last_session, until
from tests.doubles.upstream import always, answer
from tests.test_intercept import ByHand, Opened, authority, opened, pinned  # noqa: F401  # fixtures

GET = """
import importlib, json, sys
library = importlib.import_module(sys.argv[1])
try:
    reply = library.get("https://api.test/x")
except Exception as error:
    print(json.dumps([type(error).__name__, None]))
else:
    print(json.dumps([reply.status_code, reply.headers.get("x-sidecar-outcome")]))
"""


async def called(its: Opened, script: Path, library: str, trusted: Path) -> list[Any]:
    """The status or the error, and the outcome, that a program of its own got."""
    url = f"http://127.0.0.1:{its.sidecar.address[1]}"
    named = {"HTTPS_PROXY": url, "SSL_CERT_FILE": str(trusted), "REQUESTS_CA_BUNDLE": str(trusted)}
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | named
    started = await asyncio.create_subprocess_exec(
        sys.executable, str(script), library, stdout=asyncio.subprocess.PIPE, env=environ
    )
    said, _ = await asyncio.wait_for(started.communicate(), 30)
    return list(json.loads(said))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="programs are told apart by /proc")
@pytest.mark.parametrize("library", ["httpx", "requests"])
async def test_a_program_without_our_authority_does_not_take_the_sight_of_one_that_has_it(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
    tmp_path: Path,
    library: str,
) -> None:
    script = tmp_path / "app.py"
    script.write_text(GET)
    its = await opened(always(answer(b"secret")))
    error, _ = await called(its, script, library, authority.bundle)
    assert error in ("ConnectError", "SSLError")
    await until(lambda: its.demotions == 1)
    assert [200, "first_try"] == await called(its, script, library, its.ca)
    assert [200, None] == await called(its, script, library, authority.bundle), "it passes as a tunnel"
    assert [200, "first_try"] == await called(its, script, library, its.ca)
    assert 1 == its.demotions
    ((client, *_),) = its.sidecar.proxy.interception.demotions.in_force(0.0)
    assert ("127.0.0.1", "") == (client.address, client.agent)
    assert client.program is not None
    assert client.program.name in its.sidecar.logged.getvalue()
    assert client.program.name.endswith(" app.py")


# ---- where the program cannot be known ---------------------------------------------------------------------------


async def unknown(opened: Any, script: Any, **keys: Any) -> Opened:  # noqa: F811
    """A sidecar that finds nobody: it may not look at a single link."""
    its = await opened(script, **keys)
    interception = its.sidecar.proxy.interception
    interception._owners = SocketOwners(processes=0, links=0)
    interception._thread = ThreadPoolExecutor(1)
    assert isinstance(its, Opened)
    return its


def beginning(context: ssl.SSLContext, protocol: str) -> ssl.SSLContext:
    context.set_alpn_protocols([protocol])
    return context


def both(its: Opened, authority: Authority) -> ssl.SSLContext:  # noqa: F811
    """Goes through a tunnel, too."""
    context = its.trusting()
    context.load_verify_locations(authority.bundle)
    return context


async def test_clients_of_unknown_programs_are_told_apart_by_how_they_begin_tls(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
) -> None:
    its = await unknown(opened, always(answer(b"secret")))
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(beginning(pinned(authority), "http/1.1"))
    await until(lambda: its.demotions == 1)
    passed = await its.ask(its.get(), context=beginning(pinned(authority), "http/1.1"))
    assert (200, b"secret", None) == (passed.status, passed.body, passed.get("x-sidecar-outcome"))
    seen = await its.ask(its.get(), context=beginning(both(its, authority), "http/1.0"))
    assert (200, "first_try") == (seen.status, seen.get("x-sidecar-outcome"))
    assert ({"first_try": 1}, 1) == (its.sidecar.outcomes, len(its.sidecar.proxy.tunnels))
    its.sidecar.apps[1].close()
    await until(lambda: its.sidecar.outcomes == {"tunnelled": 1, "first_try": 1})
    ((client, *_),) = its.sidecar.proxy.interception.demotions.in_force(0.0)
    assert (None, True) == (client.program, f"(TLS {client.hello})" in its.sidecar.logged.getvalue())


async def test_a_hello_in_single_bytes_is_passed_on_whole_by_a_tunnel(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
) -> None:
    its = await unknown(opened, always(answer(b"secret")))
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(pinned(authority))
    await until(lambda: its.demotions == 1)
    client = ByHand(pinned(authority), "api.test")
    app = await its.connect()
    for byte in client.step():
        await app.send(bytes([byte]))
        await asyncio.sleep(0)
    await client.finish(app)
    assert (await client.ask(app, its.get())).startswith(b"HTTP/1.1 200 OK\r\n")
    assert {} == its.sidecar.outcomes, "a tunnel that goes on"


async def test_a_tunnel_that_cannot_be_dialled_after_its_200_is_cut_off_and_recorded(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
) -> None:
    its = await unknown(opened, always(answer(b"secret")))
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(pinned(authority))
    await until(lambda: its.demotions == 1)
    await its.upstream.stop()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await its.secure(pinned(authority))
    await until(lambda: bool(its.sidecar.outcomes))
    session = await last_session(its.sidecar)
    assert ("CONNECT", "CONNECTION_REFUSED") == (session.method, session.code)


async def test_who_leaves_before_its_hello_is_no_session(opened: Any) -> None:  # noqa: F811
    its = await unknown(opened, always(answer(b"secret")))
    (await its.connect()).close()
    await until(lambda: its.errors("closed") == 1)
    await until(lambda: not its.sidecar.proxy.downstreams and not len(its.sidecar.proxy.handshakes))
    assert {} == its.sidecar.outcomes


async def test_who_says_nothing_is_closed_in_time_all_the_same(
    opened: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sidecar.passed_on._HELLO_SECONDS", 0.1)
    its = await unknown(opened, always(answer(b"secret")), limits={"head_timeout": 0.3})
    assert await (await its.connect()).closed()
    await until(lambda: its.errors("timeout") == 1)
    assert {} == its.sidecar.outcomes

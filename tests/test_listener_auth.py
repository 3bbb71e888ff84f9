"""`listen.auth` and `listen.tls`: who may use the listener, and how it is spoken to."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from typing import Any

import pytest

from config.proxy_auth import ProxyAuth, parse_hash
from sidecar.guard import Guard, hashed, matches
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.authority import Authority, server_side
from tests.doubles.faults import until
from tests.doubles.upstream import Upstream, always, answer

CHEAP = "pbkdf2:sha256:10000$saltsalt$"
OK = answer(b"fine")


def kept(password: str) -> str:
    import hashlib

    return CHEAP + hashlib.pbkdf2_hmac("sha256", password.encode(), b"saltsalt", 10_000).hex()


def basic(user: str, password: str) -> str:
    return "Proxy-Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode() + "\r\n"


GOOD = basic("me", "p:ä ss")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "listener authority")


@pytest.fixture
def guarded(start_sidecar: Starter, start_upstream: UpstreamStarter) -> Any:
    async def start(**keys: Any) -> tuple[Running, Upstream]:
        upstream = await start_upstream(always(OK))
        listen = {"port": 0, "auth": {"users": {"me": kept("p:ä ss"), "you": kept("other")}}, **keys.pop("listen", {})}
        sidecar = await start_sidecar(
            listen=listen,
            upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}},
            egress={"connect_ports": [upstream.port]},
            **keys,
        )
        return sidecar, upstream

    return start


@pytest.mark.parametrize(
    "fields",
    ["", basic("me", "wrong"), basic("nobody", "p:ä ss"), basic("you", "p:ä ss"), "Proxy-Authorization: Basic !!!\r\n",
     "Proxy-Authorization: Bearer abc\r\n", "Proxy-Authorization: Basic\r\n", basic("me", ""),
     "Proxy-Authorization: Basic bWU=\r\n", GOOD.replace("Proxy-", "")],
)  # fmt: skip
async def test_without_the_right_password_nothing_gets_through(guarded: Any, fields: str) -> None:
    sidecar, upstream = await guarded()
    app = await sidecar.app()
    for target in (f"{upstream.url}/x", "/u/x"):
        reply = await app.ask(f"GET {target} HTTP/1.1\r\nHost: s\r\n{fields}\r\n")
        assert (407, "PROXY_AUTH_REQUIRED") == (reply.status, reply.json["error_code"])
        assert (reply.get("proxy-authenticate") or "").startswith('Basic realm="sidecar"')
    app = await sidecar.app()
    target = f"127.0.0.1:{upstream.port}"
    assert 407 == (await app.ask(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{fields}\r\n")).status
    assert 0 == upstream.connections
    assert {"denied": 3} == sidecar.outcomes


async def test_with_it_everything_does_and_the_upstream_does_not_see_it(guarded: Any) -> None:
    sidecar, upstream = await guarded()
    app = await sidecar.app()
    for target in (f"{upstream.url}/x", "/u/x"):
        assert 200 == (await app.ask(f"GET {target} HTTP/1.1\r\nHost: s\r\n{GOOD}\r\n")).status
    posted = f"POST /u/x HTTP/1.1\r\nHost: s\r\n{GOOD.replace('Basic', 'bAsic')}Content-Length: 2\r\n\r\nhi"
    assert 200 == (await app.ask(posted)).status
    assert [b"hi"] == upstream.bodies[2:]
    assert not [head for head in upstream.requests if b"roxy-" in head]
    target = f"127.0.0.1:{upstream.port}"
    tunnel = await sidecar.app()
    reply = await tunnel.ask(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{GOOD}\r\n", to_head=True)
    assert 200 == reply.status
    assert 200 == (await tunnel.ask("GET / HTTP/1.1\r\nHost: x\r\n\r\n")).status


async def test_a_password_is_checked_once(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar, _ = await guarded()
    asked: list[bytes] = []
    real = Guard._is_right
    monkeypatch.setattr(Guard, "_is_right", lambda self, given: (asked.append(given), real(self, given))[1])
    wrong = basic("me", "wrong")
    for _ in range(3):
        app = await sidecar.app()
        for fields, status in ((GOOD, 200), (GOOD, 200), (wrong, 407), (GOOD, 200), ("", 407)):
            assert status == (await app.ask(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{fields}\r\n")).status
    assert 2 == len(asked)


async def test_pipelined_requests_wait_for_the_check_in_order(guarded: Any) -> None:
    sidecar, upstream = await guarded()
    app = await sidecar.app()
    await app.send("".join(f"GET /u/{n} HTTP/1.1\r\nHost: s\r\n{GOOD}\r\n" for n in range(5)))
    assert [200] * 5 == [(await app.reply()).status for _ in range(5)]
    assert [b"GET /%d " % n for n in range(5)] == [head[:7] for head in upstream.requests]


async def test_an_app_that_leaves_during_the_check_is_no_trouble(guarded: Any) -> None:
    sidecar, upstream = await guarded()
    app = await sidecar.app()
    await app.send(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{GOOD}\r\n")
    app.close()
    await until(lambda: not sidecar.proxy.downstreams)
    assert upstream.connections <= 1


async def test_more_guesses_at_once_than_fit_are_put_off(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    sidecar, _ = await guarded()
    monkeypatch.setattr(Guard, "_is_right", lambda self, given: not go_on.wait(20))
    apps = [await sidecar.app() for _ in range(80)]
    for number, app in enumerate(apps):
        await app.send(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{basic('me', str(number))}\r\n")
    await until(lambda: sidecar.outcomes.get("denied") == 16, "those that do not fit hear so at once")
    go_on.set()
    statuses = [(await app.reply()).status for app in apps]
    assert (64, 16) == (statuses.count(407), statuses.count(503))


@pytest.mark.parametrize("password", ["", "x", "p:ä ss", "x" * 1000])
def test_a_hash_made_here_is_understood_here(password: str) -> None:
    made = parse_hash(hashed(password.encode()))
    assert matches(password.encode(), made)
    assert not matches(password.encode() + b"x", made)


def test_credentials_that_were_given_out_are_good() -> None:
    guard = Guard(ProxyAuth(users={}))
    assert None is guard.verdict(b"Basic abc")
    guard.admit(b"Basic abc")
    assert True is guard.verdict(b"Basic abc")
    for number in range(3000):
        guard._remember(b"%d" % number, good=False)
    assert True is guard.verdict(b"Basic abc"), "wrong ones are forgotten first"


# ---- listen.tls --------------------------------------------------------------------------------------------------


async def over_tls(sidecar: Running, authority: Authority) -> App:
    app = await sidecar.app()
    context = ssl.create_default_context(cafile=str(authority.bundle))
    await asyncio.wait_for(app.writer.start_tls(context, server_hostname="127.0.0.1"), 10)
    return app


async def test_apps_may_speak_tls_to_the_sidecar_itself(guarded: Any, authority: Authority) -> None:
    file = str(authority.issue("127.0.0.1"))
    sidecar, upstream = await guarded(listen={"tls": {"cert": file, "key": file}})
    app = await over_tls(sidecar, authority)
    assert 407 == (await app.ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")).status
    for target in ("/u/x", f"{upstream.url}/x"):
        assert 200 == (await app.ask(f"GET {target} HTTP/1.1\r\nHost: s\r\n{GOOD}\r\n")).status


async def test_interception_works_inside_tls_to_the_sidecar(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    from pathlib import Path

    upstream = await start_upstream(always(OK), tls=server_side(authority.issue("api.test")))
    file = str(authority.issue("127.0.0.1"))
    sidecar = await start_sidecar(
        listen={"port": 0, "tls": {"cert": file, "key": file}},
        upstreams={
            "api": {
                "hosts": ["api.test"],
                "intercept": True,
                "endpoints": [f"https://127.0.0.1:{upstream.port}"],
                "ca_bundle": str(authority.bundle),
            }
        },
    )
    app = await over_tls(sidecar, authority)
    assert 200 == (await app.ask("CONNECT api.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", to_head=True)).status
    inner = ssl.create_default_context(cafile=str(Path(sidecar.settings.state_dir) / "ca" / "ca.pem"))
    await asyncio.wait_for(app.writer.start_tls(inner, server_hostname="api.test"), 10)
    reply = await app.ask("GET /x HTTP/1.1\r\nHost: api.test\r\n\r\n")
    assert (200, "first_try") == (reply.status, reply.get("x-sidecar-outcome"))


async def test_silence_and_plain_text_at_a_tls_listener_are_closed_and_counted(
    start_sidecar: Starter, authority: Authority
) -> None:
    file = str(authority.issue("127.0.0.1"))
    sidecar = await start_sidecar(listen={"port": 0, "tls": {"cert": file, "key": file}}, limits={"head_timeout": 0.4})
    errors = sidecar.proxy.metrics.tls_client_errors
    silent, plain, gone = await sidecar.app(), await sidecar.app(), await sidecar.app()
    gone.close()
    await plain.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    for app in (plain, silent):
        assert await app.closed()
    await until(lambda: {"not_tls": 1, "timeout": 1, "closed": 1} == dict(errors))
    assert 0 == len(sidecar.proxy.handshakes)


async def test_a_full_house_is_closed_at_once(start_sidecar: Starter, authority: Authority) -> None:
    file = str(authority.issue("127.0.0.1"))
    sidecar = await start_sidecar(listen={"port": 0, "tls": {"cert": file, "key": file}}, limits={"connections": 2})
    held = [await sidecar.app() for _ in range(3)]
    await until(lambda: len(sidecar.proxy.handshakes) == 3)
    assert await (await sidecar.app()).closed()
    for app in held:
        app.close()

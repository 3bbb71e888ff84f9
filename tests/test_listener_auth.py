"""`listen.auth` and `listen.tls`: who may use the listener, and how it is spoken to."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from config.proxy_auth import ProxyAuth, parse_hash
from sidecar.failures import Refused
from sidecar.guard import Guard, hashed, matches
from sidecar.reloading import NotApplied
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.authority import Authority, server_side
from tests.doubles.faults import until
from tests.doubles.upstream import Upstream, always, answer
from tests.test_cli_admin import here

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
    await until(lambda: (sidecar.outcomes.get("denied") or 0) >= 15, "those that do not fit hear so at once")
    go_on.set()
    statuses = [(await app.reply()).status for app in apps]
    checked = statuses.count(407)
    assert (True, 80 - checked) == (64 <= checked <= 65, statuses.count(503)), "64 wait, and one may be under way"


class Flood:
    """A guard whose slow thread stands still, with more guesses than it can hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked: list[bytes] = []
        self._go_on = threading.Event()
        self.guard = Guard(ProxyAuth(users={"me": parse_hash(kept("p:ä ss"))}))
        real = self.guard._is_right
        monkeypatch.setattr(self.guard, "_is_right", lambda given: self._check(real, given))
        self.asked = [asyncio.create_task(self.guard.verify(b"Basic %d" % number, "10.0.0.1")) for number in range(80)]

    def _check(self, real: Any, given: bytes) -> bool:
        assert self._go_on.wait(20)
        self.checked.append(given)
        return bool(real(given))

    async def over(self, *tasks: asyncio.Task[None]) -> None:
        self._go_on.set()
        await asyncio.gather(*tasks)
        self.guard.close()
        await asyncio.gather(*self.asked, return_exceptions=True)


RIGHT = GOOD.partition(": ")[2].strip().encode()


async def test_a_password_that_is_sent_again_goes_before_all_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = Flood(monkeypatch)
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="send yours again"):
        await flood.guard.verify(RIGHT, "10.0.0.1")
    again = asyncio.create_task(flood.guard.verify(RIGHT, "10.0.0.1"))
    await asyncio.sleep(0)
    await flood.over(again)
    assert True is flood.guard.verdict(RIGHT)
    assert RIGHT in flood.checked[:2], "right after the one that was under way"


async def test_an_address_that_does_not_guess_does_not_stand_behind_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flood = Flood(monkeypatch)
    for _ in range(20):
        flood.guard._note("10.0.0.1", good=False)
    await asyncio.sleep(0)
    once = asyncio.create_task(flood.guard.verify(RIGHT, "10.0.0.2"))
    await asyncio.sleep(0)
    await flood.over(once)
    assert True is flood.guard.verdict(RIGHT)
    assert RIGHT in flood.checked[:2]


async def test_many_connections_with_one_password_cost_one_check(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar, _ = await guarded()
    asked: list[bytes] = []
    real = Guard._is_right
    monkeypatch.setattr(Guard, "_is_right", lambda self, given: (asked.append(given), real(self, given))[1])
    apps = [await sidecar.app() for _ in range(40)]
    for app in apps:
        await app.send(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{GOOD}\r\n")
    assert [200] * 40 == [(await app.reply()).status for app in apps]
    assert 1 == len(asked)


async def test_a_flood_of_wrong_passwords_keeps_right_ones_out_for_one_repeat_at_most(guarded: Any) -> None:
    sidecar, _ = await guarded()
    ended = False

    async def guess(name: int) -> None:
        number = 0
        app = await sidecar.app()
        while not ended:
            number += 1
            wrong = basic("me", f"{name}-{number}")
            assert (await app.ask(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{wrong}\r\n")).status in (407, 503)

    guesses = [asyncio.create_task(guess(name)) for name in range(70)]
    await until(lambda: (sidecar.outcomes.get("denied") or 0) > 100)
    app, statuses = await sidecar.app(), []
    for _ in range(40):
        statuses.append((await app.ask(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{GOOD}\r\n")).status)
    ended = True
    await asyncio.gather(*guesses)
    assert 39 <= statuses.count(200)


async def test_a_check_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(ProxyAuth(users={}))

    def fail(given: bytes) -> bool:
        raise MemoryError

    monkeypatch.setattr(guard, "_is_right", fail)
    with pytest.raises(Refused):
        await guard.verify(RIGHT)
    assert None is guard.verdict(RIGHT)
    guard.close()


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


async def test_users_who_come_go_or_get_another_password_need_no_restart(
    start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    file, upstream = tmp_path / "sidecar.yaml", await start_upstream(always(OK))
    keys: dict[str, Any] = {"upstreams": {"u": {"route": "/u", "endpoints": [upstream.url]}}}
    users = {"me": kept("mine"), "you": kept("yours")}
    sidecar = await start_sidecar(file=file, listen={"port": 0, "auth": {"users": users}}, **keys)
    mine, yours = await sidecar.app(), await sidecar.app()

    async def status(app: App, user: str, password: str) -> int:
        return (await app.ask(f"GET /u/x HTTP/1.1\r\nHost: s\r\n{basic(user, password)}\r\n")).status

    assert [200, 200] == [await status(mine, "me", "mine"), await status(yours, "you", "yours")]
    written = json.loads(file.read_text())
    written["listen"]["auth"]["users"] = {"me": kept("another"), "new": kept("hers")}
    file.write_text(json.dumps(written))
    done = await sidecar.reloading.reload("a test")
    assert () == done.needs_restart
    assert "pbkdf2" not in str(done.before) + str(done.after) + sidecar.logged.getvalue()
    assert [407, 407] == [await status(mine, "me", "mine"), await status(yours, "you", "yours")]
    assert [200, 200] == [await status(mine, "me", "another"), await status(await sidecar.app(), "new", "hers")]
    del written["listen"]["auth"]
    file.write_text(json.dumps(written))
    assert {"listen.auth.users.me", "listen.auth.users.new"} == {*(await sidecar.reloading.reload("x")).needs_restart}
    assert 407 == (await mine.ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")).status


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


async def serial_shown(port: int, authority: Authority) -> int:
    """The serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(authority.bundle))
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


def serial(certificate: Path) -> int:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number


def renew(held: Path, other: Path) -> None:
    """As certbot and Kubernetes do it: another file under the same name."""
    new = held.with_suffix(".new")
    shutil.copy(other, new)
    os.replace(new, held)


@pytest.fixture
async def with_tls(start_sidecar: Starter, authority: Authority, tmp_path: Path) -> tuple[Running, Path, Path]:
    held, file = tmp_path / "held.pem", tmp_path / "sidecar.yaml"
    renew(held, authority.issue("127.0.0.1"))
    pair = {"cert": str(held), "key": str(held)}
    sidecar = await start_sidecar(file=file, listen={"port": 0, "tls": pair}, admin={"port": 0, "tls": pair})
    for watching in sidecar._watching:
        watching.cancel()  # nothing here happens by itself
    return sidecar, held, file


async def test_a_renewed_certificate_is_shown_to_new_connections_after_a_reload_and_open_ones_go_on(
    with_tls: tuple[Running, Path, Path], authority: Authority
) -> None:
    sidecar, held, _ = with_tls
    ports = (sidecar.address[1], sidecar.admin_address[1])
    old, new = serial(held), authority.issue("127.0.0.1")
    app = await over_tls(sidecar, authority)
    renew(held, new)
    assert [old, old] == [await serial_shown(port, authority) for port in ports]
    assert {"listen.tls", "admin.tls"} == {*(await sidecar.reloading.reload("a test")).renewed}
    assert [serial(new)] * 2 == [await serial_shown(port, authority) for port in ports]
    assert 404 == (await app.ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")).status
    assert () == (await sidecar.reloading.reload("a test")).renewed


async def test_whoever_orders_a_reload_is_told_of_a_renewed_certificate(
    with_tls: tuple[Running, Path, Path], authority: Authority
) -> None:
    sidecar, held, _ = with_tls
    reload = ("reload", "--admin", f"https://127.0.0.1:{sidecar.admin_address[1]}", "--ca", str(authority.bundle))
    assert "Nothing changed" in (await here(*reload)).out
    renew(held, authority.issue("127.0.0.1"))
    told = await here(*reload)
    assert (0, "") == (told.code, told.err)
    assert {f"{role}.tls: a renewed certificate is shown from now on" for role in ("admin", "listen")} == {
        *told.out.splitlines()
    }


async def test_plain_http_to_an_admin_port_with_tls_is_told_what_is_missing(
    with_tls: tuple[Running, Path, Path],
) -> None:
    sidecar, *_ = with_tls
    told = await here("breakers", "--admin", f"http://127.0.0.1:{sidecar.admin_address[1]}")
    assert (1, True) == (told.code, "its address begins with https://" in told.err)


async def test_a_renewed_certificate_is_noticed_by_itself(
    start_sidecar: Starter, authority: Authority, tmp_path: Path
) -> None:
    held, new = tmp_path / "held.pem", authority.issue("127.0.0.1")
    renew(held, authority.issue("127.0.0.1"))
    sidecar = await start_sidecar(listen={"port": 0, "tls": {"cert": str(held), "key": str(held)}})
    renew(held, new)
    await until(lambda: "a renewed certificate is shown (listen.tls)" in sidecar.logged.getvalue())
    assert serial(new) == await serial_shown(sidecar.address[1], authority)


async def test_a_pair_that_does_not_belong_together_is_refused_and_the_one_before_stays(
    with_tls: tuple[Running, Path, Path], authority: Authority
) -> None:
    sidecar, held, _ = with_tls
    old, good = serial(held), authority.issue("127.0.0.1")
    certificate = authority.issue("127.0.0.1").read_text().partition("-----BEGIN PRIVATE")[0]
    mixed = held.with_name("mixed.pem")
    mixed.write_text(certificate + "-----BEGIN PRIVATE" + good.read_text().partition("-----BEGIN PRIVATE")[2])
    renew(held, mixed)
    with pytest.raises(NotApplied, match="the key is not that of the certificate"):
        await sidecar.reloading.reload("a test")
    assert sidecar.reloading.refused is not None
    assert old == await serial_shown(sidecar.address[1], authority)
    renew(held, good)
    await sidecar.reloading.reload("a test")
    assert serial(good) == await serial_shown(sidecar.address[1], authority)


async def test_other_files_for_tls_need_no_restart_and_its_coming_or_going_does(
    with_tls: tuple[Running, Path, Path], authority: Authority
) -> None:
    sidecar, _, file = with_tls
    new, keys = authority.issue("127.0.0.1"), json.loads(file.read_text())
    keys["listen"]["tls"] = {"cert": str(new), "key": str(new)}
    file.write_text(json.dumps(keys))
    done = await sidecar.reloading.reload("a test")
    assert ((), ("listen.tls",)) == (done.needs_restart, done.renewed)
    assert serial(new) == await serial_shown(sidecar.address[1], authority)
    file.write_text(json.dumps({**keys, "listen": {"port": 0}}))
    done = await sidecar.reloading.reload("a test")
    assert ("listen.tls.cert", "listen.tls.key") == done.needs_restart
    assert serial(new) == await serial_shown(sidecar.address[1], authority)


async def test_interception_works_inside_tls_to_the_sidecar(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
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

"""Where requests may not go, in whatever spelling, by whichever way in."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from config.model import Settings
from sidecar.egress import Egress, is_own_address, plain_address, reached
from sidecar.failures import Refused
from sidecar.upstream import resolve
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import Reply
from tests.doubles.upstream import always, answer, once

METADATA = ["169.254.169.254", "169.254.0.1", "fe80::1", "fd00:ec2::254"]
METADATA_IN_DISGUISE = [
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe",
    "64:ff9b:1:a9fe:a9:fe00::",
    "64:ff9b::169.254.169.254",
    "2002:a9fe:a9fe::1",
    "::169.254.169.254",
    "fe80::1%eth0",
    "fe80::1%25",
    "febf:ffff::1",
    "FD00:EC2:0:0:0:0:0:254",
]


def egress(own_address: Any = lambda address: False, **keys: Any) -> Egress:
    return Egress(Settings.model_validate({"egress": keys}), own_address)


def refusal(rules: Egress, address: str, port: int = 80, host: str = "name.test") -> tuple[str, str] | None:
    try:
        rules.check_address(address, port, host)
    except Refused as refused:
        return refused.code, refused.reason
    return None


def addresses(*found: str) -> Any:
    """A resolver that gives these addresses for every name, and counts how often it was asked."""

    async def lookup(host: str, port: int) -> list[resolve.AddressInfo]:
        lookup.asked.append(host)
        return [_info(address, port) for address in found]

    lookup.asked = []
    return lookup


def _info(address: str, port: int) -> resolve.AddressInfo:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def ask(sidecar: Running, way: str, authority: str) -> Reply:
    """The same destination, as a forward request or as a tunnel."""
    app = await sidecar.app()
    if way == "forward":
        return await app.ask(f"GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n")
    return await app.ask(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n", to_head=False)


async def refused_without_dialling(sidecar: Running, way: str, authority: str, monkeypatch: Any) -> Reply:
    """Ask, while any connection the sidecar tries to open fails the test."""

    async def no_connection(*args: Any, **options: Any) -> None:
        raise AssertionError("a refused address was dialled")

    monkeypatch.setattr("aiohappyeyeballs.start_connection", no_connection)
    return await ask(sidecar, way, authority)


# ---- addresses, judged in their final form -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::ffff:7f00:1", "127.0.0.1"),
        ("::ffff:0:7f00:1", "127.0.0.1"),
        ("64:ff9b::7f00:1", "127.0.0.1"),
        ("2002:7f00:1::", "127.0.0.1"),
        ("::127.0.0.1", "127.0.0.1"),
        ("2001:0:c000:201::80ff:fffe", "127.0.0.1"),
        ("fd00::5efe:7f00:1", "127.0.0.1"),
        ("fd00::200:5efe:7f00:1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::ffff:0.0.0.0", "127.0.0.1"),
        ("64:ff9b::", "127.0.0.1"),
        ("::", "::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("2002:7f00:1::", "2002:7f00:1::"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("::1", "::1"),
        ("::", "::"),
        ("2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_an_address_is_judged_by_all_that_a_packet_to_it_may_reach(written: str, meant: str) -> None:
    assert ipaddress.ip_address(meant) in reached(written)


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.1", "::1", "2001:db8::1", "fd00::1"])
def test_an_ordinary_address_reaches_itself_alone(address: str) -> None:
    assert (ipaddress.ip_address(address),) == reached(address)


LOOPBACK = ["127.0.0.0/8", "::1"]
ALSO_LOOPBACK = [
    *("0.0.0.0", "::", "::ffff:0.0.0.0", "::ffff:0:0", "127.0.0.1", "127.255.0.9", "::1", "::127.0.0.1"),
    *("::ffff:127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::", "2002:7f00:1::", "2002::"),
    *("2001:0:c000:201::80ff:fffe", "fe80::5efe:127.0.0.1", "::1%lo"),
]


@pytest.mark.parametrize("address", ALSO_LOOPBACK)
def test_a_denied_loopback_is_denied_in_every_spelling(address: str) -> None:
    assert ("EGRESS_DENIED", "egress") == refusal(egress(deny=LOOPBACK, allow=["name.test"]), address)


def test_the_unspecified_address_is_denied_with_either_loopback() -> None:
    for denied in ("127.0.0.0/8", "127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1", "::ffff:127.0.0.0/104"):
        assert None is not refusal(egress(deny=[denied]), "0.0.0.0"), denied
    assert None is refusal(egress(deny=["10.0.0.0/8"]), "0.0.0.0")


@pytest.mark.parametrize("network", ["2002::/16", "64:ff9b::/96", "::/0"])
def test_a_denied_network_of_ipv6_holds_for_addresses_with_another_inside(network: str) -> None:
    address = "64:ff9b::808:808" if network == "64:ff9b::/96" else "2002:808:808::1"
    assert ("EGRESS_DENIED", "egress") == refusal(egress(deny=[network]), address)


def test_ipv4_written_as_ipv6_in_a_rule_means_ipv4() -> None:
    rules = egress(deny=["::ffff:10.0.0.0/104"])
    assert ("EGRESS_DENIED", "egress") == refusal(rules, "10.1.1.1")
    assert None is refusal(rules, "11.1.1.1")
    assert None is refusal(egress(allow=["::ffff:169.254.169.254"]), "169.254.169.254")


@pytest.mark.parametrize("address", METADATA + METADATA_IN_DISGUISE)
def test_link_local_and_metadata_addresses_are_refused_in_every_spelling(address: str) -> None:
    assert ("EGRESS_DENIED", "egress") == refusal(egress(), address)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "192.0.2.1", "::1", "2001:db8::1", "fd00:ec2::253"])
def test_ordinary_addresses_are_let_through_by_default(address: str) -> None:
    assert None is refusal(egress(), address)


@pytest.mark.parametrize(
    "target", ["127.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "0.0.0.0", "::", "::ffff:0.0.0.0"]
)
def test_our_own_listener_is_found_in_every_spelling(target: str) -> None:
    rules = egress()
    rules.add_listener("127.0.0.1", 4140, "proxy")
    rules.add_listener("127.0.0.1", 4141, "admin")
    assert ("LOOP_DETECTED", "loop") == refusal(rules, target, 4140)
    assert ("EGRESS_DENIED", "egress") == refusal(rules, target, 4141)
    assert None is refusal(rules, target, 4142)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_a_listener_on_every_interface_is_reached_by_every_address_of_the_machine(bound: str) -> None:
    rules = egress(own_address=lambda address: "10.1.2.3" == str(address))
    rules.add_listener(bound, 4140, "proxy")
    assert ("LOOP_DETECTED", "loop") == refusal(rules, "10.1.2.3", 4140)
    assert ("LOOP_DETECTED", "loop") == refusal(rules, "::ffff:10.1.2.3", 4140)
    assert None is refusal(rules, "10.1.2.4", 4140)


def test_the_kernel_knows_which_addresses_are_ours() -> None:
    assert is_own_address(plain_address("127.0.0.1"))
    assert is_own_address(plain_address("127.9.9.9"))
    assert not is_own_address(plain_address("192.0.2.1"))


def test_an_exception_may_be_an_address_a_network_a_name_or_a_suffix() -> None:
    for allowed in ("169.254.169.254", "169.254.0.0/16", "meta.test", "*.test"):
        assert None is refusal(egress(allow=[allowed]), "169.254.169.254", host="meta.test")
    assert None is not refusal(egress(allow=["169.254.1.0/24", "other.test"]), "169.254.169.254", host="meta.test")


def test_an_exception_never_opens_our_own_listeners() -> None:
    rules = egress(allow=["127.0.0.1", "*.test"])
    rules.add_listener("127.0.0.1", 4141, "admin")
    assert ("EGRESS_DENIED", "egress") == refusal(rules, "127.0.0.1", 4141)


def test_deny_wins_over_allow() -> None:
    assert None is not refusal(egress(allow=["169.254.169.254"], deny=["169.254.0.0/16"]), "169.254.169.254")


def test_a_denied_network_is_denied_in_every_spelling() -> None:
    rules = egress(deny=["10.0.0.0/8"])
    for address in ("10.1.1.1", "::ffff:10.1.1.1", "64:ff9b::10.1.1.1", "2002:a01:101::"):
        assert ("EGRESS_DENIED", "egress") == refusal(rules, address)
    assert None is refusal(rules, "11.1.1.1")


def test_a_denied_name_is_refused_before_it_is_resolved() -> None:
    rules = egress(deny=["Bad.test", "*.evil.test"])
    for name in ("bad.test", "a.evil.test", "a.b.evil.test"):
        with pytest.raises(Refused, match=r"egress\.deny"):
            rules.check_name(name)
    for name in ("good.test", "evil.test", "notevil.test"):
        rules.check_name(name)


# ---- over sockets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["forward", "connect"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0177.0.0.1", "0x7f.1", "0.0.0.0"])
async def test_a_request_to_the_proxy_itself_is_a_loop(start_sidecar: Starter, way: str, host: str) -> None:
    port = free_port()
    sidecar = await start_sidecar(listen={"port": port}, egress={"connect_ports": [port]})
    reply = await ask(sidecar, way, f"{host}:{port}")
    assert (508, "LOOP_DETECTED") == (reply.status, reply.json["error_code"])
    assert {"denied": 1} == sidecar.outcomes


@pytest.mark.parametrize("way", ["forward", "connect"])
@pytest.mark.parametrize("role", ["admin", "probes"])
async def test_admin_and_probes_are_not_reachable_through_the_proxy(
    start_sidecar: Starter, way: str, role: str
) -> None:
    port = free_port()
    keys = {"admin": {"port": 0}, "probes": {"host": "127.0.0.1", "port": 0}}
    keys[role] = {"host": "127.0.0.1", "port": port}
    sidecar = await start_sidecar(**keys, egress={"connect_ports": [port]}, lookup=addresses("127.0.0.1"))
    for host in ("127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]", "a-name-of-theirs.test"):
        reply = await ask(sidecar, way, f"{host}:{port}")
        assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"]), host
        assert role in reply.json["message"]


@pytest.mark.parametrize("way", ["forward", "connect"])
async def test_no_spelling_of_a_denied_loopback_reaches_what_listens_there(
    start_sidecar: Starter, start_upstream: UpstreamStarter, way: str
) -> None:
    upstream = await start_upstream(always(answer(b"inside")))
    sidecar = await start_sidecar(egress={"deny": LOOPBACK, "connect_ports": [upstream.port]})
    spellings = ["0.0.0.0", "0", "0x0", "00", "0.0", "0.0.0.0.", "[::]", "[::ffff:0.0.0.0]", "[::ffff:0:0]", "[0::0]"]
    spellings += ["127.1", "0177.1", "0x7f000001", "2130706433", "localhost", "localhost.", "[::127.0.0.1]", "[::1]"]
    for host in spellings:
        reply = await ask(sidecar, way, f"{host}:{upstream.port}")
        assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"]), host
    for host in ("[::1%lo]", "%30", "127.0.0.%31", "127.0.0.1%00", "\u0661", "\uff11\uff12\uff17.1"):
        app = await sidecar.app()
        line = f"CONNECT {host}:{upstream.port}" if way == "connect" else f"GET http://{host}:{upstream.port}/"
        assert 400 == (await app.ask(f"{line} HTTP/1.1\r\nHost: a\r\n\r\n".encode(), to_head=False)).status, host
    assert 0 == upstream.connections


async def test_what_the_kernel_connected_to_is_judged_once_more(
    start_sidecar: Starter, start_upstream: UpstreamStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it makes of an address: nothing is sent to one that is denied."""
    upstream = await start_upstream(always(answer(b"inside")))

    async def elsewhere(infos: list[resolve.AddressInfo], **options: Any) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", upstream.port))
        made.setblocking(False)
        return made

    monkeypatch.setattr("aiohappyeyeballs.start_connection", elsewhere)
    sidecar = await start_sidecar(egress={"deny": LOOPBACK}, lookup=addresses("192.0.2.1"))
    reply = await ask(sidecar, "forward", f"innocent.test:{upstream.port}")
    assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])
    assert [] == upstream.requests


async def test_an_endpoint_that_is_the_sidecar_itself_is_a_loop(start_sidecar: Starter) -> None:
    port = free_port()
    sidecar = await start_sidecar(
        listen={"port": port}, upstreams={"me": {"route": "/me", "endpoints": [f"http://127.0.0.1:{port}"]}}
    )
    reply = await (await sidecar.app()).ask("GET /me HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (508, "LOOP_DETECTED") == (reply.status, reply.json["error_code"])


@pytest.mark.parametrize("way", ["forward", "connect"])
@pytest.mark.parametrize("address", [*METADATA, "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"])
async def test_a_metadata_literal_is_refused_without_dialling(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch, way: str, address: str
) -> None:
    sidecar = await start_sidecar(egress={"connect_ports": [80]})
    authority = f"[{address}]:80" if ":" in address else f"{address}:80"
    reply = await refused_without_dialling(sidecar, way, authority, monkeypatch)
    assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])
    assert 0 == reply.json["details"]["attempts"]
    assert {"denied": 1} == sidecar.outcomes


@pytest.mark.parametrize("way", ["forward", "connect"])
@pytest.mark.parametrize("address", METADATA + METADATA_IN_DISGUISE)
async def test_a_name_that_leads_to_a_metadata_address_is_refused_without_dialling(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch, way: str, address: str
) -> None:
    sidecar = await start_sidecar(egress={"connect_ports": [80]}, lookup=addresses(address))
    reply = await refused_without_dialling(sidecar, way, "innocent.test:80", monkeypatch)
    assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])


@pytest.mark.parametrize("way", ["forward", "connect"])
async def test_a_name_in_deny_is_refused_without_being_resolved(start_sidecar: Starter, way: str) -> None:
    lookup = addresses("127.0.0.1")
    sidecar = await start_sidecar(egress={"deny": ["*.bad.test"], "connect_ports": [80]}, lookup=lookup)
    for name in ("a.bad.test", "A.BAD.test", "a.bad.test."):
        reply = await ask(sidecar, way, f"{name}:80")
        assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])
    assert [] == lookup.asked


@pytest.mark.parametrize("way", ["forward", "connect"])
async def test_every_dial_checks_the_address_the_name_has_now(
    start_sidecar: Starter, start_upstream: UpstreamStarter, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(resolve, "FRESH_FOR", 0.0)
    upstream = await start_upstream(once(answer(b"first")))
    found = ["127.0.0.1"]

    async def rebinding(host: str, port: int) -> list[resolve.AddressInfo]:
        return [_info(found[-1], port)]

    sidecar = await start_sidecar(egress={"connect_ports": [upstream.port]}, lookup=rebinding)
    authority = f"rebind.test:{upstream.port}"
    first = await ask(sidecar, "forward", authority)
    assert (200, b"first") == (first.status, first.body)
    found.append("169.254.169.254")
    second = await refused_without_dialling(sidecar, way, authority, monkeypatch)
    assert (403, "EGRESS_DENIED") == (second.status, second.json["error_code"])
    assert 1 == upstream.connections


async def test_only_the_allowed_addresses_of_a_name_are_used(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer()))
    sidecar = await start_sidecar(lookup=addresses("169.254.169.254", "127.0.0.1"))
    reply = await ask(sidecar, "forward", f"both.test:{upstream.port}")
    assert 200 == reply.status


async def test_an_exception_in_egress_allow_is_dialled(start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = []

    async def nobody_there(infos: list[resolve.AddressInfo], **options: Any) -> None:
        dialled.extend(info[4][0] for info in infos)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("aiohappyeyeballs.start_connection", nobody_there)
    sidecar = await start_sidecar(egress={"allow": ["169.254.169.254"]}, policies={"default": {"max_attempts": 1}})
    reply = await ask(sidecar, "forward", "169.254.169.254")
    assert (502, "CONNECTION_REFUSED") == (reply.status, reply.json["error_code"])
    assert ["169.254.169.254"] == dialled
    assert 403 == (await ask(sidecar, "forward", "169.254.169.253")).status


@pytest.mark.parametrize("way", ["forward", "connect"])
async def test_configured_only_refuses_hosts_that_no_upstream_lists(
    start_sidecar: Starter, start_upstream: UpstreamStarter, way: str
) -> None:
    upstream = await start_upstream(always(answer()))
    lookup = addresses("127.0.0.1")
    sidecar = await start_sidecar(
        lookup=lookup,
        egress={"mode": "configured_only"},
        upstreams={"known": {"hosts": [f"known.test:{upstream.port}"]}},
    )
    unknown = await ask(sidecar, way, f"unknown.test:{upstream.port}")
    assert (403, "EGRESS_DENIED") == (unknown.status, unknown.json["error_code"])
    assert [] == lookup.asked
    assert 200 == (await ask(sidecar, "forward", f"known.test:{upstream.port}")).status


async def test_a_refused_destination_is_no_attempt_in_the_metrics(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    await ask(sidecar, "forward", "169.254.169.254")
    attempts = [
        sample
        for family in sidecar.proxy.metrics.registry.collect()
        if family.name == "sidecar_upstream_attempts"
        for sample in family.samples
    ]
    assert [] == attempts

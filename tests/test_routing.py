"""Which upstream a request belongs to, what it is asked for, and the pure rules in between."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import httptools
import pytest

from config.errors import registry
from config.model import Settings
from sidecar.failures import Malformed
from sidecar.headers import ResponseFields, request_head, trailer_lines, without_named
from sidecar.held import Held
from sidecar.incoming import find_destination
from sidecar.policy.classify import code_of, is_verdict
from sidecar.request import Request, RequestReader
from sidecar.routing import Authority, Origin, Router, Routes, origin_path, parse_authority, split_absolute
from sidecar.turn import Turn
from sidecar.upstream.connection import UpstreamConnection
from sidecar.upstream.destination import Choice, Destination
from tests.conftest import Running, Starter


def router(**upstreams: Any) -> Router:
    return Router(Settings.model_validate({"upstreams": upstreams}))


# ---- authorities and targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("api.test", "api.test", 0),
        ("API.Test:8080", "api.test", 8080),
        ("api.test.", "api.test", 0),
        ("api.test:", "api.test", 0),
        ("under_score.test", "under_score.test", 0),
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]", "::1", 0),
        ("[0:0:0:0:0:0:0:1]:443", "::1", 443),
        ("[2001:DB8::A]", "2001:db8::a", 0),
    ],
)
def test_an_authority_is_read_in_one_canonical_form(text: str, host: str, port: int) -> None:
    assert Authority(host, port) == parse_authority(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":80", "a b", "a,b", "a/b", "a\\b", "a..b", ".a", "a:0", "a:65536", "a:-1", "a:+1", "a:8 0", "a:80:80"),
        *("u@a", "u:p@a:80", "[::1", "::1]", "[::1]x", "[::g]", "[]", "[1.2.3.4]", "a%00", "a\n", "é.test", "a:²"),
        "a" * 256,
    ],
)
def test_an_authority_that_others_could_read_differently_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        parse_authority(text)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("http://a.test", ("http", "a.test", "")),
        ("http://a.test/", ("http", "a.test", "/")),
        ("HTTP://a.test:81/x?y=//z", ("http", "a.test:81", "/x?y=//z")),
        ("https://a.test?q", ("https", "a.test", "?q")),
        ("http://a.test#f", ("http", "a.test", "#f")),
        ("http://a.test/a%2Fb//c/../d", ("http", "a.test", "/a%2Fb//c/../d")),
    ],
)
def test_an_absolute_target_is_split_and_not_rewritten(target: str, parts: tuple[str, str, str]) -> None:
    scheme, authority, rest = split_absolute(target.encode())
    assert parts == (scheme, authority.decode(), rest.decode())


@pytest.mark.parametrize("target", ["ftp://a.test/", "a.test/", "://a", "httpx://a", "javascript:1", "a"])
def test_a_target_of_another_kind_is_refused(target: str) -> None:
    with pytest.raises(Malformed):
        split_absolute(target.encode())


def test_an_empty_path_becomes_a_slash_or_a_star_for_options() -> None:
    assert b"/" == origin_path(b"", "GET")
    assert b"*" == origin_path(b"", "OPTIONS")
    assert b"/?q=1" == origin_path(b"?q=1", "OPTIONS")
    assert b"/x/%7e?a" == origin_path(b"/x/%7e?a", "GET")


# ---- hosts -------------------------------------------------------------------------------------------------------


def test_a_host_without_a_port_matches_every_port() -> None:
    found = router(a={"hosts": ["api.test"]})
    assert "a" == found.by_host("api.test", 80) == found.by_host("api.test", 8443)
    assert None is found.by_host("other.test", 80)
    assert None is found.by_host("sub.api.test", 80)


def test_a_host_with_a_port_matches_that_port_alone_and_wins_over_one_without() -> None:
    found = router(plain={"hosts": ["api.test"]}, admin={"hosts": ["api.test:8080"]})
    assert "admin" == found.by_host("api.test", 8080)
    assert "plain" == found.by_host("api.test", 80)
    assert None is router(a={"hosts": ["api.test:8080"]}).by_host("api.test", 80)


def test_a_suffix_matches_below_it_and_not_itself() -> None:
    found = router(a={"hosts": ["*.api.test"]})
    assert "a" == found.by_host("x.api.test", 80) == found.by_host("y.x.api.test", 443)
    for host in ("api.test", "xapi.test", "api.test.evil"):
        assert None is found.by_host(host, 80)


@pytest.mark.parametrize("order", [["wide", "narrow", "exact"], ["exact", "narrow", "wide"]])
def test_the_most_specific_host_wins_whatever_the_order(order: list[str]) -> None:
    hosts = {"wide": ["*.test"], "narrow": ["*.api.test"], "exact": ["one.api.test"]}
    found = router(**{name: {"hosts": hosts[name]} for name in order})
    assert "exact" == found.by_host("one.api.test", 80)
    assert "narrow" == found.by_host("two.api.test", 80)
    assert "wide" == found.by_host("three.test", 80)


def test_a_suffix_with_a_port_wins_over_the_same_without_at_that_port() -> None:
    found = router(any={"hosts": ["*.api.test"]}, tls={"hosts": ["*.api.test:8443"]})
    assert "tls" == found.by_host("x.api.test", 8443)
    assert "any" == found.by_host("x.api.test", 80)


def test_hosts_are_compared_without_regard_to_case() -> None:
    found = router(a={"hosts": ["API.Test"]}, b={"hosts": ["*.Sub.TEST"]}, v6={"hosts": ["[2001:DB8::1]"]})
    assert "a" == found.by_host(parse_authority("Api.TEST").host, 80)
    assert "b" == found.by_host(parse_authority("X.sub.Test").host, 80)
    assert "v6" == found.by_host(parse_authority("[2001:db8:0::1]").host, 80)


# ---- routes ------------------------------------------------------------------------------------------------------


def routes(*paths: str) -> Routes[str]:
    return Routes({path: f"r{number}" for number, path in enumerate(paths)})


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/pay", ("r0", "")),
        ("/pay/", ("r0", "/")),
        ("/pay/v1/x?y=/z", ("r0", "/v1/x?y=/z")),
        ("/pay?x=1", ("r0", "?x=1")),
        ("/pay//x", ("r0", "//x")),
        ("/payments", None),
        ("/Pay", None),
        ("/x/pay", None),
        ("//pay", None),
        ("/%70ay", None),
        ("/", None),
    ],
)
def test_a_route_ends_at_a_segment_border(path: str, found: tuple[str, str] | None) -> None:
    assert (found and (found[0], found[1].encode())) == routes("/pay").find(path.encode())


@pytest.mark.parametrize("others", [0, 20])
def test_the_longest_route_wins(others: int) -> None:
    found = routes("/a", "/a/b", "/", *(f"/other{number}" for number in range(others)))
    assert ("r1", b"/c") == found.find(b"/a/b/c")
    assert ("r0", b"/bc") == found.find(b"/a/bc")
    assert ("r2", b"/other") == found.find(b"/other")


# ---- destinations ------------------------------------------------------------------------------------------------


def pick(found: Destination) -> Choice:
    picked = found.pick(0.0)
    assert picked is not None
    return picked[0]


def destination(sidecar: Running, url: str) -> tuple[str, str, str, bytes]:
    """The upstream's label, the scheme and address connected to, and the Host that is sent."""
    scheme, authority, _ = split_absolute(url.encode())
    found = sidecar.proxy.directory.forward(scheme, authority)
    choice = pick(found)
    return found.upstream.label, choice.pool.origin.scheme, choice.label, choice.host


async def test_without_endpoints_a_request_goes_where_the_app_said(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(upstreams={"a": {"hosts": ["api.test"]}})
    assert ("a", "http", "api.test:80", b"Api.test") == destination(sidecar, "http://Api.test/")
    assert ("a", "http", "api.test:81", b"api.test:81") == destination(sidecar, "http://api.test:81/")
    assert ("a", "https", "api.test:443", b"api.test") == destination(sidecar, "https://api.test/")
    assert ("new.test:80", "http", "new.test:80", b"new.test") == destination(sidecar, "http://new.test/")
    assert ("[::1]:80", "http", "[::1]:80", b"[::1]") == destination(sidecar, "http://[::1]/")


async def test_a_host_that_is_known_already_is_found_as_the_first_time(start_sidecar: Starter) -> None:
    """Whatever stands behind it; and nothing that only looks like it, or names another scheme, is taken for it."""
    sidecar = await start_sidecar(upstreams={"a": {"hosts": ["api.test"]}})

    def found(target: str) -> tuple[str, str, bytes]:
        request = Request()
        request.method, request.host, request.target = "GET", b"api.test", target.encode()
        there, path = find_destination(request, sidecar.proxy)
        return there.upstream.label, pick(there).pool.origin.scheme, path

    targets = {
        "http://api.test/x?y=http://b.test/": ("a", "http", b"/x?y=http://b.test/"),
        "http://api.test//": ("a", "http", b"//"),
        "http://api.test": ("a", "http", b"/"),
        "http://api.test?q=/": ("a", "http", b"/?q=/"),
        "http://api.testy": ("api.testy:80", "http", b"/"),
        "http://api.test:81/": ("a", "http", b"/"),
        "https://api.test/": ("a", "https", b"/"),
        "HTTP://api.test/x": ("a", "http", b"/x"),
    }
    assert targets == {target: found(target) for target in targets}
    assert targets == {target: found(target) for target in targets}
    sidecar.proxy.directory.tunnel(Origin("http", "api.test", 443))
    for target in ("http:///x", "http://api.test@b.test/", "http://CONNECT api.test:443/"):
        with pytest.raises(Malformed):
            found(target)


async def test_with_endpoints_the_host_the_app_named_is_kept_unless_told_otherwise(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(
        upstreams={
            "kept": {"hosts": ["kept.test"], "endpoints": ["http://10.0.0.1:8080"]},
            "rewritten": {"hosts": ["new.test"], "endpoints": ["http://10.0.0.2:8080"], "rewrite_host": True},
        }
    )
    assert ("kept", "http", "10.0.0.1:8080", b"kept.test") == destination(sidecar, "http://kept.test/")
    assert ("rewritten", "http", "10.0.0.2:8080", b"10.0.0.2:8080") == destination(sidecar, "http://new.test/")


async def test_a_routed_request_names_the_endpoint(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(
        upstreams={
            "stripped": {"route": "/s", "endpoints": ["http://a.test", "https://b.test:444"]},
            "whole": {"route": "/w", "endpoints": ["http://c.test"], "strip_prefix": False},
            "named": {"route": "/n", "hosts": ["*.n.test", "named.test:81"]},
        }
    )
    directory = sidecar.proxy.directory
    found, path = directory.by_route(b"/s/x?y")
    assert b"/x?y" == path
    picks = [pick(found) for _ in range(3)]
    assert ["a.test:80", "b.test:444", "a.test:80"] == [choice.label for choice in picks]
    assert [b"a.test", b"b.test:444", b"a.test"] == [choice.host for choice in picks]
    assert b"/w/x" == directory.by_route(b"/w/x")[1]
    named = pick(directory.by_route(b"/n")[0])
    assert ("named.test:81", b"named.test:81") == (named.label, named.host)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://api.test/", "api.test:443"),
        ("http://api.test:80/", "api.test:443"),
        ("http://api.test:8443/", "api.test:8443"),
        ("https://api.test/", "api.test:443"),
    ],
)
async def test_tls_origination_never_goes_out_in_clear(start_sidecar: Starter, url: str, address: str) -> None:
    sidecar = await start_sidecar(upstreams={"a": {"hosts": ["api.test"], "tls": "originate"}})
    assert ("a", "https", address) == destination(sidecar, url)[:3]


async def test_tls_origination_covers_endpoints_too(start_sidecar: Starter) -> None:
    endpoints = ["http://a.test", "http://b.test:80", "http://c.test:8443", "https://d.test"]
    sidecar = await start_sidecar(upstreams={"a": {"route": "/a", "endpoints": endpoints, "tls": "originate"}})
    expected = [Origin("https", host, port) for host, port in zip("abcd", (443, 443, 8443, 443), strict=True)]
    found, _ = sidecar.proxy.directory.by_route(b"/a")
    assert [origin._replace(host=f"{origin.host}.test") for origin in expected] == [
        pick(found).endpoint.origin for _ in endpoints
    ]


async def test_hosts_beyond_the_label_limit_share_a_label_and_keep_their_own_pool(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(limits={"auto_upstreams": 1})
    assert "a.test:80" == destination(sidecar, "http://a.test/")[0]
    assert ("_other", "http", "b.test:80", b"b.test") == destination(sidecar, "http://b.test/")
    assert ("_other", "http", "c.test:80", b"c.test") == destination(sidecar, "http://c.test/")


async def test_a_connect_is_counted_under_the_upstream_that_lists_its_host(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(upstreams={"a": {"hosts": ["*.api.test:444"]}})
    counted = [sidecar.proxy.directory.tunnel(Origin("http", "x.api.test", port)).upstream.label for port in (444, 443)]
    assert ["a", "x.api.test:443"] == counted
    assert frozenset({443, 444}) == sidecar.proxy.directory.connect_ports


# ---- header fields -----------------------------------------------------------------------------------------------


class Reader(RequestReader):
    """The parser's callbacks without a connection around them."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self._arriving = self._body = self._body_again = self._last = None
        self._head_bytes, self._head_limit, self._replay_limit = 0, 65_536, 65_536
        self._waiting = deque()
        self._held = Held(1 << 20)


def fields(*lines: tuple[bytes, bytes]) -> Request:
    """What is found in the head of a request with these fields."""
    reader = Reader()
    head = b"GET / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n"
    try:
        reader.parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    (request,) = reader._waiting
    return request


def response_fields(*lines: tuple[bytes, bytes]) -> ResponseFields:
    """What is found in the head of a response with these fields."""
    connection = UpstreamConnection(None, SimpleNamespace(watched=set()), Turn(None), 65_536, 65_536, 60, list)
    connection.begin(SimpleNamespace(wake=lambda: None), bodyless=True, deadline=1.0)
    connection.data_received(b"HTTP/1.1 200 OK\r\n" + b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n")
    assert connection.head is not None
    return connection.head


def test_fields_pass_with_their_bytes_their_case_and_their_order() -> None:
    found = fields((b"X-A", b"1"), (b"x-a", b"2"), (b"X-E", b"caf\xe9"))
    assert [b"X-A: 1", b"x-a: 2", b"X-E: caf\xe9"] == found.lines


def test_hop_by_hop_fields_and_those_that_connection_names_stay_here() -> None:
    found = fields(
        (b"Connection", b"close, X-Mine"),
        (b"connection", b"x-yours"),
        *((name, b"v") for name in (b"Keep-Alive", b"TE", b"Proxy-Connection", b"Proxy-Authorization")),
        *((name, b"v") for name in (b"X-Mine", b"X-Yours", b"X-Theirs", b"Upgrade", b"x-sidecar-session")),
        (b"Transfer-Encoding", b"chunked"),
        (b"Host", b"h"),
    )
    assert [b"X-Theirs: v"] == found.lines
    assert (b"h", b"chunked") == (found.host, found.transfer_encoding)


def test_what_the_exchange_needs_to_know_is_found_and_still_passed_on() -> None:
    found = fields((b"Expect", b"100-Continue"), (b"idempotency-key", b"k"), (b"Via", b"1.1 a"), (b"Via", b"1.1 b"))
    assert (True, b"k", b"1.1 a, 1.1 b") == (found.expects_continue, found.idempotency_key, found.via)
    assert [b"Expect: 100-Continue", b"idempotency-key: k", b"Via: 1.1 a", b"Via: 1.1 b"] == found.lines


def test_a_response_loses_its_framing_and_what_its_connection_field_names() -> None:
    found = response_fields(
        (b"Connection", b"X-Hop"),
        (b"X-Hop", b"v"),
        (b"Set-Cookie", b"a"),
        (b"Set-Cookie", b"b"),
        (b"Content-Length", b"7"),
        (b"Content-Type", b"Text/Event-Stream; charset=utf-8"),
        (b"X-Sidecar-Outcome", b"forged"),
    )
    assert [b"Set-Cookie: a", b"Set-Cookie: b", b"Content-Type: Text/Event-Stream; charset=utf-8"] == found.lines
    assert (7, True, False) == (found.content_length, found.event_stream, found.dated)


def test_only_names_between_commas_are_named() -> None:
    lines = [b"X-A: 1", b"X-Ab: 2", b"x-B: 3"]
    assert [b"X-Ab: 2"] == without_named(lines, b" x-a ,X-B,, ")


def test_a_request_head_is_written_anew() -> None:
    head = request_head(b"GET", b"/x", b"h", fields((b"A", b"1")).lines, b"Via: 1.1 me\r\n", b"Content-Length: 0\r\n")
    assert b"GET /x HTTP/1.1\r\nHost: h\r\nA: 1\r\nVia: 1.1 me\r\nContent-Length: 0\r\n\r\n" == head
    assert b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" == request_head(b"GET", b"/", b"h", [], b"", b"")


def test_trailers_cannot_smuggle_framing_routing_or_credentials() -> None:
    given = [(b"X-Sum", b"1"), (b"Content-Length", b"9"), (b"Host", b"x"), (b"Set-Cookie", b"c"), (b"Connection", b"c")]
    assert b"X-Sum: 1\r\n" == trailer_lines(given)


# ---- policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 204, 301, 304, 399])
def test_an_answer_below_400_is_a_success(status: int) -> None:
    assert None is code_of(status)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((400, "VALIDATION_ERROR"), (401, "INVALID_API_KEY"), (403, "INSUFFICIENT_PERMISSIONS"), (404, "NOT_FOUND")),
        *((408, "EXTERNAL_SERVICE_TIMEOUT"), (409, "CONFLICT"), (410, "NOT_FOUND"), (413, "PAYLOAD_TOO_LARGE")),
        *((415, "UNSUPPORTED_CONTENT_TYPE"), (418, "CLIENT_ERROR"), (422, "VALIDATION_ERROR")),
        *((429, "RATE_LIMIT_EXCEEDED"), (451, "CONTENT_POLICY"), (499, "CLIENT_ERROR"), (500, "UPSTREAM_ERROR")),
        *((502, "BAD_GATEWAY"), (503, "TEMPORARY_UNAVAILABLE"), (504, "EXTERNAL_SERVICE_TIMEOUT")),
        *((529, "SERVICE_OVERLOADED"), (599, "UPSTREAM_ERROR")),
    ],
)
def test_every_failing_status_has_one_code_of_the_registry(status: int, code: str) -> None:
    assert code == code_of(status)
    assert code in registry()


def test_a_verdict_is_about_the_request_and_not_about_the_moment() -> None:
    verdicts = {status for status in range(100, 600) if is_verdict(status)}
    assert set(range(400, 500)) - {408, 429} | {501, 505} == verdicts

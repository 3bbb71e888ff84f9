"""How hosts, endpoints, routes and egress entries are written, and their one spelling."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.addresses import (
    Endpoint,
    HostEntry,
    canonical_bind_host,
    canonical_egress_entry,
    canonical_host,
    canonical_route,
    is_loopback,
    join_host_port,
    parse_endpoint,
    parse_host_entry,
)


@pytest.mark.parametrize(
    ("written", "entry"),
    [
        ("a.test", HostEntry("a.test", None, False)),
        ("A.Test.", HostEntry("a.test", None, False)),
        ("a.test:8080", HostEntry("a.test", 8080, False)),
        ("*.a.test", HostEntry("a.test", None, True)),
        ("*.a.test:443", HostEntry("a.test", 443, True)),
        ("my_service", HostEntry("my_service", None, False)),
        ("10.0.0.7:80", HostEntry("10.0.0.7", 80, False)),
        ("::1", HostEntry("::1", None, False)),
        ("[0:0::1]:80", HostEntry("::1", 80, False)),
        ("bücher.test", HostEntry("xn--bcher-kva.test", None, False)),
    ],
)
def test_a_host_entry_is_taken_apart(written: str, entry: HostEntry) -> None:
    assert entry == parse_host_entry(written)
    assert entry == parse_host_entry(str(entry)), "its own spelling means the same"


@pytest.mark.parametrize(
    ("written", "endpoint", "spelled"),
    [
        ("http://a.test", Endpoint("http", "a.test", 80), "http://a.test"),
        ("HTTPS://A.test/", Endpoint("https", "a.test", 443), "https://a.test"),
        ("https://a.test:443", Endpoint("https", "a.test", 443), "https://a.test"),
        ("https://a.test:80", Endpoint("https", "a.test", 80), "https://a.test:80"),
        ("http://[::1]:8080", Endpoint("http", "::1", 8080), "http://[::1]:8080"),
    ],
)
def test_an_endpoint_is_taken_apart(written: str, endpoint: Endpoint, spelled: str) -> None:
    assert endpoint == parse_endpoint(written)
    assert spelled == str(endpoint)


@pytest.mark.parametrize(
    ("parse", "written", "words"),
    [
        (parse_host_entry, "", "the host is missing"),
        (parse_host_entry, "*", "`*` alone"),
        (parse_host_entry, "a*.test", "very beginning"),
        (parse_host_entry, "*.10.0.0.7", "not with an IP address"),
        (parse_host_entry, "http://a.test", "without http://"),
        (parse_host_entry, "user@a.test", "user or password"),
        (parse_host_entry, "a.test/x", "without a path"),
        (parse_host_entry, "a.test:", "1 to 65535"),
        (parse_host_entry, "a.test:0", "1 to 65535"),
        (parse_host_entry, "a.test:٣", "1 to 65535"),
        (parse_host_entry, "a b", "spaces"),
        (parse_host_entry, "a..b", "not a host name"),
        (parse_host_entry, "-a.test", "not a host name"),
        (parse_host_entry, "a" * 64 + ".test", "not a host name"),
        (parse_host_entry, ".".join(["abc"] * 70), "at most 253"),
        (parse_host_entry, "10.0.0", "IPv4"),
        (parse_host_entry, "0x7f.1", "IPv4"),
        (parse_host_entry, "10.0.0.256", "IPv4"),
        (parse_host_entry, "[::1", "closing bracket"),
        (parse_host_entry, "[::1]x", "only a port"),
        (parse_host_entry, "[a]", "IPv6 addresses only"),
        (parse_host_entry, "::zz", "not an IPv6"),
        (parse_host_entry, "fe80::1%eth0", "zone"),
        (parse_host_entry, "☃.test", "no valid ASCII form"),
        (parse_endpoint, "a.test", "begins with http://"),
        (parse_endpoint, "ftp://a.test", "http:// or https:// only"),
        (parse_endpoint, "https://user:word@a.test", "user or password"),
        (parse_endpoint, "https://a.test/v1", "may not have a path"),
        (parse_endpoint, "https://a.test?x", "may not have a query"),
        (parse_endpoint, "https://a.test#x", "may not have a fragment"),
        (parse_endpoint, "https://*.a.test", "belongs in `hosts`"),
        (parse_endpoint, "https://", "the host is missing"),
        (canonical_route, "a", "begins with a slash"),
        (canonical_route, "/a//b", "empty segment"),
        (canonical_route, "//", "empty segment"),
        (canonical_route, "/a/../b", "`.` or `..`"),
        (canonical_route, "/a?b", "query or fragment"),
        (canonical_route, "/a b", "percent-encoded"),
        (canonical_route, "/a%2", "percent-encoded"),
        (canonical_egress_entry, "a.test:80", "a port cannot be given"),
        (canonical_egress_entry, "10.0.0.1/8", "did you mean 10.0.0.0/8?"),
        (canonical_egress_entry, "a/b", "not a network"),
        (canonical_egress_entry, "https://a.test", "without http://"),
        (canonical_bind_host, "", "every interface"),
        (canonical_bind_host, "0.0.0.0:80", "a key of its own"),
    ],
)
def test_what_cannot_be_is_refused_in_words(parse: Callable[[str], object], written: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(written)


@pytest.mark.parametrize(
    ("written", "spelled"),
    [("/", "/"), ("/a", "/a"), ("/a/", "/a"), ("/a/b.c", "/a/b.c"), ("/a%20b", "/a%20b"), ("/:x@y", "/:x@y")],
)
def test_a_route_loses_only_its_last_slash(written: str, spelled: str) -> None:
    assert spelled == canonical_route(written)


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("169.254.169.254", "169.254.169.254"),
        ("FD00::/8", "fd00::/8"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("*.Ads.test", "*.ads.test"),
        ("[::1]", "::1"),
    ],
)
def test_an_egress_entry_has_one_spelling(written: str, spelled: str) -> None:
    assert spelled == canonical_egress_entry(written)


def test_a_listener_may_be_bound_to_an_address_with_a_zone() -> None:
    assert "fe80::1%eth0" == canonical_bind_host("fe80::1%eth0")
    assert "::1" == canonical_bind_host("[::1]")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("::ffff:127.0.0.1", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.7", "localhost.a.test", "fe80::1%eth0")],
)
def test_loopback_is_judged_by_address_and_no_other_name_is_trusted(host: str, expected: bool) -> None:
    assert expected is is_loopback(host)


def test_an_ipv6_host_is_joined_in_brackets() -> None:
    assert ["[::1]:80", "[::1]", "a.test:80"] == [
        join_host_port("::1", 80),
        join_host_port("::1", None),
        join_host_port("a.test", 80),
    ]


@given(st.text(max_size=40))
def test_any_text_is_either_refused_or_has_a_spelling_that_stays(text: str) -> None:
    for canonical in (
        canonical_host,
        canonical_route,
        canonical_egress_entry,
        canonical_bind_host,
        lambda text: str(parse_host_entry(text)),
        lambda text: str(parse_endpoint(text)),
    ):
        try:
            once = canonical(text)
        except ValueError:
            continue
        assert once == canonical(once)

"""`sidecar check --host`: where a host leads and why, and that the proxy would do the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.model import Settings
from sidecar.__main__ import main
from sidecar.cli.whereto import Way, most_specific, ways_to
from sidecar.routing import Router

Captured = pytest.CaptureFixture[str]
PAYMENTS = {
    "hosts": ["api.pay.test", "*.pay.test", "x.pay.test:8443"],
    "endpoints": ["https://a.pay.test", "https://b.pay.test:444"],
    "policy": "careful",
    "operations": [
        {"name": "charge", "methods": ["POST"], "path": "/v1/charges", "policy": "patient"},
        {"name": "rest", "path": "/**"},
    ],
}


def settings(**keys: Any) -> Settings:
    return Settings.model_validate(
        {"policies": {"careful": {"max_attempts": 2}, "once": {"max_attempts": 1}}, "upstreams": {"payments": PAYMENTS}}
        | keys
    )


def way(url: str, **keys: Any) -> Way:
    (found,) = ways_to(url, settings(**keys))
    return found


# ---- which upstream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hit"),
    [
        ("http://api.pay.test", 'upstreams.payments.hosts[0] is "api.pay.test", which matches every port'),
        (
            "http://API.pay.test:99/some?query",
            'upstreams.payments.hosts[0] is "api.pay.test", which matches every port',
        ),
        ("http://b.pay.test", 'upstreams.payments.hosts[1] is "*.pay.test", which matches every port'),
        ("http://x.pay.test:8443", 'upstreams.payments.hosts[2] is "x.pay.test:8443"'),
        ("http://x.pay.test", 'upstreams.payments.hosts[1] is "*.pay.test", which matches every port'),
    ],
)
def test_the_entry_that_hit_is_named(url: str, hit: str) -> None:
    found = way(url)
    assert ("payments", hit) == (found.upstream, found.upstream_because)


def test_a_host_that_nobody_lists_is_served_with_the_defaults() -> None:
    found = way("http://other.test:8080")
    assert (None, "default", ("other.test:8080",), "none") == (found.upstream, found.policy, found.goes_to, found.tls)
    assert "no upstream lists other.test" in found.upstream_because
    assert "its label is other.test:8080" in found.upstream_because


_HOSTS = st.sampled_from(["a.t", "b.a.t", "c.b.a.t", "x.c.b.a.t", "t.a"])
_PORTS = st.sampled_from([0, 80, 443])
_ENTRIES = st.tuples(st.booleans(), _HOSTS, _PORTS).map(
    lambda entry: f"{'*.' if entry[0] else ''}{entry[1]}{f':{entry[2]}' if entry[2] else ''}"
)


@given(st.lists(_ENTRIES, min_size=2, max_size=8, unique=True), _HOSTS, st.sampled_from([80, 443, 99]))
def test_the_entry_that_is_named_is_the_one_the_router_follows(entries: list[str], host: str, port: int) -> None:
    """Each entry in an upstream of its own: the router says which, `most_specific` must agree."""
    one_each = {f"u{index}": {"hosts": [entry]} for index, entry in enumerate(entries)}
    name = Router(Settings.model_validate({"upstreams": one_each})).by_host(host, port)
    if name is None:
        with pytest.raises(ValueError, match="empty"):
            most_specific(tuple(entries), host, port)
    else:
        assert f"u{most_specific(tuple(entries), host, port)[0]}" == name


# ---- how ---------------------------------------------------------------------------------------------------------


def test_https_endpoints_are_reached_over_tls_that_the_sidecar_originates() -> None:
    found = way("http://api.pay.test")
    assert (("a.pay.test:443", "b.pay.test:444"), "originated", "all") == (found.goes_to, found.tls, found.seen)
    assert "upstreams.payments.endpoints says https" in found.how


@pytest.mark.parametrize(
    ("upstream", "url", "goes_to", "tls", "words"),
    [
        ({"hosts": ["h.test"], "tls": "originate"}, "http://h.test", "h.test:443", "originated", "u.tls is originate"),
        (
            {"hosts": ["h.test"], "tls": "originate"},
            "http://h.test:81",
            "h.test:81",
            "originated",
            "where the app said",
        ),
        ({"hosts": ["h.test"]}, "http://h.test", "h.test:80", "none", "in clear"),
        ({"hosts": ["h.test"], "endpoints": ["http://e.test"]}, "http://h.test", "e.test:80", "none", "u.endpoints"),
        (
            {"hosts": ["h.test"], "endpoints": ["http://e.test"], "tls": "originate"},
            "http://h.test",
            "e.test:443",
            "originated",
            "u.tls is originate",
        ),
    ],
)
def test_it_says_where_a_request_goes_over_what_and_why(
    upstream: dict[str, Any], url: str, goes_to: str, tls: str, words: str
) -> None:
    found = way(url, upstreams={"u": upstream})
    assert ((goes_to,), tls) == (found.goes_to, found.tls)
    assert words in found.how


def test_https_is_tunnelled_and_what_that_hides_is_told() -> None:
    found = way("https://api.pay.test")
    assert (("api.pay.test:443",), "app", "connection", ()) == (found.goes_to, found.tls, found.seen, found.operations)
    assert "tunnelled, because" in found.how
    assert "tls: originate" in found.how


def test_the_policy_is_told_with_who_chose_it_and_operations_with_theirs() -> None:
    found = way("http://api.pay.test")
    assert ("careful", "upstreams.payments.policy says so (2 attempts at most)") == (found.policy, found.policy_because)
    assert (
        "charge (POST /v1/charges), policy patient, by upstreams.payments.operations",
        "rest (any method /**), by upstreams.payments.operations",
    ) == found.operations
    once = way("http://h.test", upstreams={"u": {"hosts": ["h.test"], "policy": "once"}})
    assert "(1 attempt at most)" in once.policy_because


@pytest.mark.parametrize(
    ("url", "keys", "words"),
    [
        ("http://other.test", {"egress": {"mode": "configured_only"}}, "EGRESS_DENIED: egress.mode is configured_only"),
        ("https://other.test:8080", {}, "EGRESS_DENIED: CONNECT to port 8080"),
        ("http://169.254.169.254", {}, "link-local or metadata"),
        ("http://bad.test", {"egress": {"deny": ["*.test"]}}, "listed in egress.deny"),
        ("http://127.0.0.1:4141", {}, "this sidecar's admin port"),
        ("http://127.0.0.1:4140", {}, "LOOP_DETECTED"),
        ("http://127.0.0.1:77", {"probes": {"host": "0.0.0.0", "port": 77}}, "this sidecar's probes port"),
    ],
)
def test_what_would_be_refused_is_told_with_its_code(url: str, keys: dict[str, Any], words: str) -> None:
    found = way(url, **keys)
    assert words in (found.refused or "")
    assert ["upstream", "refused"] == [name for name, _ in found.lines()]


@pytest.mark.parametrize("url", ["https://x.pay.test:8443", "https://other.test:444", "https://other.test"])
def test_tunnels_may_go_to_the_ports_of_upstreams(url: str) -> None:
    assert None is way(url).refused


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("SIDECAR") or name == "COLUMNS"]:
        monkeypatch.delenv(name)
    path = tmp_path / "sidecar.yaml"
    path.write_text(json.dumps({"policies": {"careful": {"max_attempts": 2}}, "upstreams": {"payments": PAYMENTS}}))
    return path


GOLDEN = """\
FILE: fine, 1 upstream configured

http://api.pay.test/  (HTTP_PROXY, or this Host)
  upstream   payments, because upstreams.payments.hosts[0] is "api.pay.test", which matches every port
  goes to    a.pay.test:443, b.pay.test:444; as upstreams.payments.endpoints says, over TLS that the sidecar originates, because upstreams.payments.endpoints says https; seen whole
  policy     careful, because upstreams.payments.policy says so (2 attempts at most)
  operation  charge (POST /v1/charges), policy patient, by upstreams.payments.operations
  operation  rest (any method /**), by upstreams.payments.operations

https://api.pay.test/  (HTTPS_PROXY: CONNECT api.pay.test:443)
  upstream   payments, because upstreams.payments.hosts[0] is "api.pay.test", which matches every port
  goes to    api.pay.test:443; tunnelled, because upstreams.payments.intercept is false: the TLS is between the app and the upstream, connecting is retried and measured, nothing inside is seen. For all of it set `intercept: true`, or let the app call http:// and set `tls: originate`
  policy     careful, because upstreams.payments.policy says so (2 attempts at most)
"""


def test_a_host_is_explained_for_both_ways_an_app_can_call_it(file: Path, capsys: Captured) -> None:
    assert 0 == main(["check", "-c", str(file), "--host", "api.pay.test"])
    assert GOLDEN.splitlines() == capsys.readouterr().out.replace(str(file), "FILE").splitlines()


def test_the_explanation_fits_the_width(file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert 0 == main(["check", "-c", str(file), "--host", "api.pay.test"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert 70 >= max(map(len, lines))


def test_it_is_json_for_programs(file: Path, capsys: Captured) -> None:
    assert 0 == main(["check", "-c", str(file), "--host", "http://[::1]:8080/x", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["items"]
    assert ("http://[::1]:8080/", None, ["[::1]:8080"]) == (found["url"], found["upstream"], found["goes_to"])
    assert 0 == main(["check", "-c", str(file), "--json"])
    assert {"file": str(file), "upstreams": 1} == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("host", ["", "bad host", "ftp://x", "user@host", "a:b", "http://", "[::1", "h:0", "ü.test"])
def test_what_is_no_host_is_wrong_use(host: str, file: Path, capsys: Captured) -> None:
    assert 2 == main(["check", "-c", str(file), "--host", host])
    assert capsys.readouterr().err.startswith("sidecar check: --host: ")


@pytest.mark.parametrize(
    "host",
    [
        "http://user:hunter2/x@a.test/",
        "user:hunter2@h://x",
        "user:hunter2",
        "http://user:hunter2?x@a.test",
        "u:hunter2@h",
    ],
)
def test_a_password_in_what_is_no_host_is_not_repeated(host: str, file: Path, capsys: Captured) -> None:
    assert 2 == main(["check", "--config", str(file), "--host", host])
    said = capsys.readouterr()
    assert "hunter2" not in said.err + said.out
    assert "host" in said.err


def test_a_password_in_a_bad_file_is_not_printed(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text("upstreams: {a: {hosts: [a.test], egress_proxy: 'http://user:hunter2 x@corp'}}")
    for arguments in ([], ["--json"]):
        assert 2 == main(["check", "--config", str(file), *arguments])
        said = capsys.readouterr()
        assert "hunter2" not in said.err + said.out
        assert "egress_proxy" in said.err + said.out


def test_a_bad_file_is_told_first(file: Path, capsys: Captured) -> None:
    file.write_text("limts: {}\n")
    assert 2 == main(["check", "-c", str(file), "--host", "a.test"])
    assert "limts" in capsys.readouterr().err


def test_an_intercepted_host_says_so_and_why(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text("upstreams: {api: {hosts: [api.test], intercept: true, operations: [{name: all, path: /**}]}}")
    assert 0 == main(["check", "-c", str(file), "--host", "https://api.test", "--json"])
    (way,) = json.loads(capsys.readouterr().out)["items"]
    assert ("intercepted", "all", ["api.test:443"]) == (way["tls"], way["seen"], way["goes_to"])
    assert "upstreams.api.intercept is true" in way["how"]
    assert way["operations"]

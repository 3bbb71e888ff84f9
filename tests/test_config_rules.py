"""Each rule about a value, and each rule between values: what is refused, and in which words."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from config.checks import exposure_problems
from config.loader import ConfigError, load
from config.model import Settings, Upstream
from config.problems import Problem
from tests.doubles.authority import Authority

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"
PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\nMA==\n-----END PRIVATE KEY-----\n"


def loaded(tmp_path: Path, content: str) -> Settings:
    path = tmp_path / "sidecar.yaml"
    path.write_text(content)
    return load(path, {}).settings


def refused(tmp_path: Path, content: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, content)
    (problem,) = caught.value.problems
    return problem


def upstream(settings: str) -> str:
    return f"upstreams: {{a: {{hosts: [a.test], {settings}}}}}"


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ("version: 1.0", "version", "in quotes"),
        ("version: '1.0'", "version", "three numbers"),
        ("version: '2.0.0'", "version", "version 1"),
        ("version: [1]", "version", "must be text"),
        ("listen: {port: -1}", "listen.port", "must be at least 0"),
        ("listen: {port: 65536}", "listen.port", "must be at most 65535"),
        ("listen: {port: '4140'}", "listen.port", "written without quotes"),
        ("listen: {port: 4140.5}", "listen.port", "must be a whole number"),
        ("listen: {port: true}", "listen.port", "must be a whole number"),
        ("listen: {port: }", "listen.port", "has no value"),
        ("listen: {port: 99999999999999999999}", "listen.port", "must be at most 65535"),
        ("listen: {host: ''}", "listen.host", "every interface"),
        ("listen: {host: '*'}", "listen.host", "0.0.0.0 or ::"),
        ("listen: {host: '127.0.0.1:80'}", "listen.host", "a key of its own"),
        ("listen: {host: 'http://127.0.0.1'}", "listen.host", "without http://"),
        ("listen: [4140]", "listen", "must hold keys of its own"),
        ("probes: {port: 4142}", "probes.host", "required"),
        ("state_dir: ''", "state_dir", "may not be empty"),
        ("state_dir: 5", "state_dir", "must be text"),
        ("shutdown_grace: 0", "shutdown_grace", "must be greater than 0"),
        ("shutdown_grace: .inf", "shutdown_grace", "must be a finite number"),
        ("shutdown_grace: 20 secs", "shutdown_grace", "with its unit, as in 500ms"),
        ("limits: {head_bytes: 1023}", "limits.head_bytes", "must be at least 1024"),
        ("limits: {connections: 0}", "limits.connections", "must be at least 1"),
        ("limits: {tunnels: 0}", "limits.tunnels", "must be at least 1"),
        ("limits: {auto_upstreams: -1}", "limits.auto_upstreams", "must be at least 0"),
        ("limits: {replay_body_bytes: 1MB}", "limits.replay_body_bytes", "without a unit"),
        ("limits: {head_timeout: 0}", "limits.head_timeout", "must be greater than 0"),
        ("egress: {mode: shut}", "egress.mode", "must be one of open, configured_only"),
        ("egress: {deny: 10.0.0.0/8}", "egress.deny", "must be a list; put the text in brackets"),
        ("egress: {deny: [10.0.0.1/8]}", "egress.deny[0]", "did you mean 10.0.0.0/8?"),
        ("egress: {deny: [10.0.0.0/40]}", "egress.deny[0]", "not a network"),
        ("egress: {deny: ['a.test:80']}", "egress.deny[0]", "a port cannot be given"),
        ("egress: {deny: ['*']}", "egress.deny[0]", "`egress.mode: configured_only`"),
        ("egress: {connect_ports: [0]}", "egress.connect_ports[0]", "must be at least 1"),
        ("egress: {connect_ports: [443, 70000]}", "egress.connect_ports[1]", "must be at most 65535"),
        ("egress: {connect_ports: 443}", "egress.connect_ports", "must be a list"),
        ("policies: {a: {attempt_timeout: -1}}", "policies.a.attempt_timeout", "must be greater than 0"),
        ("policies: {_a: {}}", "policies._a", "may not begin with `_`"),
        ("policies: {default: }", "policies.default", "has no value"),
        ("upstreams: [a]", "upstreams", "must hold keys of its own"),
        ("upstreams: {'a b': {hosts: [a.test]}}", "upstreams.a b", "a name has 1 to 63"),
        ("upstreams: {_other: {hosts: [a.test]}}", "upstreams._other", "may not begin with `_`"),
        ("upstreams: {a: }", "upstreams.a", "has no value"),
        ("upstreams: {a: {hosts: a.test}}", "upstreams.a.hosts", "must be a list"),
        ("upstreams: {a: {hosts: [[a.test]]}}", "upstreams.a.hosts[0]", "must be in quotes"),
        ("upstreams: {a: {hosts: [[::1]]}}", "", "text that begins with `:` or `[` is not in quotes"),
        (upstream("route: pay"), "upstreams.a.route", "begins with a slash"),
        (upstream("strip_prefix: 'yes'"), "upstreams.a.strip_prefix", "without quotes"),
        (upstream("strip_prefix: 1"), "upstreams.a.strip_prefix", "must be true or false"),
        (upstream("tls: on"), "upstreams.a.tls", "write `originate`"),
        (upstream("tls: maybe"), "upstreams.a.tls", "must be one of off, originate"),
        (upstream("endpoints: [a.test]"), "upstreams.a.endpoints[0]", "begins with http:// or https://"),
        (
            upstream("timeouts: {connect: '5'}"),
            "upstreams.a.timeouts.connect",
            "must be a number of seconds, written without quotes",
        ),
        (upstream("timeouts: 5"), "upstreams.a.timeouts", "must hold keys of its own"),
        (upstream("max_in_flight: 0"), "upstreams.a.max_in_flight", "must be at least 1"),
        (upstream("client_cert: {cert: a.pem}"), "upstreams.a.client_cert.key", "required"),
        (upstream("policy: none"), "upstreams.a.policy", "no policy of this name"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_words(tmp_path: Path, content: str, key: str, words: str) -> None:
    problem = refused(tmp_path, content)
    assert key == problem.key
    assert words in problem.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no request can ever match"),
        ("{endpoints: [https://a.test]}", "no request can ever match"),
        ("{route: /a}", "add `endpoints`, or a `hosts` entry without `*`"),
        ("{route: /a, hosts: ['*.a.test']}", "add `endpoints`, or a `hosts` entry without `*`"),
    ],
)
def test_an_upstream_must_be_reachable_and_know_where_to_send(tmp_path: Path, content: str, words: str) -> None:
    assert words in refused(tmp_path, f"upstreams: {{a: {content}}}").message


@pytest.mark.parametrize(
    "content",
    [
        "{hosts: ['*.a.test']}",
        "{hosts: [a.test]}",
        "{route: /a, endpoints: [https://a.test]}",
        "{route: /a, hosts: ['*.a.test'], endpoints: [https://a.test]}",
        "{route: /a, hosts: ['*.a.test', 'a.test:8080']}",
    ],
)
def test_an_upstream_that_knows_where_to_send_is_accepted(tmp_path: Path, content: str) -> None:
    assert ["a"] == list(loaded(tmp_path, f"upstreams: {{a: {content}}}").upstreams)


def test_a_route_belongs_to_one_upstream(tmp_path: Path) -> None:
    content = "upstreams:\n  a: {route: /x, hosts: [a.test]}\n  b: {route: /x/, hosts: [b.test]}\n"
    problem = refused(tmp_path, content)
    assert (3, "upstreams.b.route") == (problem.line, problem.key)
    assert "upstream `a` already has this route" in problem.message


def test_a_host_belongs_to_one_upstream_however_it_is_spelled(tmp_path: Path) -> None:
    problem = refused(tmp_path, "upstreams:\n  a: {hosts: [x.test]}\n  b: {hosts: [b.test, X.test.]}\n")
    assert (3, "upstreams.b.hosts[1]") == (problem.line, problem.key)


def test_the_same_host_with_a_port_is_another_entry(tmp_path: Path) -> None:
    content = "upstreams: {a: {hosts: [x.test]}, b: {hosts: ['x.test:8080']}, c: {hosts: ['*.x.test']}}"
    assert ["a", "b", "c"] == list(loaded(tmp_path, content).upstreams)


def test_the_default_policy_always_exists_and_can_be_changed(tmp_path: Path) -> None:
    assert "default" in loaded(tmp_path, "policies: {slow: {}}").policies
    assert 5 == loaded(tmp_path, "policies: {default: {attempt_timeout: 5}}").policies["default"].attempt_timeout


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "sidecar.test", "'::ffff:10.0.0.7'"])
def test_a_listener_beyond_this_machine_may_not_be_an_open_proxy(tmp_path: Path, host: str) -> None:
    problem = refused(tmp_path, f"listen: {{host: {host!s}}}" if "'" in host else f"listen: {{host: '{host}'}}")
    assert "listen.host" == problem.key
    assert "set `egress.mode: configured_only`" in problem.message


def test_a_listener_beyond_this_machine_may_serve_configured_upstreams(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "listen: {host: 0.0.0.0}\negress: {mode: configured_only}\n")
    assert "0.0.0.0" == settings.listen.host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "fe80::1%eth0", "sidecar.test"])
def test_the_admin_port_never_leaves_this_machine(tmp_path: Path, host: str) -> None:
    problem = refused(tmp_path, f"admin: {{host: '{host}'}}\negress: {{mode: configured_only}}\n")
    assert "admin.host" == problem.key
    assert "use `probes`" in problem.message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
def test_every_spelling_of_loopback_is_this_machine(tmp_path: Path, host: str) -> None:
    settings = loaded(tmp_path, f"listen: {{host: '{host}'}}\nadmin: {{host: '{host}'}}\n")
    assert [] == exposure_problems(settings)


def test_probes_may_be_reached_from_elsewhere(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "probes: {host: 0.0.0.0, port: 4142}")
    assert settings.probes is not None
    assert ("0.0.0.0", 4142) == (settings.probes.host, settings.probes.port)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("admin: {port: 4140}", "admin.port"),
        ("listen: {host: localhost, port: 4141}", "admin.port"),
        ("probes: {host: 0.0.0.0, port: 4140}", "probes.port"),
        ("probes: {host: '::', port: 4141}", "probes.port"),
    ],
)
def test_two_listeners_cannot_share_a_port(tmp_path: Path, content: str, key: str) -> None:
    problem = refused(tmp_path, content)
    assert key == problem.key
    assert "give each listener a port of its own" in problem.message


@pytest.mark.parametrize(
    "content",
    [
        "listen: {port: 0}\nadmin: {port: 0}\nprobes: {host: 0.0.0.0, port: 0}\n",
        "listen: {host: 127.0.0.2}\nadmin: {port: 4140}\n",
    ],
)
def test_listeners_that_cannot_collide_are_accepted(tmp_path: Path, content: str) -> None:
    assert loaded(tmp_path, content)


@pytest.mark.parametrize(
    ("setting", "file", "words"),
    [
        ("ca_bundle: {path}", None, "does not exist"),
        ("ca_bundle: {path}", "", "no PEM certificate"),
        ("ca_bundle: {path}", PRIVATE_KEY, "no PEM certificate"),
        ("client_cert: {path}", CERTIFICATE, "no PEM private key"),
        ("client_cert: {path}", PRIVATE_KEY, "no PEM certificate"),
        ("client_cert: {path}", CERTIFICATE + PRIVATE_KEY.replace("PRIVATE", "ENCRYPTED PRIVATE"), "passphrase"),
    ],
)
def test_a_file_that_cannot_do_its_work_is_found_at_once(
    tmp_path: Path, setting: str, file: str | None, words: str
) -> None:
    if file is not None:
        (tmp_path / "some.pem").write_text(file)
    assert words in refused(tmp_path, upstream(setting.format(path=tmp_path / "some.pem"))).message


def test_certificate_and_key_may_be_one_file_or_two(tmp_path: Path) -> None:
    both, certificate, key = tmp_path / "both.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    both.write_text(CERTIFICATE + PRIVATE_KEY)
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    one = loaded(tmp_path, upstream(f"client_cert: {both}, ca_bundle: {certificate}")).upstreams["a"].client_cert
    two = loaded(tmp_path, upstream(f"client_cert: {{cert: {certificate}, key: {key}}}")).upstreams["a"].client_cert
    assert one is not None
    assert two is not None
    assert (both, both) == (one.cert, one.key)
    assert (certificate, key) == (two.cert, two.key)


def test_a_key_of_another_certificate_is_found_before_anybody_connects(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    one, other = authority.issue("a.test"), authority.issue("a.test")
    for section in ("listen", "admin"):
        content = f"{section}: {{tls: {{cert: {one}, key: {other}}}}}\n"
        problem = refused(tmp_path, content)
        assert f"{section}.tls.key" == problem.key
        assert f"the key is not that of the certificate {one}" in problem.message
    assert (
        "upstreams.a.client_cert.key" == refused(tmp_path, upstream(f"client_cert: {{cert: {other}, key: {one}}}")).key
    )


def test_two_files_are_judged_each_under_its_own_key(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text(CERTIFICATE)
    content = upstream(f"client_cert: {{cert: {tmp_path}/cert.pem, key: {tmp_path}/key.pem}}")
    assert "upstreams.a.client_cert.key" == refused(tmp_path, content).key


def test_a_bare_off_is_the_word_and_not_a_falsehood(tmp_path: Path) -> None:
    assert "off" == loaded(tmp_path, upstream("tls: off")).upstreams["a"].tls


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.shutdown_grace = 1  # type: ignore[misc]  # that it cannot be set is the point


@pytest.mark.parametrize(
    "data",
    [
        {"listen": {"host": "0.0.0.0"}},
        {"admin": {"host": "10.0.0.7"}},
        {"upstreams": {"a": {}}},
    ],
)
def test_contradictions_are_refused_without_the_loader_too(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(data)


def test_exposure_is_judged_on_any_settings_even_those_put_together_in_code() -> None:
    exposed = Settings().model_copy(update={"admin": Settings().admin.model_copy(update={"host": "0.0.0.0"})})
    assert ["admin.host"] == [problem.key for problem in exposure_problems(exposed)]


def test_an_upstream_has_working_defaults_of_its_own() -> None:
    plain = Upstream(hosts=("a.test",))
    assert (5, 60, 60) == (plain.timeouts.connect, plain.timeouts.body_idle, plain.timeouts.pool_idle)
    assert ("off", True, None, None) == (plain.tls, plain.strip_prefix, plain.rewrite_host, plain.max_in_flight)

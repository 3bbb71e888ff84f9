"""What may be said about one upstream: breaker, budget, gate, rules, operations, parent proxy, idempotency."""

import base64
from pathlib import Path
from typing import Any

import pytest

from config.egress_proxy import EgressProxy, parse_egress_proxy
from config.loader import ConfigError, load
from config.model import Rule, Settings, Upstream, When
from config.operations import path_regex
from config.problems import Problem

PLAIN = Upstream(hosts=("a.test",))


def settings_of(tmp_path: Path, content: str) -> Settings:
    path = tmp_path / "sidecar.yaml"
    path.write_text(content)
    return load(path, {}).settings


def upstream(tmp_path: Path, settings: str) -> Upstream:
    return settings_of(tmp_path, f"upstreams: {{a: {{hosts: [a.test], {settings}}}}}").upstreams["a"]


def refused(tmp_path: Path, settings: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        upstream(tmp_path, settings)
    (problem,) = caught.value.problems
    return problem


def rule(tmp_path: Path, when: str) -> When:
    return upstream(tmp_path, f"rules: [{{when: {when}, code: BAD_GATEWAY}}]").rules[0].when


def test_a_breaker_has_the_defaults_it_promises() -> None:
    assert {
        "enabled": True,
        "failure_ratio": 0.5,
        "min_volume": 20,
        "failure_threshold": 5,
        "failures_in_a_row": 20,
        "window": 60,
        "open_for": 10,
        "open_for_max": 60,
        "connect_check": True,
        "half_open_probes": 1,
        "success_threshold": 2,
        "slow_after": None,
        "monitor_only": False,
    } == PLAIN.breaker.model_dump()


def test_budget_gate_queue_and_idempotency_have_the_defaults_they_promise() -> None:
    assert {"ratio": 0.2, "window": 10, "min_per_second": 3} == PLAIN.retry_budget.model_dump()
    assert {"enabled": True, "max_queue": 1000} == PLAIN.rate_limit_gate.model_dump()
    assert {
        "enabled": True,
        "header": "Idempotency-Key",
        "inject": False,
        "provider_honours": None,
        "ttl": 86400,
        "provider_window": 86400,
        "max_response_bytes": 65536,
        "caller": None,
    } == PLAIN.idempotency.model_dump()
    assert (0, None, None, "strip", "participate") == (
        PLAIN.max_queue,
        PLAIN.subsystem,
        PLAIN.fallback,
        PLAIN.fallback_credentials,
        PLAIN.propagation,
    )
    assert ((), (), ()) == (PLAIN.rules, PLAIN.operations, PLAIN.egress_proxy)


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ("breaker: {failure_ratio: 0}", "breaker.failure_ratio", "must be greater than 0"),
        ("breaker: {failure_ratio: 1.1}", "breaker.failure_ratio", "must be at most 1"),
        ("breaker: {min_volume: 0}", "breaker.min_volume", "must be at least 1"),
        ("breaker: {window: 0}", "breaker.window", "must be greater than 0"),
        ("breaker: {half_open_probes: 0}", "breaker.half_open_probes", "must be at least 1"),
        ("breaker: {slow_after: 0}", "breaker.slow_after", "must be greater than 0"),
        ("breaker: {timeout: 60}", "breaker.timeout", "unknown key"),
        ("breaker: {open_for: 600}", "breaker.open_for_max", "must be at least open_for (600)"),
        ("breaker: {open_for_max: 5}", "breaker.open_for_max", "must be at least open_for (10)"),
        ("retry_budget: {ratio: 20}", "retry_budget.ratio", "must be at most 1"),
        ("retry_budget: {min_per_second: -1}", "retry_budget.min_per_second", "must be at least 0"),
        ("rate_limit_gate: {max_queue: -1}", "rate_limit_gate.max_queue", "must be at least 0"),
        ("max_queue: -1", "max_queue", "must be at least 0"),
        ("max_queue: 5", "max_queue", "nothing ever waits without `max_in_flight`"),
        ("idempotency: {header: 'a b'}", "idempotency.header", "the name of a header"),
        ("idempotency: {provider_honours: maybe}", "idempotency.provider_honours", "must be true or false"),
        ("propagation: forwards", "propagation", "must be one of participate, forward, strip"),
        ("fallback_credentials: drop", "fallback_credentials", "must be one of strip, keep"),
        ("subsystem: 'a b'", "subsystem", "a name has 1 to 63"),
    ],
)
def test_a_protection_that_cannot_be_meant_is_refused_in_words(
    tmp_path: Path, settings: str, key: str, words: str
) -> None:
    problem = refused(tmp_path, settings)
    assert f"upstreams.a.{key}" == problem.key
    assert words in problem.message


@pytest.mark.parametrize(
    "settings",
    [
        "breaker: {failure_ratio: 1, open_for: 60}",
        "retry_budget: {ratio: 0, min_per_second: 0}",
        "rate_limit_gate: {max_queue: 0}",
        "max_in_flight: 1, max_queue: 1",
        "breaker: {slow_after: null}",
        "idempotency: {provider_honours: true, header: X-Request-Key}",
    ],
)
def test_a_protection_at_the_very_edge_is_accepted(tmp_path: Path, settings: str) -> None:
    assert ("a.test",) == upstream(tmp_path, settings).hosts


def test_it_is_known_whether_somebody_chose_the_policy(tmp_path: Path) -> None:
    assert ("default", None) == (PLAIN.policy, PLAIN.chosen_policy)
    chosen = upstream(tmp_path, "policy: default")
    assert ("default", "default") == (chosen.policy, chosen.chosen_policy)


# ---- Rules


@pytest.mark.parametrize(
    ("when", "status", "meant"),
    [
        ("{status: 503}", (503,), {503}),
        ("{status: [502, 503]}", (502, 503), {502, 503}),
        ("{status: 5xx}", ("5xx",), set(range(500, 600))),
        ("{status: [429, 5XX]}", (429, "5xx"), {429, *range(500, 600)}),
        ("{status: 200}", (200,), {200}),
        ("{status: [999, 6xx]}", (999, "6xx"), {999, *range(600, 700)}),
        ("{header: {x: y}}", (), set()),
    ],
)
def test_a_status_is_a_number_a_class_or_a_list(
    tmp_path: Path, when: str, status: tuple[Any, ...], meant: set[int]
) -> None:
    found = rule(tmp_path, when)
    assert status == found.status
    assert meant == set(found.statuses)


def test_header_names_are_kept_in_lower_case_and_values_as_written(tmp_path: Path) -> None:
    assert {"x-overloaded": "Yes", "retry-after": "*"} == dict(
        rule(tmp_path, "{header: {X-Overloaded: 'Yes', Retry-After: '*'}}").header
    )


def test_a_json_value_is_a_scalar_or_a_list_of_them(tmp_path: Path) -> None:
    when = rule(tmp_path, "{json: {error.type: busy, errors.0.code: [1, 2.5, true, null, x], ok: false, e: null}}")
    assert {
        "error.type": ("busy",),
        "errors.0.code": (1, 2.5, True, None, "x"),
        "ok": (False,),
        "e": (None,),
    } == dict(when.json)


def test_an_exception_is_a_network_code_or_a_list_of_them(tmp_path: Path) -> None:
    assert ("CONNECTION_RESET",) == rule(tmp_path, "{exception: CONNECTION_RESET}").exception
    assert ("DNS_FAILURE", "TLS_FAILURE") == rule(tmp_path, "{exception: [DNS_FAILURE, TLS_FAILURE]}").exception


@pytest.mark.parametrize(
    ("when", "key", "words"),
    [
        ("{}", "when", "says nothing"),
        ("{status: }", "when", "says nothing"),
        ("{status: []}", "when", "says nothing"),
        ("{status: 99}", "when.status", "a number from 100 to 999"),
        ("{status: '503'}", "when.status", "a number from 100 to 999"),
        ("{status: [503, 0xx]}", "when.status[1]", "as in 5xx"),
        ("{status: true}", "when.status", "a number from 100 to 999"),
        ("{header: {'a b': x}}", "when.header.a b", "the name of a header"),
        ("{header: {x-overloaded: true}}", "when.header.x-overloaded", "must be text; put it in quotes"),
        ("{json: {a..b: 1}}", "when.json.a..b", "keys joined by dots"),
        ("{json: {a: {b: 1}}}", "when.json.a", "must be text, a number, true, false or null"),
        ("{json: {a: [[1]]}}", "when.json.a[0]", "must be text, a number, true, false or null"),
        ("{exception: NETWORK_TIMEOT}", "when.exception", "must be one of DNS_FAILURE"),
        ("{exception: BAD_GATEWAY}", "when.exception", "must be one of DNS_FAILURE"),
        ("{exception: CONNECTION_RESET, status: 500}", "when", "`exception` means there was no answer"),
        ("{body: x}", "when.body", "unknown key; the keys here are status, header, json, exception"),
    ],
)
def test_a_rule_that_can_never_match_is_refused_in_words(tmp_path: Path, when: str, key: str, words: str) -> None:
    problem = refused(tmp_path, f"rules: [{{when: {when}, code: BAD_GATEWAY}}]")
    assert f"upstreams.a.rules[0].{key}" == problem.key
    assert words in problem.message


def test_the_nearest_network_code_is_suggested(tmp_path: Path) -> None:
    assert "NETWORK_TIMEOUT" == refused(tmp_path, "rules: [{when: {exception: NETWORK_TIMEOT}, code: X}]").nearest


def test_a_rule_needs_both_of_its_keys(tmp_path: Path) -> None:
    assert "upstreams.a.rules[0].code" == refused(tmp_path, "rules: [{when: {status: 500}}]").key
    assert "upstreams.a.rules[0].when" == refused(tmp_path, "rules: [{code: BAD_GATEWAY}]").key


def test_rules_may_be_global(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "rules: [{when: {status: 500}, code: DATABASE_CONNECTION_ERROR}]")
    assert (Rule(when=When(status=(500,)), code="DATABASE_CONNECTION_ERROR"),) == settings.rules


# ---- Operations


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (
            "/v1/charges",
            ["/v1/charges"],
            ["/v1/charges/", "/v1/chargesX", "/v1/charges/1", "/V1/charges", "/xv1/charges"],
        ),
        ("/v1/charges/{id}", ["/v1/charges/1", "/v1/charges/%2F"], ["/v1/charges/", "/v1/charges/1/refund"]),
        ("/v1/*/refund", ["/v1/ch_1/refund"], ["/v1//refund", "/v1/a/b/refund"]),
        ("/v1/**", ["/v1", "/v1/", "/v1/a", "/v1/a/b/c"], ["/v1a", "/v2/a", "/"]),
        ("/**", ["/", "/a", "/a/b"], []),
        ("/", ["/"], ["/a"]),
        ("/v1/", ["/v1/"], ["/v1"]),
        ("/m/{model}:generate", ["/m/pro-1:generate"], ["/m/:generate", "/m/a/b:generate", "/m/pro:generateX"]),
        ("/f/{name}.{kind}", ["/f/a.b"], ["/f/ab"]),
        ("/a.b", ["/a.b"], ["/aXb"]),
    ],
)
def test_a_path_pattern_matches_what_it_says(pattern: str, matching: list[str], others: list[str]) -> None:
    found = path_regex(pattern)
    assert matching == [path for path in (*matching, *others) if found.fullmatch(path)]


@pytest.mark.parametrize(
    ("operation", "key", "words"),
    [
        ("{path: /x}", "name", "required"),
        ("{name: 'a b'}", "name", "a name has 1 to 63"),
        ("{name: x, path: v1}", "path", "begins with a slash"),
        ("{name: x, path: '/v1?a=1'}", "path", "without its query"),
        ("{name: x, path: /v1//x}", "path", "empty segment"),
        ("{name: x, path: /v1/../x}", "path", "`.` or `..`"),
        ("{name: x, path: /v1/**/x}", "path", "only be the last segment"),
        ("{name: x, path: /v1/a**}", "path", "a segment of its own"),
        ("{name: x, path: '/v1/{}'}", "path", "a name in braces"),
        ("{name: x, path: '/v1/{id'}", "path", "a name in braces"),
        ("{name: x, path: '/v1/{a}{b}'}", "path", "side by side"),
        ("{name: x, path: '/v1/{a}*'}", "path", "side by side"),
        ("{name: x, path: '/v1/a b'}", "path", "percent-encoded"),
        ("{name: x, methods: POST}", "methods", "must be a list"),
        ("{name: x, methods: ['PO ST']}", "methods[0]", "a method is one word"),
        ("{name: x, methds: [POST]}", "methds", "unknown key"),
        ("{name: x, stage: _s}", "stage", "may not begin with `_`"),
    ],
)
def test_an_operation_that_cannot_be_is_refused_in_words(tmp_path: Path, operation: str, key: str, words: str) -> None:
    problem = refused(tmp_path, f"operations: [{operation}]")
    assert f"upstreams.a.operations[0].{key}" == problem.key
    assert words in problem.message


def test_a_misspelled_key_within_a_list_gets_the_nearest_one(tmp_path: Path) -> None:
    assert "methods" == refused(tmp_path, "operations: [{name: x, methds: [POST]}]").nearest


def test_an_operation_needs_only_a_name(tmp_path: Path) -> None:
    (operation,) = upstream(tmp_path, "operations: [{name: anything}]").operations
    assert ((), "/**", None, None, None) == (
        operation.methods,
        operation.path,
        operation.stage,
        operation.policy,
        operation.retry_non_idempotent,
    )


def test_methods_are_written_in_any_case(tmp_path: Path) -> None:
    assert ("POST", "GET") == upstream(tmp_path, "operations: [{name: x, methods: [post, Get]}]").operations[0].methods


# ---- Parent proxies


def test_a_parent_proxy_is_one_or_several_or_none(tmp_path: Path) -> None:
    assert () == upstream(tmp_path, "egress_proxy: null").egress_proxy
    assert (EgressProxy("corp.test", 3128),) == upstream(tmp_path, "egress_proxy: http://Corp.test:3128/").egress_proxy
    assert (EgressProxy("a.test", 1), EgressProxy("::1", 2)) == upstream(
        tmp_path, "egress_proxy: ['http://a.test:1', 'HTTP://[::1]:2']"
    ).egress_proxy


def test_the_password_of_a_parent_proxy_can_be_used_but_not_seen(tmp_path: Path) -> None:
    found = upstream(tmp_path, "egress_proxy: 'http://me:p%40ss:w@corp.test:3128'")
    (proxy,) = found.egress_proxy
    assert "Basic " + base64.b64encode(b"me:p@ss:w").decode() == proxy.authorization
    assert "corp.test:3128" == proxy.label
    assert ["http://REDACTED:REDACTED@corp.test:3128"] == found.model_dump(mode="json")["egress_proxy"]
    for shown in (str(proxy), repr(proxy), repr(found), found.model_dump_json()):
        assert "p@ss" not in shown
        assert "p%40ss" not in shown


def test_a_parent_proxy_without_a_user_needs_no_authorization() -> None:
    proxy = parse_egress_proxy("http://[2001:db8::1]:3128")
    assert (None, "http://[2001:db8::1]:3128") == (proxy.authorization, str(proxy))
    assert proxy is parse_egress_proxy(proxy)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("corp.test:3128", "written as http://host:port"),
        ("https://corp.test:3128", "plain http"),
        ("socks5://corp.test:1080", "plain http"),
        ("http://corp.test", "needs its port"),
        ("http://corp.test:0", "needs its port"),
        ("http://corp.test:70000", "needs its port"),
        ("http://:3128", "the host is missing"),
        ("http://corp.test:3128/path", "no path"),
        ("http://corp.test:3128?x=1", "no path"),
        ("http://me@corp.test:3128", "user and password"),
        ("http://me:a@b@corp.test:3128", "%40"),
        ("http://m%3Ae:pw@corp.test:3128", "may not contain a colon"),
        ("http://me:p%0Aw@corp.test:3128", "control character"),
        ("5", "written as http://host:port"),
    ],
)
def test_a_parent_proxy_that_cannot_be_is_refused_in_words(tmp_path: Path, url: str, words: str) -> None:
    problem = refused(tmp_path, f"egress_proxy: '{url}'")
    assert "upstreams.a.egress_proxy" == problem.key
    assert words in problem.message


@pytest.mark.parametrize("url", ["user:hunter2@corp:3128", "http:/user:hunter2@corp", "https://user:hunter2@corp:1"])
def test_the_password_of_a_misspelled_parent_proxy_is_not_repeated(tmp_path: Path, url: str) -> None:
    assert "hunter2" not in str(refused(tmp_path, f"egress_proxy: ['{url}']"))


@pytest.mark.parametrize(
    ("listeners", "url"),
    [
        ("", "http://127.0.0.1:4140"),
        ("", "http://localhost:4141"),
        ("listen: {host: localhost}\n", "http://127.0.0.1:4140"),
        ("probes: {host: 0.0.0.0, port: 9000}\n", "http://127.0.0.7:9000"),
        ("probes: {host: '::', port: 9000}\n", "http://[::1]:9000"),
    ],
)
def test_a_parent_proxy_may_not_be_the_sidecar_itself(tmp_path: Path, listeners: str, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(
            tmp_path, f"{listeners}upstreams: {{a: {{hosts: [a.test], egress_proxy: ['http://x:1', '{url}']}}}}"
        )
    (problem,) = caught.value.problems
    assert "upstreams.a.egress_proxy" == problem.key
    assert "entry 2 is the sidecar's own" in problem.message


@pytest.mark.parametrize("url", ["http://127.0.0.1:3128", "http://10.0.0.7:4140", "http://127.0.0.2:4140"])
def test_a_parent_proxy_elsewhere_is_accepted(tmp_path: Path, url: str) -> None:
    assert 1 == len(upstream(tmp_path, f"egress_proxy: '{url}'").egress_proxy)

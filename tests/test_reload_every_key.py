"""Every key there is, changed by one reload: it is in force where it is used and nothing of the old value is left, or the
reload says that it needs a restart. A key that is new in the model has to be entered here."""

from __future__ import annotations

import asyncio
import gc
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from config.keys import every_key
from config.model import Settings
from sidecar.upstream.endpoints import UpstreamState
from telemetry.logs import LEVELS
from tests.conftest import Running, Starter
from tests.doubles.authority import Authority
from tests.doubles.letters import store


class Pair(tuple[Any, Any]):
    """A value before the reload, and after it."""


def to(before: Any, after: Any) -> Pair:
    return Pair((before, after))


# Numbers that nothing else is likely to have: should one of them be found after the reload, somebody has kept a copy.
POLICY = {
    "name": to("name before", "name after"),
    "description": to("described before", "described after"),
    "enabled": to(True, False),
    "max_attempts": to(7, 8),
    "backoff_type": to("linear", "fixed"),
    "base_delay": to(0.013107, 0.0132),
    "multiplier": to(1.131077, 1.132),
    "min_delay": to(0.00131707, 0.00132),
    "max_delay": to(7.131077, 7.132),
    "jitter_type": to("additive", "decorrelated"),
    "jitter_amount": to(0.131077, 0.132),
    "jitter_min": to(0.023107, 0.0),
    "jitter_max": to(0.033107, 0.0),
    "respect_retry_after": to(True, False),
    "retry_after_ceiling": to(231.507, 232.5),
    "attempt_timeout": to(11.131077, 11.132),
    "total_timeout": to(41.131077, 41.132),
    "retry_status_codes": to([503], [502]),
    "retryable_errors": to(["BAD_GATEWAY"], ["UPSTREAM_ERROR"]),
    "retry_non_idempotent": to(False, True),
}
GLOBAL_POLICY = {
    name: Pair(value * 2 if isinstance(value, float) and value < 0.4 else value for value in pair)
    for name, pair in POLICY.items()
}
WHEN = {
    "status": to([513], [514]),
    "header": to({"x-rule-before": "1"}, {"x-rule-after": "2"}),
    "json": to({"place.before": "1"}, {"place.after": "2"}),
}
UPSTREAM: dict[str, Any] = {
    "hosts": to(["host-before.test"], ["host-after.test"]),
    "route": to("/route-before", "/route-after"),
    "strip_prefix": to(True, False),
    "rewrite_host": to(True, False),
    "endpoints": to(["http://endpoint-before.test:81"], ["http://endpoint-after.test:82"]),
    "tls": to("off", "originate"),
    "intercept": to(False, True),
    "insecure_skip_verify": to(True, False),
    "egress_proxy": to("http://proxy-before.test:83", "http://proxy-after.test:84"),
    "subsystem": to("subsystem-before", "subsystem-after"),
    "policy": to("p", "patient"),
    "timeouts": {"connect": to(3.131077, 3.132), "body_idle": to(33.131077, 33.132), "pool_idle": to(43.13107, 43.132)},
    "max_in_flight": to(1_313_107, 132),
    "max_queue": to(1_313_207, 133),
    "breaker": {
        "enabled": to(True, False),
        "failure_ratio": to(0.413107, 0.42),
        "min_volume": to(1_313_307, 22),
        "failure_threshold": to(1_313_407, 6),
        "failures_in_a_row": to(1_313_507, 21),
        "window": to(71.131077, 72),
        "open_for": to(13.131077, 13.2),
        "open_for_max": to(73.131077, 74),
        "connect_check": to(True, False),
        "half_open_probes": to(1_313_607, 2),
        "success_threshold": to(1_313_707, 3),
        "slow_after": to(9.131077, 9.2),
        "monitor_only": to(False, True),
    },
    "retry_budget": {"ratio": to(0.213107, 0.22), "window": to(15.131077, 15.2), "min_per_second": to(5.131077, 5.2)},
    "rate_limit_gate": {"enabled": to(True, False), "max_queue": to(1_313_807, 1001)},
    "idempotency": {
        "enabled": to(True, False),
        "header": to("x-key-before", "x-key-after"),
        "caller": to("x-caller-before", "x-caller-after"),
        "inject": to(False, True),
        "provider_honours": to(True, False),
        "ttl": to(81_131.07, 81_132),
        "provider_window": to(82_131.07, 82_132),
        "max_response_bytes": to(1_314_107, 65_537),
    },
    "dead_letter": {
        "enabled": to(True, False),
        "methods": to(["POST"], ["PUT"]),
        "codes": to(["UPSTREAM_ERROR"], ["BAD_GATEWAY"]),
        "respond": to("error", "accepted"),
        "keep_headers": to(["x-kept-before"], ["x-kept-after"]),
        "max_body_bytes": to(1_314_207, 65_538),
        "max_response_bytes": to(1_314_307, 65_539),
        "dedupe_window": to(61.131077, 61.2),
        "redact_paths": to(["/secret-before/{id}"], ["/secret-after/{id}"]),
    },
    "replay": {
        "credentials": to("environment", "live"),
        "single_credential": to(False, True),
        "environment": to({"x-env-before": "A_BEFORE"}, {"x-env-after": "AFTER"}),
        "auto": to("off", "on_close"),
        "every": to(71.07, 72.0),
        "require_remediation": to("all", "none"),
        "max_replays": to(1_314_407, 7),
        "stale_after": to(83_131.07, 83_132),
        "rate": to(9.231077, 9.3),
        "concurrency": to(131, 132),
        "lease": to(301.131077, 302),
    },
    "outbox": {
        "enabled": to(True, False),
        "policy": to("p", "patient"),
        "policies": to({"BAD_GATEWAY": "p"}, {"BAD_GATEWAY": "patient"}),
        "unknown": to("hold", "resend"),
        "max_response_bytes": to(13_147, 13_148),
        "max_attempts": to(1_314_507, 23),
        "max_lookups": to(1_314_607, 13),
        "concurrency": to(133, 134),
        "notification_id": to({"header": "x-id-before"}, {"json": "id.after"}),
        "reconcile": {
            "method": to("GET", "HEAD"),
            "url": to("http://lookup-before.test/{key}", "http://lookup-after.test/{key}"),
            "delivered_when": {"status": to(213, 214)},
        },
        "keep": to(84_131.07, 84_132),
    },
    "propagation": to("participate", "forward"),
    "fallback": to("v", "w"),
    "fallback_credentials": to("strip", "keep"),
    "fallback_headers": to(["x-passed-before"], ["x-passed-after"]),
    "rules": [{"when": WHEN, "code": to("MINE", "BAD_GATEWAY")}],
    "operations": [
        {
            "name": to("operation-before", "operation-after"),
            "methods": to(["GET"], ["POST"]),
            "path": to("/path-before", "/path-after"),
            "stage": to("stage-before", "stage-after"),
            "policy": to("p", "patient"),
            "retry_non_idempotent": to(False, True),
        }
    ],
}
KEYS: dict[str, Any] = {
    "version": to("1.0.7", "1.0.8"),
    "listen": {"host": to("127.0.0.1", "::1"), "port": to(0, 4999), "reuse_port": to(False, True)},
    "admin": {
        "host": to("127.0.0.1", "::1"),
        "port": to(0, 4998),
        "audit_reads": to(False, True),
        "audit_keep": to(91_071, 92_071),
    },
    "probes": {"host": to("127.0.0.1", "::1"), "port": to(0, 4997)},
    "shutdown_grace": to(21.131077, 0.2),
    "limits": {
        "replay_body_bytes": to(1_315_107, 70_001),
        "buffer_response_bytes": to(1_315_207, 70_002),
        "memory_bytes": to(1_315_907, 100_000_003),
        "auto_upstreams": to(1_315_307, 73),
        "connections": to(1_315_407, 998),
        "admin_connections": to(127, 126),
        "tunnels": to(1_315_507, 75),
        "head_bytes": to(1_315_607, 70_003),
        "head_timeout": to(16.131077, 16.2),
        "keepalive_timeout": to(76.131077, 76.2),
        "tunnel_idle_timeout": to(306.131077, 306),
        "tunnel_total_timeout": to(406.131077, 406),
        "workflow_ttl": to(3_606.13107, 3_606),
        "workflows": to(1_315_707, 77),
    },
    "egress": {
        "mode": to("open", "configured_only"),
        "allow": to(["allowed-before.test"], ["allowed-after.test"]),
        "deny": to(["denied-before.test"], ["denied-after.test"]),
        "connect_ports": to([64_131], [64_132]),
    },
    "retries_enabled": to(True, False),
    "global_defaults": GLOBAL_POLICY,
    "policies": {"p": POLICY},
    "stages": to({"stage-before": 1_315_807}, {"stage-after": 3}),
    "rules": [{"when": WHEN, "code": to("UPSTREAM_ERROR", "BAD_GATEWAY")}],
    "error_codes": {
        "MINE": {
            "category": to("PERMANENT", "TRANSIENT"),
            "severity": to("low", "high"),
            "retry": to("fatal", "retryable"),
            "status": to(417, 418),
            "description": to("what before", "what after"),
            "causes": to(["cause before"], ["cause after"]),
            "resolution": to("do before", "do after"),
            "examples": to(["example before"], ["example after"]),
            "related": to(["BAD_GATEWAY"], ["NOT_FOUND"]),
            "policy": to("p", "patient"),
        }
    },
    "dead_letter": {
        "max_bytes": to(1_316_107_000, 1_316_108_000),
        "min_free_bytes": to(1_316_207, 1_316_208),
        "retention": to(91_131_000.07, 91_132_000),
        "verify_every": to(94_321.07, 95_432),
        "keep_completed": to(92_131.07, 92_132),
        "notify_url": to("http://notify-before.test/x", "http://notify-after.test/x"),
        "notify_window": to(93.131077, 93.2),
    },
    "telemetry": {
        "slow_threshold": to(1.931077, 1.94),
        "sessions": to(1_316_307, 81),
        "sessions_ttl": to(94_131.07, 94_132),
        "healthy_sample": to(1_316_407, 83),
        "redact_query": to(["query-before"], ["query-after"]),
        "redact_paths": to(["/path-secret-before/{x}"], ["/path-secret-after/{x}"]),
        "own_otlp": to(False, True),
        "log": {"format": to("json", "text"), "level": to("info", "warn"), "access": to(False, True)},
        "events": {"max_bytes": to(1_316_507, 1_316_508), "keep": to(5, 6), "ttl": to(95_131.07, 95_132)},
    },
    "upstreams": {
        "u": UPSTREAM,
        **{name: {"endpoints": ["https://127.0.0.1:9"], "route": f"/{name}"} for name in "vw"},
    },
    "subsystem_mappings": to(
        {"subsystem-before": {"operation-before": {"default": "p"}}},
        {"subsystem-after": {"operation-after": {"default": "patient"}}},
    ),
}
# Where the others of their section are: a rule has these or other conditions; files that exist only with TLS.
WITH_THE_OTHERS = {
    "rules.[].when.exception",
    "upstreams.<name>.rules.[].when.exception",
    "listen.tls",
    "listen.tls.cert",
    "listen.tls.key",
    "listen.auth",
    "listen.auth.users",
    "admin.tls",
    "admin.tls.cert",
    "admin.tls.key",
    "upstreams.<name>.outbox.notification_id.header",
    "upstreams.<name>.outbox.notification_id.json",
}
AT_START = (
    "limits.admin_connections",
    "listen.",
    "admin.host",
    "admin.port",
    "probes.",
    "state_dir",
    "telemetry.events.",
)


def u(sidecar: Running) -> UpstreamState:
    return sidecar.proxy.directory.configured["u"]


def policy(sidecar: Running) -> Any:
    return u(sidecar).rules.choice._named["p"].policy


def shipped(sidecar: Running) -> Any:
    return sidecar.proxy.directory.configured["v"].rules.choice.before(None).policy


def outbox(sidecar: Running) -> Any:
    return sidecar.proxy.kept.outbox_terms_of("u").outbox


def letters(sidecar: Running) -> Any:
    return sidecar.proxy.kept.terms_of("u")


def breaker(sidecar: Running) -> Any:
    return next(iter(u(sidecar).breakers()))[1]._settings


def operation(sidecar: Running) -> Any:
    (one,) = u(sidecar).rules.choice.operations._named.values()
    return one


def mine(sidecar: Running) -> Any:
    return u(sidecar).classifier._known["MINE"]


# Values that are not told from others by looking at them, and those that are kept in another form: seen where they are
# used.
SEEN: dict[str, Callable[[Running], Any]] = {
    "version": lambda s: s.proxy.settings.version,
    "admin.audit_keep": lambda s: s.proxy.kept.durable._audit_keep(),
    "admin.audit_reads": lambda s: s.api.changes._proxy.settings.admin.audit_reads,
    "egress.mode": lambda s: "configured_only" if s.proxy.dialler._egress.configured_only else "open",
    "retries_enabled": lambda s: s.proxy.retries_enabled,
    **{
        f"{section}.{name}": lambda s, holder=holder, name=name: getattr(holder(s), name)  # type: ignore[misc]
        for section, holder in (("policies.<name>", policy), ("global_defaults", shipped))
        for name in (
            "enabled max_attempts backoff_type jitter_type respect_retry_after retry_status_codes retryable_errors "
            "retry_non_idempotent"
        ).split()
    },
    "rules.[].code": lambda s: u(s).classifier._rules[1].code,
    "rules.[].when.status": lambda s: tuple(u(s).classifier._rules[1].statuses),
    **{
        f"error_codes.<name>.{name}": lambda s, name=name: getattr(mine(s), name)  # type: ignore[misc]
        for name in ("category", "severity", "retry", "status", "related", "policy")
    },
    "telemetry.sessions": lambda s: s.proxy.signals.sessions.ring.capacity,
    "telemetry.own_otlp": lambda s: s.proxy.settings.telemetry.own_otlp,
    "telemetry.log.format": lambda s: s.log._format.__name__.removeprefix("_"),
    "telemetry.log.level": lambda s: LEVELS[s.log._least],
    "telemetry.log.access": lambda s: s.proxy.signals._access,
    "upstreams.<name>.strip_prefix": lambda s: s.proxy.directory.by_route(b"/route-after/x")[1] == b"/x",
    "upstreams.<name>.tls": lambda s: "originate" if u(s).origins[0].scheme == "https" else "off",
    "upstreams.<name>.policy": lambda s: u(s).rules.choice.before(None).id,
    **{
        f"upstreams.<name>.{name}": lambda s, name=name: getattr(u(s).settings, name)  # type: ignore[misc]
        for name in "rewrite_host intercept insecure_skip_verify propagation fallback_credentials".split()
    },
    "upstreams.<name>.retry_budget.min_per_second": lambda s: round(u(s).budget._floor / u(s).budget._window, 6),
    "upstreams.<name>.fallback": lambda s: u(s).fallback.upstream.name,
    **{
        f"upstreams.<name>.breaker.{name}": lambda s, name=name: getattr(breaker(s), name)  # type: ignore[misc]
        for name in ("enabled", "connect_check", "monitor_only")
    },
    "upstreams.<name>.rate_limit_gate.enabled": lambda s: u(s).turns.gate._enabled,
    **{
        f"upstreams.<name>.idempotency.{name}": lambda s, name=name: getattr(letters(s).idempotency, name)  # type: ignore[misc]
        for name in ("enabled", "inject", "provider_honours")
    },
    **{
        f"upstreams.<name>.dead_letter.{name}": lambda s, name=name: getattr(letters(s).dead_letter, name)  # type: ignore[misc]
        for name in ("enabled", "methods", "codes", "respond")
    },
    **{
        f"upstreams.<name>.replay.{name}": lambda s, name=name: getattr(letters(s).replay, name)  # type: ignore[misc]
        for name in "credentials single_credential auto every require_remediation concurrency".split()
    },
    **{
        f"upstreams.<name>.outbox.{name}": lambda s, name=name: getattr(outbox(s), name)  # type: ignore[misc]
        for name in ("enabled", "policy", "policies", "unknown", "concurrency")
    },
    "upstreams.<name>.outbox.reconcile.method": lambda s: outbox(s).reconcile.method,
    "upstreams.<name>.outbox.reconcile.delivered_when.status": lambda s: outbox(s).reconcile.delivered_when.status,
    "upstreams.<name>.rules.[].code": lambda s: u(s).classifier._rules[0].code,
    "upstreams.<name>.rules.[].when.status": lambda s: tuple(u(s).classifier._rules[0].statuses),
    **{
        f"upstreams.<name>.operations.[].{name}": lambda s, name=name: getattr(operation(s), name)  # type: ignore[misc]
        for name in ("methods", "policy", "retry_non_idempotent")
    },
}


def files(tmp_path: Path) -> dict[str, Any]:
    """Pairs for the keys that name files, which have to exist."""
    authority = Authority(tmp_path, "authority")
    before, after = (authority.issue("u.test").rename(tmp_path / f"client-{word}.pem") for word in ("before", "after"))
    bundles = [tmp_path / f"bundle-{word}.pem" for word in ("before", "after")]
    tokens = [tmp_path / f"tokens-{word}" for word in ("before", "after")]
    for bundle, listed in zip(bundles, tokens, strict=True):
        bundle.write_bytes(authority.bundle.read_bytes())
        listed.write_text(f"{listed.name} operate sha256:{'0' * 64}\n")
        listed.chmod(0o600)
    return {
        "token_file": Pair(map(str, tokens)),
        "state_dir": Pair(str(tmp_path / f"state-{word}") for word in ("before", "after")),
        "file": Pair(str(tmp_path / f"events-{word}") for word in ("before", "after")),
        "ca_bundle": Pair(map(str, bundles)),
        "client_cert": {name: to(str(before), str(after)) for name in ("cert", "key")},
    }


def with_files(tmp_path: Path) -> dict[str, Any]:
    made = files(tmp_path)
    upstream = {**UPSTREAM, "ca_bundle": made["ca_bundle"], "client_cert": made["client_cert"]}
    telemetry = {**KEYS["telemetry"], "events": {**KEYS["telemetry"]["events"], "file": made["file"]}}
    return {
        **KEYS,
        "admin": {**KEYS["admin"], "token_file": made["token_file"]},
        "state_dir": made["state_dir"],
        "telemetry": telemetry,
        "upstreams": {**KEYS["upstreams"], "u": upstream},
    }


def pick(spec: Any, which: int) -> Any:
    """One of the two configurations."""
    if isinstance(spec, Pair):
        return spec[which]
    if isinstance(spec, dict):
        return {name: pick(value, which) for name, value in spec.items()}
    return [pick(value, which) for value in spec] if isinstance(spec, list) else spec


def pairs(spec: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Pair]]:
    """Each key with its values, chosen names written as in `every_key`."""
    if isinstance(spec, Pair):
        yield ".".join(path), spec
    elif isinstance(spec, dict):
        named = path[-1:] in (("policies",), ("error_codes",), ("upstreams",))
        for name, value in spec.items():
            yield from pairs(value, (*path, "<name>" if named else name))
    elif isinstance(spec, list):
        for value in spec:
            yield from pairs(value, (*path, "[]"))


def leaves() -> set[str]:
    keys = {".".join(path) for path in every_key()}
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def telling(value: Any) -> Iterator[Any]:
    """What can be recognised wherever it is: long numbers, and words that say `before`."""
    if isinstance(value, str):
        yield from [value] if "before" in value else []
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from telling(one)
    elif isinstance(value, dict):
        yield from telling([*value, *value.values()])
    elif not isinstance(value, bool) and len(str(value).replace(".", "").lstrip("0")) >= 5:
        yield value


def left_of(sidecar: Running, wanted: set[Any]) -> set[Any]:
    """Which of these values are anywhere in the sidecar still; texts in any form."""
    numbers = {value for value in wanted if not isinstance(value, str)}
    texts = {value.lower() for value in wanted if isinstance(value, str)}
    found: set[Any] = set()
    signals = sidecar.proxy.signals
    past = (signals.events, signals.writer, signals.sessions.ring, signals.sessions._sampled, sidecar.stream)
    seen, todo = {id(signals.aggregates), *map(id, past)}, [sidecar.__dict__, signals.aggregates.subsystems]
    while todo:
        one: Any = todo.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, (bytes, bytearray)):
            one = one.decode("latin-1")
        if isinstance(one, str):
            found |= {text for text in texts if text in one.lower()}
        elif isinstance(one, (int, float)):
            found |= {one} & numbers
        elif isinstance(one, Path):
            todo.append(str(one))
        elif isinstance(one, types.FunctionType):
            todo += [one.__closure__, one.__defaults__, one.__kwdefaults__]
        else:
            todo += gc.get_referents(one)
    return found


def test_every_key_of_the_model_is_here(tmp_path: Path) -> None:
    entered = dict(pairs(with_files(tmp_path)))
    assert set() == leaves() - WITH_THE_OTHERS - entered.keys(), "a new key: enter it in KEYS, with two values"
    assert [] == [key for key, (before, after) in entered.items() if before == after]
    alike = {key for key, (before, _) in entered.items() if not [*telling(before)] and not key.startswith(AT_START)}
    assert set() == alike - SEEN.keys(), "what cannot be recognised: enter it in SEEN, as it is where it is used"


async def test_what_a_reload_says_it_has_changed_is_changed(start_sidecar: Starter, tmp_path: Path) -> None:
    spec, file = with_files(tmp_path), tmp_path / "sidecar.yaml"
    environ = {"A_BEFORE": "", "AFTER": ""}
    sidecar = await start_sidecar(file=file, environ=environ, **pick(spec, 0))
    await store(sidecar)  # what is durable has been attached, with the settings of the start
    app = await sidecar.app()
    for upstream in "uv":
        await app.ask(f"GET /{'route-before' if upstream == 'u' else 'v'}/x HTTP/1.1\r\nHost: s\r\n\r\n")
    file.write_text(json.dumps(pick(spec, 1)))
    told = await sidecar.reloading.reload("a test")
    entered = dict(pairs(spec))
    at_start = {key for key in entered if key.startswith(AT_START)}
    assert at_start == set(told.needs_restart)
    assert set() == {change.key for change in told.changed} & at_start
    settings = Settings.model_validate(pick(spec, 1))
    wrong = {
        key: (value, seen(sidecar)) for key, seen in SEEN.items() if (value := value_at(settings, key)) != seen(sidecar)
    }
    assert {} == wrong
    app.close()
    old = {value for key, (before, _) in entered.items() if key not in at_start for value in telling(before)}
    for _ in range(20):
        if not (left := left_of(sidecar, old)):
            break
        gc.collect()
        await asyncio.sleep(0.1)
    assert set() == left


def value_at(section: Any, key: str) -> Any:
    chosen = {"policies": "p", "error_codes": "MINE", "upstreams": "u"}
    if key.startswith("global_defaults."):
        return value_at(section, key.replace("global_defaults", "policies.default"))
    above = ""
    for part in key.split("."):
        if part == "<name>":
            part = chosen[above]
        section = section[0] if part == "[]" else section[part] if isinstance(section, dict) else getattr(section, part)
        above = part
    return section

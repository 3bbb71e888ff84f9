"""`intercept`, `listen.auth` and `listen.tls` in the configuration: what is accepted, and why the rest is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config.loader import ConfigError, load
from config.model import Settings

HASH = "scrypt:16384:8:1$c2FsdHNhbHQ$" + "ab" * 32


def problem_of(tmp_path: Path, text: str) -> tuple[str, str]:
    file = tmp_path / "sidecar.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        load(file, {})
    (problem,) = wrong.value.problems
    return str(problem.key), problem.message


@pytest.mark.parametrize(
    ("upstream", "said"),
    [
        ({"hosts": ["*.api.test"]}, "`*.api.test` stands for any number of them"),
        ({"hosts": ["a.test", "*.api.test"]}, "list the names"),
        ({"route": "/a", "endpoints": ["https://a.test"]}, "nothing to intercept"),
        ({"hosts": ["a.test"], "endpoints": ["http://a.test"]}, "would go on in clear"),
        ({"hosts": ["a.test"], "insecure_skip_verify": True}, "`ca_bundle`"),
    ],
)
def test_interception_that_would_catch_too_much_or_weaken_something_is_refused(
    tmp_path: Path, upstream: dict[str, Any], said: str
) -> None:
    import yaml

    key, message = problem_of(tmp_path, yaml.safe_dump({"upstreams": {"u": {"intercept": True, **upstream}}}))
    assert "upstreams.u.intercept" == key
    assert said in message


def test_a_star_alone_is_refused_with_or_without_interception(tmp_path: Path) -> None:
    key, message = problem_of(tmp_path, "upstreams: {u: {hosts: ['*'], intercept: true}}")
    assert "upstreams.u.hosts[0]" == key
    assert "`*` alone is not allowed" in message


def test_what_was_intercepted_does_not_fall_back_to_clear(tmp_path: Path) -> None:
    key, message = problem_of(
        tmp_path,
        "upstreams:\n  u: {hosts: [a.test], intercept: true, fallback: b}\n  b: {endpoints: ['http://b.test']}\n",
    )
    assert "upstreams.u.fallback" == key
    assert "never spoken to in clear (`intercept: true`)" in message


@pytest.mark.parametrize("endpoints", [(), ("https://b.test",)])
def test_listed_hosts_can_be_intercepted(endpoints: tuple[str, ...]) -> None:
    upstream = {"hosts": ["a.test", "a.test:8443", "10.0.0.7"], "endpoints": endpoints, "intercept": True}
    assert Settings.model_validate({"upstreams": {"u": upstream}}).upstreams["u"].intercept


def test_credentials_allow_a_listener_beyond_this_machine() -> None:
    settings = Settings.model_validate({"listen": {"host": "0.0.0.0", "auth": {"users": {"me": HASH}}}})
    assert settings.listen.auth is not None


@pytest.mark.parametrize(
    "given",
    ["secret", "scrypt:1000:8:1$saltsalt$" + "ab" * 32, "scrypt:1048576:8:64$saltsalt$" + "ab" * 32,
     "pbkdf2:sha256:100$saltsalt$" + "ab" * 32, "md5:x$saltsalt$" + "ab" * 32, "scrypt:16384:8:1$$" + "ab" * 32],
)  # fmt: skip
def test_what_is_no_hash_of_a_password_is_refused_and_not_repeated(tmp_path: Path, given: str) -> None:
    key, message = problem_of(tmp_path, f"listen: {{auth: {{users: {{me: '{given}'}}}}}}")
    assert "listen.auth.users.me" == key
    assert "sidecar password" in message
    assert given not in message


def test_users_have_names_without_colons(tmp_path: Path) -> None:
    _, message = problem_of(tmp_path, f"listen: {{auth: {{users: {{'a:b': '{HASH}'}}}}}}")
    assert "no colon" in message


def test_hashes_are_not_shown() -> None:
    settings = Settings.model_validate({"listen": {"auth": {"users": {"me": HASH}}}})
    assert {"users": {"me": "REDACTED"}} == settings.model_dump(mode="json")["listen"]["auth"]
    assert "ab" * 8 not in repr(settings)


def test_the_certificate_of_the_listener_must_be_there(tmp_path: Path) -> None:
    key, message = problem_of(tmp_path, "listen: {tls: {cert: nowhere.pem, key: nowhere.pem}}")
    assert "listen.tls" == key
    assert "does not exist" in message

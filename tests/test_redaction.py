"""What a secret looks like, and that it is hidden; what is not one, and that it is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.redact import Redactor

R = Redactor()
CANARY = "c4naryc4naryc4nary"
QUERY_NAMES = """x-amz-signature x-amz-credential x-amz-security-token awsaccesskeyid signature sig x-goog-signature
    x-goog-credential token access_token api_key apikey key password secret code client_secret authorization jwt api-key
    x-api-key subscription-key access_key private_key auth pwd passwd client_assertion sas""".split()
HEADER_NAMES = """authorization proxy-authorization cookie set-cookie x-api-key api-key x-auth-token x-amz-security-token
    www-authenticate x-session x-signature x-jwt-assertion x-credential x-pat private-token x-goog-api-key""".split()


# ---- urls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_url", "shown"),
    [
        ("http://user:pw@a.test/x", "http://REDACTED:REDACTED@a.test/x"),
        ("http://user@a.test/x", "http://REDACTED:REDACTED@a.test/x"),
        ("http://us@er:p@w@a.test:8080", "http://REDACTED:REDACTED@a.test:8080"),
        ("https://a.test/x?token=1&page=2", "https://a.test/x?token=REDACTED&page=2"),
        ("/x?TOKEN=1", "/x?TOKEN=REDACTED"),
        ("/x?%74oken=1", "/x?%74oken=REDACTED"),
        ("/x?to%6ben=1", "/x?to%6ben=REDACTED"),
        (
            "/x?refresh_token=1&session-secret=2&userPassword=3",
            "/x?refresh_token=REDACTED&session-secret=REDACTED&userPassword=REDACTED",
        ),
        ("/x?a=1;token=2", "/x?a=1;token=REDACTED"),
        ("/x?token=1&token=2", "/x?token=REDACTED&token=REDACTED"),
        ("/x?token=", "/x?token=REDACTED"),
        ("/x?token=a=b=c", "/x?token=REDACTED"),
        ("/x?token", "/x?token"),
        ("/x?eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", "/x?REDACTED"),
        ("/x?q=1#access_token=2", "/x?q=1#REDACTED"),
        ("/x", "/x"),
        ("/x?", "/x?"),
        ("/x?page=2&q=hello%20world", "/x?page=2&q=hello%20world"),
        ("a.test:443", "a.test:443"),
        ("user:pw@a.test:443", "REDACTED:REDACTED@a.test:443"),
        ("[::1]:443", "[::1]:443"),
        ("*", "*"),
        ("", ""),
        ("http://a.test?token=1", "http://a.test?token=REDACTED"),
        ("/x?authorization=Basic%20eDp5&jwt=1", "/x?authorization=REDACTED&jwt=REDACTED"),
        ("/x?q=sk-proj-abcdefghij0123456789&page=2", "/x?q=REDACTED&page=2"),
        ("/x?q=sk%2Dproj%2Dabcdefghij0123456789", "/x?q=REDACTED"),
        ("/x?id=AKIAIOSFODNN7EXAMPLE", "/x?id=REDACTED"),
        ("/x?id=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", "/x?id=REDACTED"),
        ("/v1/AKIAIOSFODNN7EXAMPLE/x", "/v1/REDACTED/x"),
        ("/v1/eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc?a=1", "/v1/REDACTED?a=1"),
        ("http://a.test/bot/sk%2Dlive%2Dabcdefghij0123456789", "http://a.test/bot/REDACTED"),
        ("/x?next=https://user:pw@a.test/y&page=2", "/x?next=REDACTED&page=2"),
        ("/x?next=https%3A%2F%2Fuser%3Apw%40a.test%2Fy", "/x?next=REDACTED"),
        ("/x?next=https%253A%252F%252Fuser%253Apw%2540a.test", "/x?next=REDACTED"),
        ("/x?next=https://a.test/y/@me&mail=joe@a.test", "/x?next=https://a.test/y/@me&mail=joe@a.test"),
        ("/task-force/risk-assessment-of-the-year", "/task-force/risk-assessment-of-the-year"),
    ],
)
def test_a_url_keeps_its_names_and_loses_its_secrets(given_url: str, shown: str) -> None:
    assert shown == R.url(given_url)


@pytest.mark.parametrize("name", sorted(QUERY_NAMES))
@pytest.mark.parametrize("spelled", [str.lower, str.upper, str.title])
def test_every_listed_parameter_is_hidden_in_any_spelling(name: str, spelled: object) -> None:
    given_name = spelled(name)  # type: ignore[operator]
    assert f"/x?a=1&{given_name}=REDACTED" == R.url(f"/x?a=1&{given_name}={CANARY}")


def test_further_parameters_can_be_named() -> None:
    assert "/x?phone=REDACTED&name=1" == Redactor(query=["Phone"]).url("/x?phone=2&name=1")


@pytest.mark.parametrize(
    ("pattern", "path", "shown"),
    [
        ("/hooks/{id}", "/hooks/abc", "/hooks/REDACTED"),
        ("/hooks/{id}", "/hooks/abc/more", "/hooks/REDACTED/more"),
        ("/hooks/{id}", "/pay/hooks/abc", "/pay/hooks/REDACTED"),
        ("/services/{**}", "/services/T0/B0/xyz", "/services/REDACTED/REDACTED/REDACTED"),
        ("/v1/*/keys/{key}", "/v1/any/keys/abc", "/v1/any/keys/REDACTED"),
        ("/v1/*/keys/{key}", "/v1/any/other/abc", "/v1/any/other/abc"),
        ("/hooks/{id}", "/h%6foks/abc", "/h%6foks/REDACTED"),
        ("/a/**", "/a/b/c", "/a/b/c"),
        ("/hooks/{id}", "/hooks/", "/hooks/"),
        ("/hooks/{id}", "/hooks", "/hooks"),
        ("/bot{token}/x", "/other", "/other"),
        ("/bot{token}/x", "/bot123:abc/x", "/REDACTED/x"),
        ("/hooks/{id}", "//hooks//abc", "//hooks//REDACTED"),
        ("/hooks/{id}", "/./hooks/./abc", "/./hooks/./REDACTED"),
        ("/hooks/{id}", "/hooks/x/../abc", "/hooks/REDACTED/../REDACTED"),
        ("/hooks/{id}", "/hooks/%2e/%2e%2E/hooks/abc", "/hooks/%2e/REDACTED/hooks/REDACTED"),
        ("/hooks/{id}", "/HOOKS/abc", "/HOOKS/REDACTED"),
        ("/hooks/{id}", "/%2568ooks/abc", "/%2568ooks/REDACTED"),
        ("/hooks/{id}", "/hooks;v=1/abc", "/hooks;v=1/REDACTED"),
        ("/hooks/{id}", "/hooks%2Fabc", "/REDACTED"),
        ("/hooks/{id}", "/hooks\\abc", "/REDACTED"),
        ("/services/{**}", "/services//T0/./abc", "/services//REDACTED/./REDACTED"),
        ("/{**}", "/a/b", "/REDACTED/REDACTED"),
    ],
)
def test_secret_segments_of_a_path_are_hidden_by_pattern(pattern: str, path: str, shown: str) -> None:
    redactor = Redactor(paths=[pattern])
    assert shown == redactor.url(path)
    assert f"https://a.test{shown}?page=1" == redactor.url(f"https://a.test{path}?page=1")


@given(st.text(max_size=60))
def test_no_text_whatever_it_is_breaks_it(text: str) -> None:
    redactor = Redactor(query=["x"], paths=["/a/{b}"])
    assert isinstance(redactor.url(text), str)
    assert isinstance(redactor.text(text), str)


@given(st.sampled_from(sorted(QUERY_NAMES)), st.text("abcdef0123456789%=+/.~", min_size=4, max_size=20))
def test_the_value_of_a_secret_parameter_is_gone_whatever_it_is(name: str, secret: str) -> None:
    shown = R.url(f"http://a.test/x?q=1&{name}=zz{secret}zz&r=2")
    assert f"http://a.test/x?q=1&{name}=REDACTED&r=2" == shown


# ---- headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *sorted(HEADER_NAMES),
        "Authorization",
        "X-CSRF-Token",
        "x-client-secret",
        "X-Password-Hint",
        "SET-COOKIE",
        "x-vault-token",
    ],
)
def test_header_fields_that_carry_credentials_are_always_masked(name: str) -> None:
    assert {name: "REDACTED"} == R.headers({name: CANARY})


def test_other_header_fields_are_shown_with_their_secrets_cut_out() -> None:
    shown = R.headers({"Accept": "text/html", "Location": f"http://a.test/?code={CANARY}"})
    assert {"Accept": "text/html", "Location": "http://a.test/?code=REDACTED"} == shown


# ---- running text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "cannot reach http://u:p@a.test/x?key=1: refused",
            "cannot reach http://REDACTED:REDACTED@a.test/x?key=REDACTED: refused",
        ),
        ("Authorization: Bearer abcdef123", "Authorization: REDACTED"),
        ("Cookie: a=1; b=2", "Cookie: REDACTED"),
        ("authorization=Custom one two\nnext", "authorization= REDACTED\nnext"),
        ("sent Bearer abcdef123 twice", "sent Bearer REDACTED twice"),
        ("token=abc, next", "token=REDACTED, next"),
        ("it failed: token=abc", "it failed: token=REDACTED"),
        ("token: token=abc", "token: REDACTED"),
        ("a=b=token=abc x", "a=b=token=REDACTED x"),
        ("token=", "token="),
        ("dialling user:pw@corp:3128 failed", "dialling REDACTED:REDACTED@corp:3128 failed"),
        (f"dialling user:{'p' * 400}@corp:3128 failed", "dialling REDACTED:REDACTED@corp:3128 failed"),
        ("dialling :pw@corp failed", "dialling REDACTED:REDACTED@corp failed"),
        ("mail me@a.test at 10:30", "mail me@a.test at 10:30"),
        ('{"password": "a b c", "user": "x"}', '{"password": REDACTED, "user": "x"}'),
        ("x-api-key: abc", "x-api-key: REDACTED"),
        ("the code: 503 is fine", "the code: 503 is fine"),
        ("code=abc123", "code=REDACTED"),
        ("listen.auth: says nothing", "listen.auth: says nothing"),
        ('{"auth": "abc", "session": "x"}', '{"auth": REDACTED, "session": REDACTED}'),
        ("X-Session: abc", "X-Session: REDACTED"),
        ("session_id=ses_1 of monkey=1 by author=me", "session_id=ses_1 of monkey=1 by author=me"),
        ("policies.default.max_attempts: 4", "policies.default.max_attempts: 4"),
        ("x-should-retry: false", "x-should-retry: false"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig here", "jwt REDACTED here"),
        ("AKIAIOSFODNN7EXAMPLE used", "REDACTED used"),
        ("sk-abcdefghijklmnop1234 used", "REDACTED used"),
        ("ghp_abcdefghijklmnopqrstuvwxyz used", "REDACTED used"),
        ("xoxb-1234567890-abc used", "REDACTED used"),
        ("no answer within 30 s (attempt_timeout)", "no answer within 30 s (attempt_timeout)"),
        ("POST, body fully sent, no Idempotency-Key", "POST, body fully sent, no Idempotency-Key"),
        ("", ""),
    ],
)
def test_running_text_is_searched_for_secrets(said: str, shown: str) -> None:
    assert shown == R.text(said)


def test_text_without_end_is_cut() -> None:
    assert 2_001 == len(R.text("x" * 1_000_000))


@pytest.mark.parametrize("piece", ["a=", "token:", "http://", "Bearer ", "eyJ", '"', "x" * 64, "a:'", "/", "sk-", "&;"])
def test_text_that_is_made_to_be_slow_is_not(piece: str) -> None:
    """A pattern that backtracks without bound would not come back within the timeout of the test."""
    R.text(piece * 100_000)
    R.url(piece * 20_000)

"""Which names mean a credential and which only look like it; which values are one whatever they are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.credentials import credential_shapes, credentials_of_query, has_credential_shape, is_credential_name

CREDENTIALS = """
    api-key x-api-key api_key apikey ApiKey APIKey xapikey api_keys X-Goog-Api-Key DD-API-KEY DD-APPLICATION-KEY key
    X-Parse-REST-API-Key subscription-key Ocp-Apim-Subscription-Key access_key accessKey AWSAccessKeyId access_key_id
    private_key x-functions-key authkey signing_key sharedAccessKey license_key user[api_key] x-foo-key
    auth X-Auth authn authz oauth oauth2 oauth_verifier X-Auth-Email Authorization Proxy-Authorization
    WWW-Authenticate Proxy-Authenticate Authentication-Info X-Forwarded-Authorization basic_auth
    pwd passwd password pass user_pass userpwd passphrase passcode pw user[password]
    client_assertion client_secret X-Jwt-Assertion SAMLResponse SAMLRequest jwt id_token X-Amz-Security-Token
    sas sig signature Signature X-Signature X-Hub-Signature-256 Stripe-Signature X-Amz-Signature X-Goog-Signature sign
    X-Shopify-Hmac-Sha256 hmac X-Amz-Credential X-Credential credentials creds
    X-Session X-Session-Id session sessionid session_id sessid PHPSESSID JSESSIONID ASP.NET_SessionId sid connect.sid
    X-PAT pat PRIVATE-TOKEN X-Auth-Token X-CSRF-Token X-Plex-Token x-vault-token token token1 accesstoken refreshToken
    max_tokens Cookie Cookie2 Set-Cookie X-Cookie code device_code code_verifier auth_code otp totp pin bearer
    X-My-Secret session-secret userPassword PaSsWoRd x-aPi-KeY X-PASSWORD-HINT awsaccesskeyid
""".split()
HARMLESS = """
    monkey keyboard author authors co_author authority authored X-Author-Id keywords keyword keynote turkey hotkey
    idempotency-key Idempotency_Key X-Idempotency-Key idempotencyKey Sec-WebSocket-Key Surrogate-Key cache-key sort_key
    sortKey partition_key primaryKey foreign_key routing_key object-key projectKey public_key keys key_id api_key_id
    api_key_name key_type Accept Accept-Encoding Content-Type Content-Length Host User-Agent Date Referer Range
    page limit offset q id user name email passenger passport compass bypass pass_through status_code error_code
    country_code zip_code postcode encoding decode design signal assign signed_headers X-Amz-SignedHeaders
    X-Amz-Algorithm X-Amz-Date X-Amz-Expires X-Amz-Content-Sha256 auth_method session_count SignatureVersion
    SignatureMethod cookie_consent pattern patient path pinned spin sidecar side inside resident outside
    X-Request-Id traceparent tracestate baggage X-Forwarded-For X-Correlation-Id
    Access-Control-Allow-Credentials Access-Control-Allow-Origin Cache-Control ETag Vary Link Prefer TE Upgrade
    obsession possession sessions tick tock stroke broke asset sass pwned
""".split()


@pytest.mark.parametrize("name", CREDENTIALS)
def test_a_name_of_a_credential_is_known_in_every_spelling(name: str) -> None:
    assert is_credential_name(name)
    for spelled in (
        name.lower(),
        name.upper(),
        name.replace("-", "_"),
        name.replace("_", "-"),
        f"X-{name}",
        f"{name}2",
    ):
        assert is_credential_name(spelled), spelled


@pytest.mark.parametrize("name", HARMLESS)
def test_a_name_that_only_looks_like_one_is_left_alone(name: str) -> None:
    assert not is_credential_name(name)
    assert not is_credential_name(name.lower())


@pytest.mark.parametrize("name", ["", "x", "X-", "-", "_", "0", "é", "☃", "x-x", "%", "=" * 10])
def test_a_name_that_says_nothing_is_none(name: str) -> None:
    assert not is_credential_name(name)


@given(st.text(max_size=80))
def test_every_name_gets_a_verdict_and_the_same_when_it_is_longer_than_what_is_remembered(name: str) -> None:
    assert is_credential_name(name) == is_credential_name(name + "-" * 200)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", []),
        ("page=1", []),
        ("page=1&api-key=a&sig=b%3D", ["api-key=a", "sig=b%3D"]),
        ("a=1;sas=2&%61pi-key=3&%2561uth=4", ["sas=2", "%61pi-key=3", "%2561uth=4"]),
        ("user=joe&token", []),
        ("q=sk-abcdefghijklmnop1234", ["q=sk-abcdefghijklmnop1234"]),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc"]),
        ("next=https%3A%2F%2Fu%3Ap%40a.test", ["next=https%3A%2F%2Fu%3Ap%40a.test"]),
    ],
)
def test_the_credentials_of_a_query_are_found_as_they_were_sent(query: str, found: list[str]) -> None:
    assert found == credentials_of_query(query)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig here", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig"),
        ("x_eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0"),
        ("a.b.eyJhbGciOiJkaXIifQ..ivivivivivi.cipher", None),
        ("eyJ.eyJ.eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0"),
        ("glpat-abcdefghijklmnop1234", "glpat-abcdefghijklmnop1234"),
        ("eyJhbGciOiJIUzI1NiJ9", None),
        ("task-force/risk-assessment", None),
    ],
)
def test_a_credential_without_a_name_is_known_by_its_look(text: str, shape: str | None) -> None:
    found = [text[start:end] for start, end in credential_shapes(text)]
    assert ([] if shape is None else [shape]) == found
    assert has_credential_shape(text) == bool(found)

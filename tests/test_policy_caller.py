"""Recognising the caller's own resends."""

import pytest

from sidecar.policy.caller import SeenKeys, aws_says_resend, identity, stainless_says_resend


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"attempt=1; max=3", False),
        (b"attempt=2; max=3", True),
        (b"ttl=20240101T000000Z; attempt=3; max=3", True),
        (b"ATTEMPT = 2", True),
        (b"max=3", False),
        (b"reattempt=2", False),
        (b"attempt=", False),
        (b"attempt=-2", False),
        (b"attempt=two", False),
        (b"attempt=" + b"9" * 5000, False),
        (b"\xff\x00", False),
        (b"", False),
    ],
)
def test_what_the_aws_libraries_say(value: bytes, expected: bool) -> None:
    assert expected == aws_says_resend(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"0", False), (b"1", True), (b" 2 ", True), (b"-1", False), (b"", False), (b"one", False), (b"9" * 5000, False)],
)
def test_what_the_stainless_libraries_say(value: bytes, expected: bool) -> None:
    assert expected == stainless_says_resend(value)


def test_a_key_that_comes_back_is_recognised() -> None:
    seen = SeenKeys(b"secret", ttl=60.0)
    assert not seen.came_before(b"payments", b"order-1", 1.0)
    assert seen.came_before(b"payments", b"order-1", 2.0)
    assert not seen.came_before(b"payments", b"order-2", 2.0)


def test_the_same_key_at_another_upstream_is_another_key() -> None:
    seen = SeenKeys(b"secret", ttl=60.0)
    seen.came_before(b"payments", b"order-1", 1.0)
    assert not seen.came_before(b"mail", b"order-1", 1.0)
    assert not seen.came_before(b"payment", b"sorder-1", 1.0)


def test_a_key_is_forgotten_when_it_was_not_used_for_long_enough() -> None:
    seen = SeenKeys(b"secret", ttl=60.0)
    seen.came_before(b"s", b"a", 0.0)
    assert seen.came_before(b"s", b"a", 59.0)
    assert seen.came_before(b"s", b"a", 118.0)
    assert not seen.came_before(b"s", b"a", 178.0)


def test_old_keys_leave_the_memory() -> None:
    seen = SeenKeys(b"secret", ttl=60.0)
    for number in range(100):
        seen.came_before(b"s", b"%d" % number, 0.0)
    seen.came_before(b"s", b"new", 60.0)
    assert 1 == len(seen)


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    seen = SeenKeys(b"secret", ttl=1e9, capacity=10)
    for number in range(100):
        seen.came_before(b"s", b"%d" % number, float(number))
    assert 10 == len(seen)
    assert seen.came_before(b"s", b"99", 100.0)
    assert not seen.came_before(b"s", b"0", 100.0)


def test_no_key_is_kept_as_it_was_sent_and_the_secret_decides_the_hash() -> None:
    one, other = SeenKeys(b"secret", ttl=60.0), SeenKeys(b"another" * 50, ttl=60.0)
    for seen in (one, other):
        seen.came_before(b"scope", b"order-1", 1.0)
    assert {16} == {len(kept) for kept in (*one._seen, *other._seen)}
    assert set(one._seen).isdisjoint(other._seen)


def test_who_shows_no_credential_is_nobody() -> None:
    assert b"" == identity([(b"Accept", b"*/*"), (b"Idempotency-Key", b"k")], "page=2&sort_key=name")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([(b"Cookie", b"a")], ""), ([(b"Cookie", b"b")], "")),
        (([(b"Cookie", b"a")], ""), ([(b"X-Session", b"a")], "")),
        (([(b"Cookie", b"a"), (b"Cookie", b"b")], ""), ([(b"Cookie", b"ab")], "")),
        (([(b"Cookie", b"a"), (b"Cookie", b"b")], ""), ([(b"Cookie", b"b"), (b"Cookie", b"a")], "")),
        (([(b"X-Auth-Token", b"a")], ""), ([(b"X-Auth-Token", b"a"), (b"Cookie", b"c")], "")),
        (([], "api-key=a"), ([], "api-key=b")),
        (([], "sig=a"), ([(b"sig", b"a")], "")),
    ],
)
def test_whatever_differs_in_what_is_shown_is_another_caller(
    one: tuple[list[tuple[bytes, bytes]], str], other: tuple[list[tuple[bytes, bytes]], str]
) -> None:
    assert identity(*one) != identity(*other)


def test_the_order_and_the_case_of_names_make_no_other_caller_and_neither_does_anything_else_in_the_request() -> None:
    one = identity([(b"X-API-Key", b"a"), (b"Accept", b"x"), (b"cookie", b"c")], "page=1&token=t")
    assert one == identity([(b"Cookie", b"c"), (b"x-api-key", b"a")], "page=2&token=t")


def test_a_named_field_stands_for_the_credentials_and_the_listeners_user_for_himself() -> None:
    old, new = [(b"Authorization", b"old"), (b"X-Id", b"7")], [(b"Authorization", b"new"), (b"X-Id", b"7")]
    assert identity(old, "") != identity(new, "")
    assert identity(old, "", caller="X-ID") == identity(new, "", caller="X-ID")
    assert identity(old[:1], "", caller="X-ID") == identity(old[:1], ""), "without it the credentials count"
    assert identity(old, "", caller="X-ID") != identity([(b"Authorization", b"7")], "")
    assert 3 == len({identity([], "", sender=sender) for sender in (b"", b"one", b"two")})

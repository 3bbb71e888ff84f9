"""No bytes of an upstream make reading its wishes fail, or the wish unreasonable."""

import math

from hypothesis import given
from hypothesis import strategies as st

from config.errors import registry
from sidecar.policy.classify import Classifier
from sidecar.policy.verdict import LONGEST_WAIT, Fields, retry_after, server_verdict
from tests.property import calm

number_like = st.from_regex(rb"[-+]?[0-9.eE_ ]{0,40}", fullmatch=True)
date_like = st.from_regex(
    rb"(Sun|Sunday), [0-9]{2}[ -](Nov|Feb|Xxx)[ -][0-9]{2,4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT", fullmatch=True
)
value = st.binary(max_size=60) | number_like | date_like
name = st.sampled_from([b"Retry-After", b"retry-after-ms", b"Date", b"x-should-retry", b"stripe-should-retry"])
fields = st.lists(st.tuples(name, value), max_size=6)


@calm
@given(fields, st.floats(min_value=0.0, max_value=4e9))
def test_a_wait_is_a_number_one_can_add(fields: Fields, now: float) -> None:
    wait = retry_after(fields, now)
    assert wait is None or (math.isfinite(wait) and 0.0 <= wait <= LONGEST_WAIT)
    assert server_verdict(fields) in (True, False, None)


@calm
@given(
    st.integers(100, 599),
    st.lists(
        st.tuples(st.sampled_from([b"content-type", b"x-overload", b"other"]), st.binary(max_size=20)), max_size=4
    ),
    st.none()
    | st.binary(max_size=200)
    | st.from_regex(rb'\{"error_code": ?[\[{"a-zA-Z0-9_:}\]]{0,30}', fullmatch=True),
)
def test_every_answer_gets_one_known_code_or_is_a_success(status: int, fields: Fields, body: bytes | None) -> None:
    code = Classifier(registry()).classify(status, [*fields, (b"content-type", b"application/json")], body)
    assert (code is None) == (status < 400)
    assert code is None or code in registry()

"""When a credential expires, read from the request itself."""

from __future__ import annotations

import base64

import orjson
import pytest

from sidecar.durable.credential import expires_at

DATE = 1_769_688_000.0  # 2026-01-29T12:00:00Z


def token(claims: object) -> bytes:
    def part(value: object) -> bytes:
        return base64.urlsafe_b64encode(orjson.dumps(value)).rstrip(b"=")

    return part({"alg": "HS256"}) + b"." + part(claims) + b".c2ln"


@pytest.mark.parametrize(
    ("expected", "url", "headers"),
    [
        (None, "https://a.test/x", []),
        (None, "https://a.test/x?expires=1769688000", []),
        (DATE + 300, "https://a.test/x?X-Amz-Date=20260129T120000Z&X-Amz-Expires=300&X-Amz-Signature=s", []),
        (DATE + 60, "https://a.test/x?X-Goog-Date=20260129T120000Z&X-Goog-Expires=60", []),
        (None, "https://a.test/x?X-Amz-Date=yesterday&X-Amz-Expires=300", []),
        (None, "https://a.test/x?X-Amz-Date=20260129T120000Z&X-Amz-Expires=never", []),
        (DATE, "https://a.test/x?Expires=1769688000&Signature=s", []),
        (DATE, "https://a.test/x?se=2026-01-29T12%3A00%3A00Z&sig=s", []),
        (DATE, "https://a.test/x?se=2026-01-29T12%3A00%3A00&sig=s", []),
        (None, "https://a.test/x?se=soon&sig=s", []),
        (None, "https://a.test/x?expires=123456789012345&sig=s", []),
        (None, "https://[broken/x?expires=1&sig=s", []),
        (DATE, "https://a.test/x", [(b"Authorization", b"Bearer " + token({"exp": DATE}))]),
        (None, "https://a.test/x", [(b"Authorization", b"Bearer " + token({"sub": "x"}))]),
        (None, "https://a.test/x", [(b"Authorization", b"Bearer " + token(["exp"]))]),
        (None, "https://a.test/x", [(b"Authorization", b"Bearer " + token({"exp": 1e300}))]),
        (None, "https://a.test/x", [(b"Authorization", b"Bearer eyJx.!!!.y")]),
        (None, "https://a.test/x", [(b"Authorization", b"Bearer eyJx.AAAA.y")]),
        (None, "https://a.test/x", [(b"Authorization", b"Bearer opaque")]),
        (
            DATE + 900,
            "https://a.test/x",
            [(b"x-amz-date", b"20260129T120000Z"), (b"Authorization", b"AWS4-HMAC-SHA256 Credential=a, Signature=b")],
        ),
        (None, "https://a.test/x", [(b"x-amz-date", b"20260129T120000Z")]),
        (
            DATE,
            "https://a.test/x?Expires=1769699999&Signature=s",
            [(b"Authorization", b"Bearer " + token({"exp": DATE}))],
        ),
    ],
)
def test_the_earliest_end_that_can_be_read_counts(
    expected: float | None, url: str, headers: list[tuple[bytes, bytes]]
) -> None:
    assert expected == expires_at(url, headers)

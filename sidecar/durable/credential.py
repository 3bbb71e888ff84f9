"""When does the credential inside a request expire? Read from the credential itself, never verified.

Law: pure, and never raises: what cannot be read has no known end. Knows bearer tokens with an `exp` claim, signed
urls of the S3 and GCS kind, and signatures that hold for a few minutes around their date.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlsplit

import orjson

# A header signature of the AWS kind is accepted this long after its date.
_SIGNATURE_LASTS = 900.0


def expires_at(url: str, headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """The earliest end of any credential in the request, as wall time; None when nothing is known."""
    return min((*_of_url(url), *_of_headers(headers)), default=None)


def _of_headers(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[float]:
    signed, date = False, None
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"x-amz-date":
            date = _compact_date(value.decode("latin-1"))
        elif lowered in (b"authorization", b"x-auth-token", b"x-access-token"):
            signed = signed or value.startswith(b"AWS4-HMAC")
            end = _token_end(value.rpartition(b" ")[2])
            if end is not None:
                yield end
    if signed and date is not None:
        yield date + _SIGNATURE_LASTS


def _of_url(url: str) -> Iterator[float]:
    if "?" not in url or not any(word in url.lower() for word in ("expires", "se=")):
        return  # nearly all of them
    try:
        query = {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}
    except ValueError:
        return
    for provider in ("x-amz", "x-goog"):
        date, lasts = _compact_date(query.get(f"{provider}-date", "")), query.get(f"{provider}-expires", "")
        if date is not None and lasts.isascii() and lasts.isdigit():
            yield date + int(lasts)
    if "signature" in query or "sig" in query:
        for name in ("expires", "se"):
            end = _moment(query.get(name, ""))
            if end is not None:
                yield end


def _token_end(token: bytes) -> float | None:
    claims = _claims(token)
    end = None if claims is None else claims.get("exp")
    return float(end) if isinstance(end, (int, float)) and 0 < end < 1e11 else None


def _claims(token: bytes) -> dict[str, object] | None:
    parts = token.split(b".")
    if len(parts) != 3 or not parts[0].startswith(b"eyJ"):
        return None
    try:
        claims = orjson.loads(base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):
        return None
    return claims if isinstance(claims, dict) else None


def _compact_date(text: str) -> float | None:
    """`20260129T120000Z`."""
    if not text:
        return None
    try:
        return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _moment(text: str) -> float | None:
    """Seconds since 1970, or an ISO date."""
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 12 else None
    try:
        given = datetime.fromisoformat(text)
        return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        return None

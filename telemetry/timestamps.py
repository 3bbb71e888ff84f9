"""Wall time as text.

Law: one form everywhere, RFC 3339 in UTC with milliseconds; no locale, no zone but Z.
"""

from __future__ import annotations

import time
from functools import lru_cache


@lru_cache(maxsize=64)
def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def rfc3339(seconds: float) -> str:
    """`2026-01-29T12:00:00.000Z`."""
    milliseconds = round(seconds * 1000)  # rounded once, so that .9996 carries into the next second
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"

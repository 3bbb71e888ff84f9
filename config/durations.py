"""How long: `90s`, `15m`, `2h`, or a number of seconds. The same forms in the file, in queries and on the command line.

Law: a number is seconds; text has its unit, except where the text is all there can be (a query), which says so.
"""

from __future__ import annotations

import re
from typing import Any

PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s?(ms|s|m|h|d)?")
FORMS = "write it with its unit (90s, 15m, 1h, 2d), or as a number of seconds"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, None: 1.0}


def seconds_of(given: Any) -> float:
    """`15m`, `900` or a number of seconds → seconds. ValueError tells the forms."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    found = PATTERN.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise ValueError(f"is not a duration; {FORMS}")
    return float(found[1]) * _UNITS[found[2]]


def setting(given: Any) -> Any:
    """Of a file: a number as it is, text with a unit as seconds. What is neither is for the number's own check."""
    if not isinstance(given, str):
        return given
    found = PATTERN.fullmatch(given.strip())
    if found is None:
        raise ValueError("must be a number of seconds, or a duration with its unit, as in 500ms, 90s, 10m, 1h or 2d")
    if found[2] is None:
        raise ValueError("must be a number of seconds, written without quotes, or with its unit, as in 90s or 10m")
    return seconds_of(given)

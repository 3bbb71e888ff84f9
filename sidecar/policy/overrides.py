"""What one request asks of the sidecar for itself: its `x-sidecar-*` headers, and `Prefer: respond-async`.

Law: pure. A header that is known and has a value that cannot be used is refused, all of them at once, each with what
would be allowed; guessing what was meant would be worse than an error the developer sees at the first call. A name
that is not known is ignored: it is never forwarded, and a client made for a newer sidecar must not break on an older
one. Values are shown shortened, because somebody may have put a secret there by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from sidecar.failures import Refused

PREFIX = b"x-sidecar-"
LONGEST_TIMEOUT = 86_400.0
_SHOWN = 32
MOST_ATTEMPTS = 10
_HIGHEST_VERSION = 2**63 - 1

_WHOLE = re.compile(r"[0-9]{1,19}")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


class Overrides:
    """What was asked for; None where nothing was."""

    __slots__ = (
        "attempt_timeout",
        "correlation_id",
        "dead_letter",
        "max_attempts",
        "operation",
        "policy",
        "respond_async",
        "retry_off",
        "stage",
        "timeout",
        "version",
        "workflow",
    )

    def __init__(self) -> None:
        self.retry_off = False
        self.max_attempts: int | None = None
        self.timeout: float | None = None
        """Seconds for the whole request."""
        self.attempt_timeout: float | None = None
        self.policy: str | None = None
        self.operation: str | None = None
        self.stage: str | None = None
        self.workflow: str | None = None
        self.version: int | None = None
        self.dead_letter: bool | None = None
        self.correlation_id: str | None = None
        self.respond_async: bool | None = None
        """`Prefer: respond-async`: take it over and answer at once."""


NO_OVERRIDES = Overrides()
"""For every request that asks for nothing; never to be written to."""


class _Bad(Exception):
    """A value that cannot be used; the text says what can."""


def parse(fields: Iterable[tuple[bytes, bytes]], policies: Container[str], operations: Sequence[str]) -> Overrides:
    """The overrides among these fields; raises Refused with everything that is wrong with them. `policies` and
    `operations` are the names that exist."""
    found = Overrides()
    errors: list[dict[str, str]] = []
    seen: dict[str, str] = {}
    for raw_name, raw_value in fields:
        name = raw_name.lower().decode("latin-1")
        reader = _READERS.get(name)
        if reader is None:
            if name == "prefer":
                found.respond_async = True  # it is only here if it says so
            continue
        value = raw_value.decode("latin-1").strip(" \t")
        attribute, read = reader
        try:
            if seen.setdefault(name, value) != value:
                raise _Bad("one value, not two different ones")
            setattr(found, attribute, read(value, policies, operations))
        except _Bad as bad:
            errors.append(_error(name, value, str(bad)))
    if errors:
        raise _refused(errors)
    return found


def _error(name: str, value: str, constraint: str) -> dict[str, str]:
    shown = shortened(value)
    return {
        "field": name,
        "value": shown,
        "constraint": constraint,
        "message": f"{name}: {shown!r} is not {constraint}",
    }


def _refused(errors: list[dict[str, str]]) -> Refused:
    return Refused(
        "VALIDATION_ERROR",
        "; ".join(error["message"] for error in errors) + "; correct the header or leave it out",
        reason="override",
        details={"errors": errors, "total_errors": len(errors)},
        status=400,
    )


def shortened(value: str) -> str:
    """Enough to recognise it by, not enough to use it."""
    printable = "".join(char if char.isascii() and char.isprintable() else "?" for char in value[:_SHOWN])
    return printable if len(value) <= _SHOWN else f"{printable[:8]}… ({len(value)} characters)"


# ---- one reader per header ---------------------------------------------------------------------------------------

_Reader = Callable[[str, Container[str], Sequence[str]], Any]


def _retry(value: str, _policies: Container[str], _operations: Sequence[str]) -> bool:
    return not _on_or_off(value)


def _dead_letter(value: str, _policies: Container[str], _operations: Sequence[str]) -> bool:
    return _on_or_off(value)


def _on_or_off(value: str) -> bool:
    word = value.lower()
    if word not in ("on", "off"):
        raise _Bad("`on` or `off`")
    return word == "on"


def _attempts(value: str, _policies: Container[str], _operations: Sequence[str]) -> int:
    if not _WHOLE.fullmatch(value) or int(value) > MOST_ATTEMPTS:
        raise _Bad(f"a whole number from 1 to {MOST_ATTEMPTS}, the first attempt included")
    return max(1, int(value))  # "no retry" is written 0 by those who count retries instead of attempts


def _seconds(value: str, _policies: Container[str], _operations: Sequence[str]) -> float:
    if not _SECONDS.fullmatch(value) or not 0.0 < float(value) <= LONGEST_TIMEOUT:
        raise _Bad(f"a number of seconds above 0 and up to {LONGEST_TIMEOUT:g}, such as 2.5")
    return float(value)


def _policy(value: str, policies: Container[str], _operations: Sequence[str]) -> str:
    if value not in policies:
        raise _Bad("the name of a policy; `GET /policies` lists them")
    return value


def _operation(value: str, _policies: Container[str], operations: Sequence[str]) -> str:
    if value not in operations:
        known = f" ({', '.join(operations)})" if operations else "; it has none"
        raise _Bad(f"the name of an operation of this upstream{known}")
    return value


def _stage(value: str, _policies: Container[str], _operations: Sequence[str]) -> str:
    if not _NAME.fullmatch(value):
        raise _Bad("a name of 1 to 63 letters, digits, `.`, `_` or `-`")
    return value


def _id(value: str, _policies: Container[str], _operations: Sequence[str]) -> str:
    if not _ID.fullmatch(value):
        raise _Bad("1 to 128 letters, digits or `._~:/+=@-`")
    return value


def _version(value: str, _policies: Container[str], _operations: Sequence[str]) -> int:
    if not _WHOLE.fullmatch(value) or int(value) > _HIGHEST_VERSION:
        raise _Bad("a whole number from 0 on")
    return int(value)


_READERS: dict[str, tuple[str, _Reader]] = {
    "x-sidecar-retry": ("retry_off", _retry),
    "x-sidecar-max-attempts": ("max_attempts", _attempts),
    "x-sidecar-timeout": ("timeout", _seconds),
    "x-sidecar-attempt-timeout": ("attempt_timeout", _seconds),
    "x-sidecar-policy": ("policy", _policy),
    "x-sidecar-operation": ("operation", _operation),
    "x-sidecar-stage": ("stage", _stage),
    "x-sidecar-workflow": ("workflow", _id),
    "x-sidecar-version": ("version", _version),
    "x-sidecar-dead-letter": ("dead_letter", _dead_letter),
    "x-sidecar-correlation-id": ("correlation_id", _id),
}

"""May a request be sent again? How far it got, and what it is, decide; nothing else is trusted.

Law: pure. When in doubt the answer is no: a request that may have been executed is not repeated. Safe are, in this
order: a request of which nothing was sent; one whose answer says it was not executed; an idempotent method; a key
that the provider honours; the user's word that executing twice does no harm. The same holds for another endpoint and
for a fallback: that the copy goes elsewhere does not make it safe.
"""

from __future__ import annotations

from typing import NamedTuple

from config.idempotency import Idempotency
from telemetry.record import CONNECTED, NOT_CONNECTED, PARTLY_SENT

READS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing (RFC 9110, 9.2.1)."""
IDEMPOTENT = READS | {"PUT", "DELETE"}
"""Methods that may be sent twice (RFC 9110, 9.2.2)."""

# What a request carries.
NO_KEY = "none"
APP_KEY = "app"
INJECTED_KEY = "injected"


class Resend(NamedTuple):
    """Whether a request may be sent again, and why, for a person."""

    allowed: bool
    rule: str
    remedy: str = ""
    """What would have allowed it."""


NOTHING_SENT = Resend(True, "nothing was sent")
NOT_EXECUTED = Resend(True, "the answer says it was not executed")
SAFE_METHOD = Resend(True, "the method is idempotent")
KEYED = Resend(True, "the provider honours the idempotency key")
USERS_WORD = Resend(True, "retry_non_idempotent: true")


def honoured(key: str, settings: Idempotency) -> bool:
    """Whether the key of a request makes a resend safe: the app's own unless denied, an injected one if confirmed."""
    if key == NO_KEY or not settings.enabled:
        return False
    if settings.provider_honours is None:
        return key == APP_KEY
    return settings.provider_honours


def judge(
    phase: int,
    method: str,
    *,
    keyed: bool,
    key: str = NO_KEY,
    not_executed: bool = False,
    retry_non_idempotent: bool = False,
    header: str = "Idempotency-Key",
    key_helps: bool = True,
) -> Resend:
    """`keyed`: with a key that is `honoured`; `key` only words the refusal. `key_helps` is false where a key of the
    app would not be honoured, so that nobody is told to send one. An unknown phase counts as sent."""
    if phase in (NOT_CONNECTED, CONNECTED):
        return NOTHING_SENT
    if not_executed:
        return NOT_EXECUTED
    if method in IDEMPOTENT:
        return SAFE_METHOD
    if keyed:
        return KEYED
    if retry_non_idempotent:
        return USERS_WORD
    sent = "body partly sent" if phase == PARTLY_SENT else "body fully sent"
    if key == NO_KEY and not key_helps:
        rule = f"{method}, {sent}, and no idempotency key is honoured here"
        return Resend(False, rule, "`retry_non_idempotent: true`, if the provider executes such a request only once")
    if key == NO_KEY:
        return Resend(False, f"{method}, {sent}, no {header}", f"an {header}: with one it would have been")
    whose = "the provider does not honour its" if key == APP_KEY else "the provider is not known to honour the injected"
    return Resend(
        False,
        f"{method}, {sent}, {whose} {header}",
        "`idempotency.provider_honours: true`, if the provider executes a key only once",
    )

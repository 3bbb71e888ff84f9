"""May a request be sent again? The send phase and the method decide, nothing else is trusted.

Law: pure. When in doubt the answer is no: a request that may have been executed is not repeated.
"""

from __future__ import annotations

from telemetry.record import CONNECTED

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})


def may_resend(phase: int, method: str, *, keyed: bool) -> bool:
    """`keyed`: the app sent an Idempotency-Key, which providers that document it honour."""
    return phase <= CONNECTED or method in IDEMPOTENT or keyed

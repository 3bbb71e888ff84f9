"""The closed set of things that can go wrong, as exceptions.

Law: every foreign exception (socket, TLS, DNS, parser) is translated into one of these exactly once, where it is
first seen. `code` is a key of the error registry; the message is for a person and says what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from telemetry.record import NOT_CONNECTED

if TYPE_CHECKING:
    import ssl

    from sidecar.policy.demotion import Client
    from sidecar.routing import Origin
    from sidecar.upstream.endpoints import UpstreamState


SHUTTING_DOWN = "SHUTTING_DOWN"
"""The code of whatever the sidecar itself cuts off when it ends."""


class Refused(Exception):
    """The sidecar itself says no: nothing was sent to any upstream because of this request."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        reason: str,
        details: Mapping[str, object] | None = None,
        status: int | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason  # closed word for the metric label
        self.details = details
        self.status = status
        self.retry_after = retry_after


class Malformed(Refused):
    """The message cannot be understood safely: answered, and the connection closes."""


class AnsweredHere(Exception):
    """The request ends at this sidecar with an answer that is no error: Max-Forwards is used up (R6), its key was
    answered before, or it is taken over. `outcome` and the word for the metric, `reason`, go together."""

    def __init__(self, lines: bytes, body: bytes, reason: str, *, status: int = 200, outcome: str = "denied") -> None:
        super().__init__(reason)
        self.lines = lines
        self.body = body
        self.reason = reason
        self.status = status
        self.outcome = outcome


class Intercepted(Exception):
    """No failure: a CONNECT whose TLS ends here, so that what is inside are requests like any other."""

    def __init__(self, origin: Origin, upstream: UpstreamState, client: Client, context: ssl.SSLContext) -> None:
        super().__init__(origin.label)
        self.origin = origin
        self.upstream = upstream
        self.client = client
        self.context = context


class AttemptFailed(Exception):
    """One attempt at an upstream failed; `phase` says how far the request got."""

    def __init__(self, code: str, message: str, phase: int = NOT_CONNECTED, *, stale: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.phase = phase
        self.stale = stale  # a reused keep-alive connection died before any byte of an answer
        self.momentary = False  # may pass although its code is fatal: a TLS handshake that was cut off
        self.at_proxy = False  # it speaks against the parent proxy, not against the upstream


class GaveUp(Exception):
    """The session ends without an answer of the upstream to pass on; its record holds the outcome."""

    def __init__(
        self, code: str, message: str, *, reason: str | None = None, hint: str = "", retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.hint = hint
        self.retry_after = retry_after


class UploadBroken(Exception):
    """The app's fault in the middle of an exchange: its body ended wrongly (bad chunk, premature end), or it stopped
    sending or reading. The upstream must never see a clean end, and its breaker hears nothing of it."""

    def __init__(self, message: str, *, stalled: bool = False) -> None:
        super().__init__(message)
        self.stalled = stalled

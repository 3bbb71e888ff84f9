"""How an upstream treats requests that carry an idempotency key."""

from __future__ import annotations

from config.fields import Bytes, Flag, HeaderName, Seconds, Section


class Idempotency(Section):
    """How requests with an idempotency key are treated. A key that the provider honours makes any request safe to
    send again."""

    enabled: Flag = True
    """false: keys are passed on and mean nothing here."""
    header: HeaderName = "Idempotency-Key"
    """The request header that carries the key."""
    caller: HeaderName | None = None
    """A key belongs to its caller, who is known by all the credentials that he sends, as he sends them: with a renewed
    token he is another one. This names a request header that says who he is instead, for everything that is kept or
    counted per caller. Whoever can set that header can be anyone: name one that is set, or overwritten, by something
    that has checked who asks."""
    inject: Flag = False
    """Add a key to requests that have none: the same on every attempt. The application's own key is never
    replaced."""
    provider_honours: Flag | None = None
    """Whether the upstream executes a key only once. Not set: yes for keys that the application sent, no for those
    added here."""
    ttl: Seconds = 86_400.0
    """How long the answer to a key is remembered, in seconds."""
    provider_window: Seconds = 86_400.0
    """How long the upstream remembers a key, in seconds. A resend after that may be executed twice."""
    max_response_bytes: Bytes = 65_536
    """The largest answer that is remembered."""

"""What a configuration may say about error codes: new ones, and changes to built-in ones.

Every key may be left out here; whether a code that is new says enough is decided where the registry is known.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from config.fields import Section

Category = Literal["TRANSIENT", "PERMANENT", "CRITICAL"]
Severity = Literal["low", "medium", "high", "critical"]
Retry = Literal["retryable", "fatal", "conditional"]


class ErrorCodeEntry(Section):
    """An error code of your own, or a change to a built-in one: what is left out stays as it is. A new one needs
    category, retry and description."""

    category: Category | None = None
    """TRANSIENT may be gone in a moment, PERMANENT fails the same way again, CRITICAL needs somebody to act."""
    severity: Severity | None = None
    """How loudly it is logged and shown. A new code gets `medium`."""
    retry: Retry | None = None
    """`retryable`: sent again when that is safe. `conditional`: only with an idempotency key that the provider
    honours. `fatal`: never."""
    status: Annotated[int, Field(strict=True, ge=400, le=599)] | None = None
    """The status the application gets when there is no answer of the upstream to pass on. A new code gets 502."""
    description: str | None = None
    """What happened, in one sentence."""
    causes: tuple[str, ...] | None = None
    """What usually lies behind it, the likeliest first."""
    resolution: str | None = None
    """What to do next."""
    examples: tuple[str, ...] | None = None
    """What it looks like on the wire."""
    related: tuple[str, ...] | None = None
    """Codes that are easily confused with it or appear together with it."""
    policy: str | None = None
    """The policy, one of `policies`, that follows on this code where neither upstream nor operation chose one."""

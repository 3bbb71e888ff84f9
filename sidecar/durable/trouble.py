"""What the durable layers say when they cannot do what was asked.

Law: every refusal names the thing, says why, and in `hint` what to do next. `status` and `code` are what the admin
port answers with; nothing here was half done: the stored state is as before.
"""

from __future__ import annotations


class Trouble(Exception):
    """Any refusal of the durable layers."""

    status = 503
    code = "TEMPORARY_UNAVAILABLE"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class CannotUse(Trouble):
    """The state directory cannot be used as it is: the sidecar must not start with it."""


class NotKept(Trouble):
    """A write did not reach the disk. `reason` is the label of `dlq_rejected_total`."""

    status = 503
    code = "DLQ_FULL"

    def __init__(self, reason: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason  # full, disk_error, too_large


class Damaged(Trouble):
    """Stored bytes are not what was written: a checksum or an authentication tag does not match."""

    status = 500
    code = "SIDECAR_INTERNAL"


class NoSuchThing(Trouble):
    """There is nothing with this id."""

    status = 404
    code = "NOT_FOUND"


class BadInput(Trouble):
    """A value given by a person or a program cannot be used; `field` names it."""

    status = 400
    code = "VALIDATION_ERROR"

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(f"{field}: {message}", hint)
        self.field = field


class OtherPayload(Trouble):
    """The same intent was handed in before with another request."""

    status = 422
    code = "IDEMPOTENCY_CONFLICT"


class NotNow(Trouble):
    """Understood, but the state of the thing does not allow it."""

    status = 409
    code = "CONFLICT"

"""What is kept on disk and how it goes out again: dead letters, their replay, and the outbox.

Plain data, as everywhere in this package. How requests with an idempotency key are treated is in
`config/idempotency.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from config.credentials import credentials_of_query
from config.fields import Bytes, CodeName, Count, Delay, Flag, HeaderName, Method, Seconds, Section
from config.operations import SecretPath


def _drains(given: Any) -> Any:
    given = "off" if given is False else given  # YAML 1.1 reads a bare `off` as false
    words = [given] if isinstance(given, str) else given
    known = ("on_close", "schedule") if isinstance(given, (list, tuple)) else ("off", "on_close", "schedule")
    if not isinstance(words, (list, tuple)) or not words or not all(word in known for word in words):
        raise ValueError("must be 'off', 'on_close' or 'schedule', or a list of the latter two")
    return tuple(words) if isinstance(given, list) else given


def _web_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("the url begins with http:// or https://")
    return text


def _lookup_url(text: str) -> str:
    if "{key}" not in text and "{notification_id}" not in text:
        raise ValueError(
            "the url must contain {key}, the place of the delivery's key, or {notification_id}, that of the "
            "provider's own id"
        )
    return _web_url(text)


UNHURRIED = "unhurried"
_FULL = frozenset({"RATE_LIMIT_EXCEEDED", "QUOTA_EXCEEDED", "SERVICE_OVERLOADED"})


def _without_path(url: str) -> str:
    scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    return f"{scheme}://{authority.rpartition('@')[2]}{'/REDACTED' if len(rest) > len(authority) else ''}"


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    address, mark, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    for parameter in credentials_of_query(query):
        query = query.replace(parameter, f"{parameter.partition('=')[0]}=REDACTED")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{mark}{query}"


SecretUrl = Annotated[str, AfterValidator(_web_url), PlainSerializer(_without_path, return_type=str)]
"""Whoever knows it may use it, as that of a chat room's hook: its path is used and never shown."""
LookupUrl = Annotated[str, AfterValidator(_lookup_url), PlainSerializer(_without_credentials, return_type=str)]


Drain = Literal["on_close", "schedule"]


class DeadLetter(Section):
    """Which finally failed requests of an upstream are kept for a replay, and what the application is told."""

    enabled: Flag = True
    """false: nothing of this upstream is kept."""
    methods: tuple[Method, ...] = ("POST", "PUT", "PATCH", "DELETE")
    """Requests with these methods are kept."""
    codes: tuple[CodeName, ...] | None = None
    """Only failures with these error codes are kept, PERMANENT ones included. Not set: all but the PERMANENT ones,
    which fail the same way again."""
    respond: Literal["error", "accepted"] = "error"
    """`error`: the application gets the failure, with the id of the entry in `x-sidecar-dlq-id`. `accepted`: it gets
    202 with the id when the failure is a passing one."""
    keep_headers: tuple[HeaderName, ...] = ()
    """Headers to keep readable besides accept*, content-*, user-agent, the idempotency key and trace headers. All
    others are sealed."""
    max_body_bytes: Bytes = 1_048_576
    """The largest request body that is kept. Beyond `limits.replay_body_bytes` it is written to disk while it is
    being sent. Of a larger one the entry is kept without the body, which the application is told
    (`x-sidecar-dlq-error: DLQ_BODY_NOT_KEPT`): it can be looked at, not replayed."""
    max_response_bytes: Bytes = 65_536
    """How much of the last answer's body is kept, sealed."""
    dedupe_window: Delay = 60.0
    """The same request failing again within this many seconds updates its entry instead of making another. With an
    idempotency key it always does. 0: requests without a key are never taken for the same."""
    redact_paths: tuple[SecretPath, ...] = ()
    """Paths with secrets in them: `/hooks/{id}` hides one segment in listings, `/services/{**}` all that follow."""


class DeadLetterStore(Section):
    """The room that all dead letters and deliveries share."""

    max_bytes: Annotated[Bytes, Field(ge=1_048_576)] = 1_073_741_824
    """How much may be kept on disk in all: dead letters, deliveries of the outbox, and bodies being written. When that
    is used up the application is told (`x-sidecar-dlq-error: DLQ_FULL`; 503 for a delivery), and nothing is removed
    to make room."""
    min_free_bytes: Bytes = 104_857_600
    """Nothing is added while the disk has less than this to spare."""
    retention: Seconds | None = None
    """Entries that still wait are dropped at this age, in seconds, and counted as lost. Not set: never."""
    keep_completed: Seconds = 604_800.0
    """How long entries that are replayed or discarded stay to be looked at, in seconds."""
    verify_every: Delay = 86_400.0
    """How often everything that is kept is read and checked by itself, in seconds; 0: only by `sidecar dlq verify`."""
    notify_url: SecretUrl | None = None
    """Where to POST when requests begin to be kept: once per upstream and error code within `notify_window`."""
    notify_window: Seconds = 300.0
    """How long the same upstream and error code are not notified again, in seconds."""


class Replay(Section):
    """How dead letters of an upstream are sent again."""

    credentials: Literal["sealed", "live", "environment"] = "sealed"
    """`sealed`: those of the original request. `live`: the newest seen on live traffic of the same caller.
    `environment`: from variables, see `environment`."""
    single_credential: Flag = False
    """With `live`: every caller uses the same credential, so the newest one seen fits all."""
    environment: Mapping[HeaderName, str] = Field(default_factory=dict)
    """With `environment`: header → name of the variable that holds its whole value."""
    auto: Annotated[Literal["off", "on_close", "schedule"] | tuple[Drain, ...], BeforeValidator(_drains)] = "off"
    """When entries that are safe to replay go out by themselves, one first, then more and more. `on_close`: when the
    breaker closes. `schedule`: every `every` seconds, which is for what failed where no breaker opened. A list:
    both."""
    every: Seconds = 300.0
    """With `auto: schedule`: how often it is tried, in seconds."""
    require_remediation: Literal["all", "critical", "none"] = "critical"
    """Which entries need evidence of what was fixed before they are replayed; `critical`: those whose error code is
    CRITICAL."""
    max_replays: Count = 5
    """After this many failed replays an entry is `failed`."""
    stale_after: Seconds = 86_400.0
    """A PUT or DELETE older than this, in seconds, is not replayed unasked: the world has moved on."""
    rate: Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)] = 10.0
    """Replays per second unless the job says otherwise."""
    concurrency: Annotated[Count, Field(le=256)] = 8
    """How many replays may be under way at once."""
    lease: Seconds = 300.0
    """How long one replay may take before its claim on the entry ends, in seconds."""

    def drains(self, when: str) -> bool:
        """Whether `auto` names this occasion."""
        return when in ((self.auto,) if isinstance(self.auto, str) else self.auto)

    @model_validator(mode="after")
    def _the_environment_is_named(self) -> Replay:
        if self.credentials == "environment" and not self.environment:
            raise ValueError(
                "`credentials: environment` needs `environment`, a header and the name of its variable, "
                "as in {Authorization: PAYMENTS_AUTHORIZATION}"
            )
        return self


with warnings.catch_warnings():
    # BaseModel has a deprecated method `json`; the key is called so because that is what a user looks for.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class NotificationId(Section):
        """Where a provider's answer says which message it made of a delivery."""

        header: HeaderName | None = None
        """The response header that holds it."""
        json: str | None = None  # type: ignore[assignment]  # see above
        """The place in a JSON answer, as in `data.id`."""

        @model_validator(mode="after")
        def _exactly_one(self) -> NotificationId:
            if (self.header is None) == (self.json is None):
                raise ValueError("give either `header` or `json`, the place of the id in the provider's answer")
            return self


class DeliveredWhen(Section):
    """Which answer to a lookup means that the provider has the delivery."""

    status: Annotated[int, Field(strict=True, ge=100, le=599)] = 200
    """This status: delivered. 404 and 410: not delivered. Anything else leaves it open."""


class Reconcile(Section):
    """How to ask a provider whether it already has a delivery."""

    method: Literal["GET", "HEAD"] = "GET"
    """The method of the question."""
    url: LookupUrl
    """Where to ask. `{key}` stands for the delivery's idempotency key, `{notification_id}` for the provider's own id:
    a delivery of which the provider has named none cannot be asked about, and is treated as without a lookup."""
    delivered_when: DeliveredWhen = Field(default_factory=DeliveredWhen)

    @property
    def by_id(self) -> bool:
        """Whether the question needs the provider's own id."""
        return "{notification_id}" in self.url


class Outbox(Section):
    """Requests that the sidecar takes over and delivers by itself: `Prefer: respond-async` and `POST /jobs`."""

    enabled: Flag = True
    """false: such requests of this upstream are sent at once like all others."""
    policy: str = "patient"
    """The name of the policy, one of `policies`, that spaces the deliveries. Its `max_attempts` means nothing here."""
    policies: Mapping[CodeName, str] | None = None
    """Error code → the name of the policy that spaces the deliveries after a failure with this code. Not set:
    `unhurried` after RATE_LIMIT_EXCEEDED, QUOTA_EXCEEDED and SERVICE_OVERLOADED, unless `policy` is set."""
    unknown: Literal["hold", "resend"] = "hold"
    """What becomes of a delivery that may have been executed, where the provider can neither be asked nor honours its
    key. `hold`: it is not sent again; its job is `unknown` until somebody decides. `resend`: it is sent again until it
    has arrived, and may be executed more than once."""
    max_attempts: Count = 20
    """After this many attempts a delivery is `failed`, once reconciliation was tried."""
    max_lookups: Count = 10
    """After this many lookups without an answer a delivery is `unknown` and waits for an operator."""
    concurrency: Annotated[Count, Field(le=256)] = 8
    """How many deliveries may be under way at once."""
    notification_id: NotificationId | None = None
    """Not set: the provider's answer is noted, no id is taken from it."""
    reconcile: Reconcile | None = None
    """Not set: a delivery whose fate is unknown is sent again only if the provider honours its key, or by `unknown:
    resend`; else it waits for an operator."""
    max_response_bytes: Annotated[Bytes, Field(le=65_536)] = 65_536
    """How much of the body of the provider's last answer is kept, sealed, for `GET /jobs/{id}/result`. 0: none of
    it."""
    keep: Seconds = 604_800.0
    """How long finished jobs stay to be looked at, in seconds."""

    def policy_after(self, code: str) -> str:
        """The name of the policy that spaces the deliveries after this failure."""
        if self.policies is not None:
            return self.policies.get(code, self.policy)
        return UNHURRIED if code in _FULL and "policy" not in self.model_fields_set else self.policy

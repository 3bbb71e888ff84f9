"""After a failed attempt: try again, and when, or stop, and why.

Law: pure but for the retry budget, which is charged as the very last step, when everything else says yes. The checks
run in the order of `decide`, and the first that says no gives the reason: one of the closed set in
`telemetry/record.py`. What SPEC section 3 forbids (`sidecar/policy/resend.py`) nothing overrides, neither the server's
`x-should-retry: true` nor a policy's list; only the user's own `retry_non_idempotent`, which is part of that section.
"""

from __future__ import annotations

from collections.abc import Mapping

from config.errors import ErrorCode
from config.operations import Operation
from sidecar.policy import backoff, deadline
from sidecar.policy.backoff import Uniform
from sidecar.policy.breaker import Permit
from sidecar.policy.budget import RetryBudget
from sidecar.policy.choice import Chosen
from sidecar.policy.overrides import MOST_ATTEMPTS, NO_OVERRIDES, Overrides
from sidecar.policy.resend import NO_KEY, Resend, judge
from sidecar.policy.stages import StageBudgets
from telemetry.record import FATAL, SENT, Decision
from telemetry.sentences import CURES, seconds

TOO_EARLY = 425
_NOT_EXECUTED_STATUS = 429


class Failure:
    """One failed attempt. `status` is 0 when there was no answer; `momentary` marks a failure that may pass although
    its code is fatal: a TLS handshake that was merely cut off."""

    __slots__ = ("code", "momentary", "phase", "retry_after", "status", "verdict")

    def __init__(
        self,
        code: str,
        *,
        status: int = 0,
        phase: int = SENT,
        verdict: bool | None = None,
        retry_after: float | None = None,
        momentary: bool = False,
    ) -> None:
        self.code = code
        self.status = status
        self.phase = phase
        self.verdict = verdict
        """The server's own word, see `verdict.server_verdict`."""
        self.retry_after = retry_after
        self.momentary = momentary

    @property
    def not_executed(self) -> bool:
        """Whether the answer itself says that nothing was done."""
        return self.status == _NOT_EXECUTED_STATUS


class Situation:
    """The session as it stands after a failure. Made at the first one, so that healthy requests pay nothing for it;
    what changes from failure to failure is written to it."""

    __slots__ = (
        "attempts",
        "blamed",
        "body_given_up",
        "body_kept",
        "draining",
        "ends_at",
        "first",
        "key",
        "key_header",
        "key_helps",
        "keyed",
        "method",
        "operation",
        "overrides",
        "previous_delay",
        "refused_for",
        "retries_enabled",
        "stage",
        "workflow",
    )

    def __init__(self, method: str, first: Chosen, ends_at: float, overrides: Overrides = NO_OVERRIDES) -> None:
        self.method = method
        self.first = first
        """The policy chosen before the first failure, which gave the timeouts."""
        self.ends_at = ends_at
        self.overrides = overrides
        self.operation: Operation | None = None
        self.key = NO_KEY
        """Whose idempotency key the request carries: a word of `resend.py`."""
        self.key_header = "Idempotency-Key"
        self.key_helps = True
        """Whether a key of the app would be honoured."""
        self.keyed = False
        """Whether the provider honours that key: `resend.honoured`."""
        self.attempts = 1
        """Attempts made; one on a stale connection does not count."""
        self.blamed: list[Permit] = []
        """With which permits this request has failed: what its breakers have heard of it."""
        self.previous_delay = 0.0
        """The backoff before the attempt that failed."""
        self.body_kept = True
        """False once the request body has outgrown what is kept of it."""
        self.body_given_up = False
        """… or once memory was short, and what was kept of it had to go."""
        self.retries_enabled = True
        self.draining = False
        self.refused_for: float | None = None
        """When the breakers of all endpoints refuse: seconds until one would not."""
        self.stage: str | None = None
        self.workflow: str | None = None


class Terms:
    """What retries of one upstream's requests are bound to."""

    __slots__ = ("budget", "registry", "stages", "uniform")

    def __init__(
        self, registry: Mapping[str, ErrorCode], uniform: Uniform, budget: RetryBudget, stages: StageBudgets
    ) -> None:
        self.registry = registry
        self.uniform = uniform
        self.budget = budget
        self.stages = stages


def decide(failure: Failure, situation: Situation, chosen: Chosen, terms: Terms, now: float) -> Decision:
    """`chosen` is the policy of this failure: `PolicyChoice.after`."""
    entry = terms.registry.get(failure.code)
    no = (
        _fatal(failure, entry, chosen)
        or _forbidden(failure, situation, chosen, entry)
        or _switched_off(situation, chosen)
        or _draining(situation)
        or _not_listed(failure, chosen)
        or _used_up(failure, situation, chosen, terms, now)
    )
    if no is not None:
        return no
    own = backoff.delay(chosen.policy, situation.attempts, situation.previous_delay, terms.uniform)
    delay = backoff.effective_delay(chosen.policy, own, failure.retry_after)
    no = _no_time(delay, situation, now) or _refused(delay, situation)
    if no is not None:
        return no
    if not terms.budget.try_charge(now):
        return Decision(
            None,
            "budget",
            "retry_budget: too many requests to this upstream are retries already",
            "an upstream that fails less, or a higher retry_budget.ratio",
        )
    asked = f", Retry-After of {delay:g} s" if delay > own else ""
    limit = _max_attempts(situation, chosen)
    rule = f"policies.{chosen.id}: attempt {situation.attempts + 1} of {limit}{asked}"
    return Decision(delay, failure.code, rule, limit=limit, resend=resendable(failure, situation, chosen).rule)


def _fatal(failure: Failure, entry: ErrorCode | None, chosen: Chosen) -> Decision | None:
    if failure.verdict is True or failure.momentary:
        return None
    if entry is not None and entry.retry != "fatal":
        return None
    listed = chosen.policy.retry_status_codes
    if failure.status == TOO_EARLY and listed is not None and TOO_EARLY in listed:
        return None  # a 4xx like any other, unless somebody says that this one passes
    return Decision(None, FATAL, f"error registry: {failure.code} is fatal")


def _switched_off(situation: Situation, chosen: Chosen) -> Decision | None:
    if not situation.retries_enabled:
        return Decision(None, "disabled", "retries_enabled: false", "retries_enabled: true, or `POST /retries/enable`")
    if situation.overrides.retry_off:
        return Decision(None, "disabled", "x-sidecar-retry: off", "leaving the header out")
    if not chosen.policy.enabled:
        rule = f"policies.{chosen.id}.enabled: false"
        return Decision(None, "disabled", rule, f"`enabled: true` in policy {chosen.id}")
    return None


def _draining(situation: Situation) -> Decision | None:
    if situation.draining:
        return Decision(None, "draining", "no retry is begun while the sidecar stops")
    return None


def _forbidden(failure: Failure, situation: Situation, chosen: Chosen, entry: ErrorCode | None) -> Decision | None:
    if failure.verdict is False:
        return Decision(None, "server_verdict", "x-should-retry: false", "only the upstream can change its verdict")
    resend = resendable(failure, situation, chosen)
    bodiless = _without_body(situation)
    if not resend.allowed:
        remedy = resend.remedy
        if remedy and bodiless is not None:
            remedy += f"; the body is not there either: {bodiless.remedy}"
        return Decision(None, "not_resendable", resend.rule, remedy)
    if bodiless is not None:
        return bodiless
    # An idempotency conflict may be retried only with the same payload, and a resend is the same request.
    conditional = entry is not None and entry.retry == "conditional" and failure.verdict is not True
    if conditional and not situation.keyed:
        rule = f"error registry: {failure.code} is retried only with an idempotency key that the provider honours"
        remedy = f"an {situation.key_header}: with one it would have been" if situation.key_helps else ""
        return Decision(None, "not_resendable", rule, remedy)
    return None


def _without_body(situation: Situation) -> Decision | None:
    if situation.body_given_up:
        rule = "limits.memory_bytes: memory was short, and the copy of the request body was given up"
        return Decision(None, "memory", rule, "a higher limits.memory_bytes, or fewer large bodies at a time")
    if not situation.body_kept:
        rule = "limits.replay_body_bytes: the request body is larger"
        return Decision(None, "body_too_large", rule, "a higher limits.replay_body_bytes")
    return None


def resendable(failure: Failure, situation: Situation, chosen: Chosen) -> Resend:
    """SPEC section 3 for this failure; also asked before a request goes to a fallback."""
    operation = situation.operation
    own = operation.retry_non_idempotent if operation is not None else None
    return judge(
        failure.phase,
        situation.method,
        keyed=situation.keyed,
        key=situation.key,
        not_executed=failure.not_executed,
        retry_non_idempotent=chosen.policy.retry_non_idempotent if own is None else own,
        header=situation.key_header,
        key_helps=situation.key_helps,
    )


def _not_listed(failure: Failure, chosen: Chosen) -> Decision | None:
    """A policy's lists narrow what the registry allows."""
    policy = chosen.policy
    codes, statuses = policy.retryable_errors, policy.retry_status_codes
    if codes is not None and failure.code not in codes:
        rule = f"policies.{chosen.id}.retryable_errors: [{', '.join(codes)}]"
        return Decision(None, FATAL, rule, f"{failure.code} in this list")
    if statuses is not None and failure.status and failure.status not in statuses:
        rule = f"policies.{chosen.id}.retry_status_codes: [{', '.join(map(str, statuses))}]"
        return Decision(None, FATAL, rule, f"{failure.status} in this list")
    return None


def _max_attempts(situation: Situation, chosen: Chosen) -> int:
    asked = situation.overrides.max_attempts
    return chosen.policy.max_attempts if asked is None else asked


def _used_up(failure: Failure, situation: Situation, chosen: Chosen, terms: Terms, now: float) -> Decision | None:
    limit = _max_attempts(situation, chosen)
    if situation.attempts >= limit:
        if situation.overrides.max_attempts is not None:
            remedy = CURES.get(failure.code) or ("a higher number in this header" if limit < MOST_ATTEMPTS else "")
            return Decision(None, "attempts", f"x-sidecar-max-attempts: {limit}", remedy)
        rule = f"policies.{chosen.id}.max_attempts: {limit}"
        more = f"a higher max_attempts in policy {chosen.id}" if limit < MOST_ATTEMPTS else ""
        remedy = CURES.get(failure.code, more)
        return Decision(None, "attempts", rule, remedy)
    stage, workflow = situation.stage, situation.workflow
    if stage is None:
        return None
    allowed = terms.stages.limit(stage)
    made = situation.attempts if workflow is None else terms.stages.made(workflow, stage, now)
    if made < allowed:
        return None
    remedy = f"a higher number for `{stage}` under `stages`" + (", or a new workflow id" if workflow else "")
    return Decision(None, "stage_budget", f"stages.{stage}: {allowed}", remedy)


def _no_time(delay: float, situation: Situation, now: float) -> Decision | None:
    if deadline.fits(delay, now, situation.ends_at):
        return None
    asked = situation.overrides.timeout
    if asked is not None:
        where, remedy = f"x-sidecar-timeout: {asked:g}", "a higher number in this header (x-sidecar-timeout)"
    else:
        where = f"policies.{situation.first.id}.total_timeout: {situation.first.policy.total_timeout:g}"
        remedy = "a longer total_timeout, or an x-sidecar-timeout header"
    left = deadline.left(now, situation.ends_at)
    rule = f"{where}, and a wait of {seconds(delay)} does not fit into the time left ({seconds(left)})"
    return Decision(None, "deadline", rule, remedy)


def _refused(delay: float, situation: Situation) -> Decision | None:
    """Waiting makes sense only if a breaker will let the attempt through afterwards."""
    wait = situation.refused_for
    if wait is None or wait <= delay:
        return None
    return Decision(
        None,
        "breaker_open",
        f"breaker: no endpoint is let through for another {wait:.3g} s",
        "another endpoint, or a `fallback` upstream",
    )

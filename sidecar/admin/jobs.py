"""Jobs of the outbox: handed in, looked at, and decided by hand when their fate is unknown.

Law: a job is answered for after it is on disk. The upstream of a delivery follows from its url, as it does for the
app's own requests, or it is named and the url is a path there. Reading never creates a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from sidecar import clock
from sidecar.admin.changes import Changes, who
from sidecar.admin.fields import Answer, Body, Flag, Moment, NoBody, NoQuery, Number, Query, Text
from sidecar.admin.letters_asked import Content, HeadersGiven, Reason, Url, some
from sidecar.admin.problem import Problem, wrong
from sidecar.admin.route import Call, Route, Told, json_response
from sidecar.failures import Refused
from sidecar.proxy import Proxy

if TYPE_CHECKING:
    from sidecar.durable.jobs import Jobs as Outbox
    from sidecar.durable.jobs import Wanted
    from sidecar.upstream.endpoints import UpstreamState

JobState = Literal["in_progress", "succeeded", "retryable_failed", "failed", "unknown"]
Name = Annotated[str, Field(min_length=1, max_length=200)]
_SUBMIT_LIMIT = 16 * 1024 * 1024
_JOB = {"id": "The id of a job, `job_…`."}


class JobsQuery(Query):
    """Which jobs; newest first."""

    state: JobState | None = None
    """Only those in this state."""
    since: Moment | None = None
    """Only those handed in since: a time (2026-01-29T12:00:00Z), or how long ago (15m)."""
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class RequestGiven(Body):
    """What to send."""

    method: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_-]{0,31}$")] = "POST"
    upstream: Name | None = None
    """The name of an upstream of the configuration. With it `url` is a path there, as the upstream itself is asked for
    it, without the prefix of a `route`."""
    url: Url
    """Absolute, or with `upstream` a path, which begins with `/`."""
    headers: HeadersGiven = Field(default_factory=dict)
    """Name → value. The idempotency key is the sidecar's own."""
    body: str | None = None
    """As text."""
    body_base64: Content | None = None
    """When it is not text."""

    @model_validator(mode="after")
    def _one_body(self) -> RequestGiven:
        if self.body is not None and self.body_base64 is not None:
            raise ValueError("give either `body` or `body_base64`")
        return self

    @property
    def content(self) -> bytes:
        return (self.body_base64 or b"") if self.body is None else self.body.encode()


class DeliveryGiven(Body):
    """One thing to deliver."""

    recipient: Name
    """Who gets it; once per job. Kept sealed."""
    request: RequestGiven


class JobGiven(Body):
    """A job: what is to be delivered to whom."""

    idempotency_key: Name
    """The same one again returns the first job."""
    subject: Name
    """What it is about. With recipient and version it makes a delivery unique, whichever job asks for it."""
    version: Annotated[Number, Field(ge=0)] = 0
    """A rerun of a subject that succeeded needs a strictly higher one."""
    deliveries: Annotated[tuple[DeliveryGiven, ...], some(1000)]


class Resolution(Body):
    """What somebody found out about a delivery at the provider."""

    delivery: Number
    """Its `delivery_id`."""
    delivered: Flag
    """true: the provider has it. false: it has not, and it is sent again."""
    notification_id: Text | None = None
    """The provider's own id of it, if known."""
    reason: Reason
    """Where it was looked up."""


class DeliveryShown(Answer):
    """One delivery."""

    delivery_id: int
    recipient: str
    upstream: str
    method: str
    url: str
    """Without its secrets."""
    state: str
    """queued, sending, reconcile, sent, failed or unknown."""
    attempts: int
    lookups: int
    started_at: str | None
    notified_at: str | None
    notification_id: str | None
    next_at: str | None
    last_error: str | None


class JobShown(Answer):
    """One job. Times are RFC 3339."""

    job_id: str
    idempotency_key: str
    subject: str
    version: int
    state: JobState
    created_at: str
    finished_at: str | None
    upstream: str
    """Of its first delivery, like the next two."""
    method: str
    url: str
    delivery_count: int


class AnswerShown(Answer):
    """What a provider said."""

    status: int
    headers: tuple[tuple[str, str], ...]
    """But for its cookies."""
    body_bytes: int
    """How long its body was."""
    complete: bool
    """Whether all of it was kept: `outbox.max_response_bytes`."""
    body: str | None = None
    """As text."""
    body_base64: str | None = None
    """When it is not text."""


class ResultShown(Answer):
    """One delivery and the provider's last answer."""

    delivery_id: int
    state: str
    answer: AnswerShown | None
    """null: none came so far."""
    problem: str | None = None
    """Why an answer that was kept cannot be shown."""


class JobResult(Answer):
    """What providers said about the deliveries of a job."""

    job_id: str
    state: JobState
    results: tuple[ResultShown, ...]


class JobExplained(JobShown):
    """With its deliveries."""

    deliveries: tuple[DeliveryShown, ...]


class JobPage(Answer):
    """Some jobs, newest first."""

    items: tuple[JobShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""


class Jobs:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/jobs", "Jobs of the outbox, newest first.", self.page, JobPage, JobsQuery, refusals=(503,))
        yield Route(
            "POST", "/jobs", "Hand in a job; it is delivered until it has arrived or somebody must decide.",
            self.submit, JobExplained, NoQuery, JobGiven, refusals=(409, 422, 503), otherwise={202: JobExplained},
            body_limit=_SUBMIT_LIMIT,
        )  # fmt: skip
        yield Route(
            "GET", "/jobs/{id}", "One job with its deliveries.", self.one, JobExplained, parts=_JOB,
            refusals=(404, 503),
        )  # fmt: skip
        yield Route(
            "GET", "/jobs/{id}/result", "What the provider answered last to each delivery of a job.",
            self.result, JobResult, parts=_JOB, refusals=(404, 503), sealed=True,
        )  # fmt: skip
        yield Route(
            "POST", "/jobs/{id}/resolve", "Say whether the provider has a delivery whose fate is unknown.",
            self.resolve, JobExplained, NoQuery, Resolution, parts=_JOB, refusals=(404, 409, 503),
        )  # fmt: skip

    async def page(self, call: Call[JobsQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, "jobs")
        query, durable = call.query, self._proxy.kept.durable
        if durable is None or durable.jobs is None:
            return {"items": [], "next_cursor": None, "total": 0}
        since = None if query.since is None else query.since.wall(clock.wall())
        return await durable.jobs.page(state=query.state, since=since, limit=query.limit, cursor=query.cursor)

    async def one(self, call: Call[NoQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, f"job {call.named('id')[:60]}")
        return await self._jobs(call.named("id")).get(call.named("id"))

    async def result(self, call: Call[NoQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, f"the answer to job {call.named('id')[:60]}")
        return await self._jobs(call.named("id")).result(call.named("id"))

    async def submit(self, call: Call[NoQuery, JobGiven]) -> Told:
        from sidecar.durable.jobs import Submission  # with the store, only for who hands something in

        given = call.body
        wanted = [self._wanted(number, one) for number, one in enumerate(given.deliveries)]
        submission = Submission(given.idempotency_key, given.subject, wanted, given.version)
        submission.check()
        durable = await self._proxy.kept.open()
        assert durable.jobs is not None  # attached before anybody gets to see the store
        job, created = await durable.jobs.submit(submission)
        if created:
            await self._changes.note(
                call.request,
                "handed in",
                about=f"job {job['job_id']}",
                before=None,
                after={"subject": given.subject, "version": given.version, "deliveries": len(wanted)},
            )
        return json_response(job, 202 if created else 200)

    async def resolve(self, call: Call[NoQuery, Resolution]) -> Told:
        job_id, body = call.named("id"), call.body
        if body.notification_id is not None and not body.delivered:
            raise wrong("notification_id", body.notification_id, "goes with `delivered: true` only; leave it out")
        jobs = self._jobs(job_id)
        before = (await jobs.get(job_id))["state"]
        job = await jobs.resolve(
            job_id,
            body.delivery,
            who(call.request),
            body.reason,
            delivered=body.delivered,
            notification_id=body.notification_id,
        )
        await self._changes.note(
            call.request,
            "resolved as delivered:" if body.delivered else "resolved as not delivered:",
            about=f"delivery {body.delivery} of job {job_id}",
            before={"state": before},
            after={"state": job["state"]},
            reason=body.reason,
        )
        return job

    def _jobs(self, job_id: str) -> Outbox:
        durable = self._proxy.kept.durable
        if durable is None or durable.jobs is None:
            raise Problem(404, "NOT_FOUND", f"there is no job {job_id[:80]!r}: none has been handed in so far")
        return durable.jobs

    def _wanted(self, number: int, given: DeliveryGiven) -> Wanted:
        from sidecar.durable.jobs import Wanted

        request, field = given.request, f"deliveries.{number}.request.url"
        upstream, url = self._target(f"deliveries.{number}.request", request)
        if not upstream.settings.outbox.enabled:
            told = f"upstream {upstream.name} takes no jobs (`outbox.enabled: false`); send the request itself"
            raise wrong(field, request.url, told)
        headers = [(name.encode(), value.encode("latin-1")) for name, value in request.headers.items()]
        return Wanted(given.recipient, upstream.label, request.method, url, headers, request.content)

    def _target(self, place: str, request: RequestGiven) -> tuple[UpstreamState, str]:
        """The upstream, and the url made absolute."""
        field, directory, url = f"{place}.url", self._proxy.directory, request.url
        if request.upstream is not None:
            known = directory.configured.get(request.upstream)
            if known is None or not (known.settings.endpoints or known.settings.route):
                able = [name for name, one in directory.configured.items() if one.settings.endpoints]
                told = f"is no upstream with endpoints or a route (there is: {', '.join(able) or 'none'})"
                raise wrong(f"{place}.upstream", request.upstream, told)
            if not url.startswith("/") or url.startswith("//"):
                raise wrong(field, url, "must be a path where `upstream` is given, as in /v1/charges")
            choice = directory.named(request.upstream).choices[0]
            url = f"{choice.endpoint.origin.scheme}://{choice.host.decode('latin-1')}{url}"
            return known, url
        scheme, _, rest = url.partition("://")
        authority = rest.partition("/")[0].partition("?")[0]
        if scheme.lower() not in ("http", "https") or not authority:
            told = "must be an absolute http or https url; or give `upstream`, and a path that begins with `/`"
            raise wrong(field, url, told)
        try:
            return directory.forward(scheme.lower(), authority.encode("latin-1")).upstream, url
        except Refused as refused:
            raise wrong(field, url, str(refused)) from None

"""The part of an exchange that hands a request over to the outbox: `Prefer: respond-async`.

Law: 202 is said after the job is durable, never before. The preference is one: where it cannot be followed (the
outbox is off, the body too large, the store in trouble) the request is sent at once like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson

from config.addresses import is_loopback, is_unspecified, join_host_port
from sidecar.durable.trouble import OtherPayload, Trouble
from sidecar.failures import AnsweredHere, Refused
from sidecar.once import Once
from sidecar.policy.resend import READS

if TYPE_CHECKING:
    from sidecar.durable.jobs import Jobs, Submission
    from sidecar.upstream.endpoints import UpstreamState

_ASYNC = b"respond-async"


class Posting(Once):
    """See the module's law."""

    __slots__ = ()

    async def _take_part(self) -> None:
        upstream = self._upstream
        assert upstream is not None
        wanted = self._overrides.respond_async and upstream.settings.outbox.enabled
        if wanted and self.record.method not in READS:
            await self._post(upstream)
        await super()._take_part()

    async def _post(self, upstream: UpstreamState) -> None:
        """Raises AnsweredHere when the outbox has it."""
        await self.become_task()
        body = self._request.body
        self._ask_for_body()
        if body is not None and not await body.whole(upstream.timeouts.body_idle):
            return
        try:
            durable = await self._proxy.kept.open()
            jobs: Jobs | None = durable.jobs
            if jobs is None:
                return
            content = b"" if body is None else body.content
            job, new = await self._unhurried(jobs.submit(self._submission(upstream, content)))
        except OtherPayload as other:
            raise Refused(other.code, str(other), reason="idempotency", status=other.status) from None
        except Trouble as trouble:
            self.record.unprotected = f"the outbox did not take it, because {trouble.message}"
            return
        raise AnsweredHere(
            b"Content-Type: application/json\r\nPreference-Applied: respond-async\r\n" + self._location(job["job_id"]),
            orjson.dumps(job),
            "respond_async",
            status=202 if new else 200,
            outcome="queued",
        )

    def _location(self, job_id: str) -> bytes:
        transport = self._client.transport
        if transport is None:
            return b""
        here, peer = (str((transport.get_extra_info(name) or ("",))[0]) for name in ("sockname", "peername"))
        place = job_address(self._proxy.answers.documentation, job_id, here, peer)
        return b"" if place is None else b"Location: %b\r\n" % place.encode()

    def _submission(self, upstream: UpstreamState, body: bytes) -> Submission:
        from sidecar.durable.jobs import Submission, Wanted

        kept, version = self._proxy.kept, self._overrides.version or 0
        headers = [
            (name, value)
            for name, value in self._headers()
            if not (name.lower() == b"prefer" and _ASYNC in value.lower())
        ]
        key, _ = self._key_of(headers, upstream.settings.idempotency.header)
        subject = self._session_id()
        if key is not None:  # the same call again is the same job
            caller, place = self._caller_id(headers), self._url()
            subject = kept.digest("respond-async", upstream.name, caller, self.record.method, place, key)
        return Submission(
            idempotency_key=f"{subject}-{version}" if version else subject,
            subject=subject,
            deliveries=[Wanted(upstream.label, upstream.label, self.record.method, self._url(), headers, body)],
            version=version,
        )


def job_address(admin: str, job_id: str, here: str, peer: str) -> str | None:
    """Where an app can look at its job, None where the admin port is out of its reach. `here` and `peer` are the two
    ends of its connection."""
    base = urlsplit(admin)
    host = base.hostname
    if host is None or (is_loopback(host) and not (is_loopback(peer) or peer == here)):
        return None
    if is_unspecified(host):  # every address of this machine: the app knows one of them
        host = here
    return f"{base.scheme}://{join_host_port(host, base.port)}/jobs/{job_id}"

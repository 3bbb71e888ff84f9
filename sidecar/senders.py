"""What the durable parts send with: replays, deliveries and lookups become errands, and their ends become results.

Law: no decision about whether something may be sent is made here; claims, verdicts and rows decide that before. A
credential goes only to the host it was meant for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from sidecar import clock
from sidecar.durable.trouble import NotNow, Trouble
from sidecar.errand import Sending
from sidecar.policy import backoff
from sidecar.policy.verdict import retry_after
from sidecar.upstream.endpoints import AUTOMATIC
from telemetry.names import Attribute, Field
from telemetry.record import NOT_CONNECTED, Trace

if TYPE_CHECKING:
    from sidecar.durable.claims import Result
    from sidecar.durable.delivery import Found, Sent
    from sidecar.durable.entry import Answer, Entry
    from sidecar.durable.layers import Durable
    from sidecar.durable.outbox_rows import Delivery
    from sidecar.proxy import Proxy

_NOTICE = 10.0


class Senders:
    """Attached to the store each time one is opened."""

    def __init__(self, proxy: Proxy, environ: Mapping[str, str]) -> None:
        self._proxy = proxy
        self._environ = environ

    def attach(self, durable: Durable) -> None:
        from sidecar.durable.notify import Notifier

        proxy, kept = self._proxy, self._proxy.kept
        self._durable = durable
        durable.attach(
            send_replay=self.replay,
            send_delivery=self.deliver,
            lookup=self.look_up,
            live_waiting=self._live_waiting,
            refuses=self._refuses,
            on_event=self._told,
            stages=lambda: proxy.settings.stages,
            outbox_terms_of=kept.outbox_terms_of,
            delay=self._delay,
            outbox_keep=self._outbox_keep,
            audit_keep=lambda: proxy.settings.admin.audit_keep,
            redactor=proxy.signals.redactor,
        )
        durable.notifier = notifier = Notifier(proxy.settings.dead_letter, self._notify)
        durable.letters.on_kept = lambda failure, kept: notifier.kept(
            failure.upstream, failure.error_class, kept.dlq_id
        )

    # ---- replays -------------------------------------------------------------------------------------------------

    async def replay(self, entry: Entry) -> Result:
        from sidecar.durable.claims import Result

        letters, proxy = self._durable.letters, self._proxy
        rules = letters.terms_of(entry.upstream).replay
        try:
            request = await letters.request(entry.dlq_id)
            headers = proxy.kept.credentials().headers_for(entry, request.headers, rules, self._environ)
        except NotNow as refused:
            return Result(ok=False, code=refused.code, phase=NOT_CONNECTED, message=str(refused), held_back=True)
        idempotency = letters.terms_of(entry.upstream).idempotency
        sending = Sending(
            proxy,
            "replay",
            entry.upstream,
            request.method,
            request.url,
            headers,
            request.body if request.body_file is None else letters.payloads.body(request),
            len(request.body) if request.body_file is None else request.body_size,
            injected=idempotency.header.lower() if entry.key_injected else None,
            guarded=not entry.key_injected,
            retries=True,
            origin=_origin(entry.sanitized_context),
            caller=entry.api_key_id,
        )
        sending.record.dlq_id = entry.dlq_id
        sending.record.stage = entry.stage
        begun = clock.monotonic()
        await sending.go()
        return Result(
            ok=sending.ok,
            code=sending.code,
            status=sending.status,
            phase=sending.phase,
            message=sending.message,
            held_back=sending.held_back,
            response=sending.answer,
            session_id=sending.record.session_id.decode(),
            seconds=clock.monotonic() - begun,
        )

    def _live_waiting(self, upstream: str) -> bool:
        return any(state.turns.busy for state in self._proxy.directory.states() if state.label == upstream)

    def _refuses(self, upstream: str) -> bool:
        """Every breaker it could go through is open."""
        now = clock.monotonic()
        states = [
            breaker.state(now)
            for state in self._proxy.directory.states()
            if state.label == upstream
            for _, breaker in state.breakers()
        ]
        return bool(states) and all(state == "open" for state in states)

    # ---- the outbox ----------------------------------------------------------------------------------------------

    async def deliver(self, delivery: Delivery) -> Sent:
        from sidecar.durable.delivery import Sent, notification_id_of

        terms = self._proxy.kept.outbox_terms_of(delivery.upstream)
        headers, _, derived = _keyed(delivery, terms.idempotency.header)
        injected = terms.idempotency.header.lower() if derived else None
        sending = self._delivery(delivery, "outbox", delivery.method, delivery.url, headers, injected)
        await sending.go()
        answer, known = sending.answer, sending.known
        return Sent(
            ok=sending.ok,
            code=sending.code,
            status=sending.status,
            phase=sending.phase,
            message=sending.message,
            fatal=known is not None and known.retry == "fatal" and not sending.ok,
            held_back=sending.held_back,
            notification_id=None
            if answer is None
            else notification_id_of(terms.outbox.notification_id, answer.headers, answer.body),
            evidence=f"answered {sending.status}" if sending.ok else "",
            retry_after=self._asked_to_wait(answer),
            answer=answer,
            answer_size=sending.record.response_bytes,
        )

    def _asked_to_wait(self, answer: Answer | None) -> float | None:
        return None if answer is None else retry_after(answer.headers, self._proxy.wall(clock.monotonic()))

    def _delivery(
        self,
        delivery: Delivery,
        kind: str,
        method: str,
        url: str,
        headers: list[tuple[bytes, bytes]],
        injected: str | None = None,
    ) -> Sending:
        body: Any = b""
        size = 0
        if kind == "outbox":
            body, size = delivery.body, len(delivery.body)
            if delivery.body_file is not None:
                bodies = self._durable.letters.bodies
                size = bodies.size_of(delivery.body_file)
                body = bodies.read(delivery.body_file, delivery.host, delivery.send_key)
        return Sending(self._proxy, kind, delivery.upstream, method, url, headers, body, size, injected=injected)

    async def look_up(self, delivery: Delivery) -> Found:
        from sidecar.durable.delivery import Found, found_by, notification_id_of
        from sidecar.durable.entry import host_of

        terms = self._proxy.kept.outbox_terms_of(delivery.upstream)
        rule = terms.outbox.reconcile
        if rule is None:
            return Found(None, message="there is no lookup for this upstream (`outbox.reconcile`)")
        headers, key, _ = _keyed(delivery, terms.idempotency.header)
        parts = {"{key}": key, "{notification_id}": delivery.notification_id or ""}
        url = rule.url
        for place, value in parts.items():
            url = url.replace(place, quote(value, safe=""))  # data, that must not lead elsewhere
        if host_of(url) != delivery.host:
            headers = []  # its credentials are for another host
        headers = [(name, value) for name, value in headers if not name.lower().startswith(b"content-")]
        sending = self._delivery(delivery, "reconcile", rule.method, url, headers)
        await sending.go()
        answer = sending.answer
        if answer is None:
            return Found(None, message=sending.message or "no answer to the lookup")
        found = found_by(
            rule, answer.status, notification_id_of(terms.outbox.notification_id, answer.headers, answer.body)
        )
        return replace(found, retry_after=self._asked_to_wait(answer))

    def _outbox_keep(self) -> float:
        """A job may have deliveries to several upstreams, so it stays for the longest of their times."""
        upstreams = self._proxy.settings.upstreams.values()
        return max([upstream.outbox.keep for upstream in upstreams], default=AUTOMATIC.outbox.keep)

    def _delay(self, upstream: str, code: str, failures: int, wait: float | None) -> float:
        """As the upstream's `outbox` spaces them after this failure, and as long as the provider asks for."""
        policy = self._proxy.settings.policies[self._proxy.kept.settings_of(upstream).outbox.policy_after(code)]
        spaced = backoff.delay(policy, max(1, failures), 0.0, clock.uniform)
        return backoff.effective_delay(policy, spaced, wait)

    # ---- telling -------------------------------------------------------------------------------------------------

    def _told(self, event: str, facts: dict[str, object]) -> None:
        signals, upstream = self._proxy.signals, str(facts.get("upstream", ""))
        if event == "replayed":
            signals.replayed(upstream, str(facts["dlq_id"]), str(facts["outcome"]))
        elif event == "escalated":
            signals.escalated(upstream, str(facts["dlq_id"]), str(facts["code"]))
        elif event == "outbox_gave_up":
            signals.delivery_ended(upstream, str(facts["job_id"]), str(facts["state"]), facts)
        else:
            body = f"delivery {facts.get('delivery')} was marked sent without the provider's word; it is asked"
            fields = {Field.BODY: body, Attribute.UPSTREAM: upstream}
            name = "sidecar.outbox.order_violated"
            self._proxy.log.event("error", name, upstream, clock.monotonic(), lambda: fields)

    async def _notify(self, url: str, message: dict[str, Any]) -> None:
        body = orjson.dumps(message)
        headers = [(b"Content-Type", b"application/json"), (b"x-sidecar-timeout", b"%g" % _NOTICE)]
        sending = Sending(self._proxy, "outbox", "", "POST", url, headers, body, len(body), secret=True)
        await sending.go()
        if not sending.ok:
            raise NotNow(f"the notice was not taken: {sending.code}", "look at `dead_letter.notify_url`")

    def breaker_closed(self, upstream: str) -> None:
        """`replay.auto: on_close`."""
        durable = self._proxy.kept.durable
        if durable is not None and durable.replayer is not None:
            self._proxy.kept.beside(self._drain(durable, upstream), "replay after a breaker closed")

    async def _drain(self, durable: Durable, upstream: str) -> None:
        assert durable.replayer is not None
        try:
            await durable.replayer.breaker_closed(upstream)
        except Trouble:
            pass  # the store says so itself; the entries wait


def _origin(context: Mapping[str, object]) -> Trace | None:
    """The trace in which the request was first made."""
    trace_id, span_id = context.get("trace_id"), context.get("span_id")
    if not isinstance(trace_id, str) or not isinstance(span_id, str):
        return None
    return Trace(int(trace_id, 16), int(span_id, 16), 0, True)


def _keyed(delivery: Delivery, header: str) -> tuple[list[tuple[bytes, bytes]], str, bool]:
    """The headers with the delivery's key, which is the app's own where it gave one; that key; and whether it was
    derived here, so that nobody may take it for the app's."""
    wanted = header.lower().encode()
    given = next((value for name, value in delivery.headers if name.lower() == wanted), None)
    if given is not None:
        return list(delivery.headers), given.decode("latin-1"), False
    return [*delivery.headers, (header.encode(), delivery.send_key.encode())], delivery.send_key, True

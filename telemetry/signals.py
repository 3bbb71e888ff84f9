"""The one thing the exchange calls when a request is over: every signal follows from the record it hands in.

Law: metrics and aggregates always; the rest only for sessions that are interesting, sampled, or asked for. Whatever
goes wrong in here is counted and logged, and never reaches the request. Nothing here waits: files, pipes and the
collector have threads of their own, with bounded queues that drop and count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import ErrorCode, registry
from config.telemetry import Telemetry
from telemetry import explain, log_lines, otel_settings
from telemetry.aggregates import Aggregates
from telemetry.earlier import EarlierSessions
from telemetry.error_records import ErrorRecords
from telemetry.events import Events, RetryEvent, as_line
from telemetry.export import Export, Surroundings, begin_export
from telemetry.logs import Log
from telemetry.metrics import Metrics
from telemetry.names import Attribute, Event, Field
from telemetry.rates import TokenBuckets
from telemetry.record import Errand, Session
from telemetry.redact import Redactor
from telemetry.rotating import RotatingFile
from telemetry.sessions import Sessions, Wall, is_interesting, serialise
from telemetry.spans import span_count
from telemetry.timestamps import rfc3339
from telemetry.traces import Ids, Sampler, Traces
from telemetry.writer import Writer

_ERROR_RECORD_RATE, _ERROR_RECORD_BURST = 50.0, 500.0
_OUTLIVING_RATE, _OUTLIVING_BURST = 10.0, 200.0  # sessions of one upstream that outlive the process
_CLOSE_WITHIN = 5.0
_EXPIRE_EVERY = 60.0
_TRANSITIONS = 1_000
_SURPLUS_TOLD_EVERY = 60.0
# What is left out of files, in the line that tells of it.
_ERROR_RECORD, _EVENT_FILE = "error record", "event in telemetry.events.file"

_BREAKER_EVENTS = {
    "open": "circuit_breaker_opened",
    "half_open": "circuit_breaker_half_open",
    "closed": "circuit_breaker_closed",
}


class Transition(NamedTuple):
    """A breaker's change of state; `at` is wall time."""

    at: float
    upstream: str
    endpoint: str
    from_state: str
    to_state: str
    why: str


class Signals:
    """See the module's law. `wall(monotonic)` is wall time; `ids(bits)` are random bits for trace ids."""

    def __init__(
        self,
        settings: Telemetry,
        *,
        environ: Mapping[str, str],
        monotonic: Callable[[], float],
        wall: Wall,
        ids: Ids,
        log: Log | None = None,
        state_dir: Path | None = None,
        upstreams: Iterable[str] = (),
        subsystems: Mapping[str, str] | None = None,
        codes: Mapping[str, ErrorCode] | None = None,
        version: str = "",
        revision: str = "",
        server_id: str = "",
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._server_id = server_id
        self.log = log or Log()
        self.metrics = Metrics(version, revision, upstreams)
        self.metrics.config_read(wall(monotonic()))
        self.aggregates = Aggregates(wall, subsystems)
        self.redactor = Redactor(settings.redact_query, settings.redact_paths)
        self.sessions = Sessions(settings.sessions, settings.sessions_ttl, wall)
        self.writer = Writer(failed=self._job_failed)
        self.log.attach(self.writer, self.metrics.log_suppressed, self.redactor.clauses)
        self.log.configure(settings.log.format, settings.log.level)  # before the first line that may have to be said
        self._event_file = self._open_event_file(settings)
        # Kept apart from the events, where a storm of retries would push out the very change that explains it.
        self.transitions: deque[Transition] = deque(maxlen=_TRANSITIONS)
        self.events = Events(wall, None if self._event_file is None else self._event_to_file)
        self._error_records: ErrorRecords | None = None
        self._error_rate = TokenBuckets(_ERROR_RECORD_RATE, _ERROR_RECORD_BURST)
        self.earlier: EarlierSessions | None = None
        self._outliving_rate = TokenBuckets(_OUTLIVING_RATE, _OUTLIVING_BURST)
        if state_dir is not None:
            place, ttl = state_dir / "logs" / "sessions.jsonl", settings.sessions_ttl
            self.earlier = EarlierSessions(place, server_id, ttl, self._wall_now, self._file_refused)
            self.writer.flushers.append(self.earlier.file.flush)
            self._error_records = ErrorRecords(
                state_dir / "logs", codes or registry(), wall, self._wall_now, self.redactor, self._file_refused
            )
            self.writer.flushers.append(self._error_records.flush)
        self.export, sampler = self._begin_export(environ, server_id)
        self.traces = Traces(ids, sampler)
        self.begin = self.traces.begin
        self._expire_at = monotonic() + _EXPIRE_EVERY
        self._refused: Counter[str] = Counter()
        self.configure(settings)

    def configure(
        self,
        settings: Telemetry,
        upstreams: Iterable[str] = (),
        subsystems: Mapping[str, str] | None = None,
        codes: Mapping[str, ErrorCode] | None = None,
    ) -> None:
        """At the start and on each reload. Files and export stay as they were begun."""
        self.redactor.configure(settings.redact_query, settings.redact_paths)
        self.sessions.configure(settings.sessions, settings.sessions_ttl)
        if self.earlier is not None:
            self.earlier.configure(settings.sessions_ttl)
        if codes is not None and self._error_records is not None:
            self._error_records.registry = codes
        self._slow = settings.slow_threshold
        self._access = settings.log.access
        self._all_told = settings.log.access or settings.log.level == "debug"
        self._sample_every = settings.healthy_sample
        self._until_sample = settings.healthy_sample
        self.log.configure(settings.log.format, settings.log.level)
        self.metrics.configure(upstreams)
        if subsystems is not None:
            self.aggregates.subsystems = subsystems

    # ---- the record ----------------------------------------------------------------------------------------------

    def observe(self, session: Session, complete: Callable[[], None] | None = None) -> None:
        """A finished session. `complete` fills in what only kept sessions need (client, user agent, …), and is called
        before one is kept, so that healthy ones do not pay for it."""
        try:
            self.metrics.observe(session)
            self.aggregates.observe(session)
            trace = session.trace
            if (
                session.outcome == "first_try"
                and session.fallback_from is None
                and session.ended - session.started <= self._slow
            ):
                self._until_sample -= 1
                if self._until_sample and not self._all_told and (trace is None or not trace.sampled):
                    if trace is not None:
                        self.metrics.spans["unsampled"] += 1 + len(session.attempts)
                    return
            self._observe_closely(session, complete)
        except Exception as error:  # the request is over and was served; only telemetry has a problem
            self._failed(error)

    def attempt_begun(self, session: Session) -> None:
        """Another attempt of a session that goes on: told when it happens, not when the session has ended."""
        try:
            self.events.attempt_begun(session)
        except Exception as error:  # as above
            self._failed(error)

    def errand_ended(self, errand: Errand, complete: Callable[[], None]) -> None:
        """Something the sidecar sent by itself: its attempts are counted, and it is kept, logged and traced; it is no
        session, which is what an app asked for."""
        try:
            self.metrics.errand(errand)
            self._observe_closely(errand, complete)
        except Exception as error:  # as above
            self._failed(error)

    def _observe_closely(self, session: Session, complete: Callable[[], None] | None) -> None:
        interesting = is_interesting(session, self._slow)
        trace = session.trace
        sampled = trace is not None and trace.sampled
        if complete is not None:
            complete()
        if interesting:
            self.sessions.keep(session)
            self._let_outlive(session)
            self.events.session_ended(session)
            self._log_session(session, log_lines.level_of(session), Event.SESSION)
            self._record_errors(session)
        else:
            self._until_sample -= session.outcome != "first_try"  # those `observe` has counted
            if self._until_sample <= 0:
                self._until_sample = self._sample_every
                if self._sample_every:
                    self.sessions.sample(session)
        if self._access and not interesting:
            self._log_session(session, "info", Event.ACCESS)
        if self.log.debugging:
            for number, attempt in enumerate(session.attempts, 1):
                fields = partial(log_lines.attempt_fields, session, number, attempt, self.redactor)
                self.log.event("debug", Event.ATTEMPT, session.upstream, self._monotonic(), fields, limited=False)
        if trace is None or self.export is None:
            return
        if sampled or interesting:
            for attempt in session.attempts:
                attempt.span_id = attempt.span_id or self.traces.new_span_id()  # none was sent upstream
            if not isinstance(session, Errand):
                self.metrics.exemplify(session, self._wall(session.ended))
            self.export.spans(session)
        else:
            self.metrics.spans["unsampled"] += span_count(session)

    def _let_outlive(self, session: Session) -> None:
        """On disk, for whoever asks after a restart; of a flood a part."""
        if self.earlier is None:
            return
        row = self.sessions.ring.refusals(session)
        if (row is None or row.count == 1) and self._outliving_rate.take(session.upstream, self._monotonic()):
            self.writer.put(self._write_outliving, session)

    def _write_outliving(self, session: Session) -> None:
        assert self.earlier is not None
        shown = serialise(session, self._wall, self.redactor, self._server_id)
        shown["refusals"] = None
        shown["summary"] = explain.summary(session)
        shown["explanation"] = explain.as_json(session, self.redactor, self._slow)
        self.earlier.write({**shown, "told": explain.as_text(session, self.redactor, self._slow, self._wall)})

    def _log_session(self, session: Session, level: str, event: str) -> None:
        fields = partial(log_lines.session_fields, session, self.redactor)
        access = event == Event.ACCESS
        self.log.event(level, event, session.upstream, self._monotonic(), fields, limited=not access)
        if self.export is not None and not access:
            self.export.log(level, event, self._wall(session.ended), fields)

    def _record_errors(self, session: Session) -> None:
        if self._error_records is None or all(attempt.code is None for attempt in session.attempts):
            return
        if not (
            self._error_rate.take(session.upstream, self._monotonic())
            and self.writer.put(self._error_records.write, session)
        ):
            self.log.leave_out(_ERROR_RECORD, "error")

    def show(self, session: Session, *, explained: bool = False) -> dict[str, Any]:
        """A RetrySession for the admin port; `explained` with its explanation."""
        shown = serialise(session, self._wall, self.redactor, self._server_id)
        row = self.sessions.ring.refusals(session)
        shown["refusals"] = None
        if row is not None:
            shown["refusals"] = {
                "count": row.count,
                "first_session_id": row.first.session_id.decode(),
                "first_at": rfc3339(self._wall(row.first.ended)),
                "last_session_id": row.last.session_id.decode(),
                "last_at": rfc3339(self._wall(row.last.ended)),
            }
        if explained:
            shown["summary"] = explain.summary(session)
            shown["explanation"] = explain.as_json(session, self.redactor, self._slow)
        return shown

    def explain(self, session: Session) -> str:
        """What happened to a session, for a person."""
        text, row = (
            explain.as_text(session, self.redactor, self._slow, self._wall),
            self.sessions.ring.refusals(session),
        )
        if row is None or row.count == 1:
            return text
        first, last = (one.session_id.decode() for one in (row.first, row.last))
        return (
            f"{text}\nThe breaker refused {row.count:,} calls in this open period, which are one row in the list: the "
            f"first was {first}, the last so far {last}.\n"
        )

    # ---- state changes -------------------------------------------------------------------------------------------

    def breaker_changed(self, upstream: str, endpoint: str, from_state: str, to_state: str, why: str = "") -> None:
        """A breaker moved; `why` in words, for example `5 failures in a row` or `forced by an operator`."""
        endpoint = self.redactor.url(endpoint)
        self.metrics.breaker_moved(upstream, endpoint, from_state, to_state)
        if to_state == "closed":
            self.sessions.ring.closed(upstream)
        elif (from_state, to_state) == ("closed", "open"):
            self.sessions.ring.opened(upstream, self._monotonic())
        self.transitions.append(Transition(self._wall_now(), upstream, endpoint, from_state, to_state, why))
        body = f"breaker of {upstream} at {endpoint} went from {from_state} to {to_state}"
        facts = {"upstream": upstream, "endpoint": endpoint, "from_state": from_state, "to_state": to_state, "why": why}
        level = "warn" if to_state == "open" else "info"
        self._tell(_BREAKER_EVENTS[to_state], level, Event.BREAKER, body + (f": {why}" if why else ""), facts)

    def breaker_would_open(self, upstream: str, endpoint: str, why: str = "") -> None:
        """`monitor_only` kept a breaker closed."""
        self.metrics.breaker_would_open(upstream)
        body = f"breaker of {upstream} would have opened, monitor_only is on" + (f": {why}" if why else "")
        facts = {"upstream": upstream, "endpoint": endpoint, "why": why}
        self._log_facts("warn", Event.BREAKER, body, facts, self._wall_now())

    def surplus(self, upstream: str, endpoint: str) -> None:
        """An upstream sent more than its answer. It may do so with every answer: told now and then, with the count."""
        tally, now = self.metrics.tally(upstream), self._monotonic()
        tally.surplus += 1
        if tally.surplus_told is not None and now < tally.surplus_told + _SURPLUS_TOLD_EVERY:
            return
        tally.surplus_told = now
        body = (
            f"{upstream} sent bytes behind the end of its answer, or without being asked. They were dropped and the "
            f"connection was closed ({tally.surplus} times so far). What it announces (Content-Length) and what it "
            "sends do not agree, or it tries to answer other requests than its own: look at what runs there"
        )
        facts = {"upstream": upstream, "endpoint": self.redactor.url(endpoint), "count": tally.surplus}
        self._log_facts("warn", Event.SURPLUS, body, facts, self._wall_now())

    def config_changed(self, ok: bool, summary: str, *, at_run_time: bool = False, **facts: Any) -> None:
        """A reload came into force, or was refused. `summary` says what changed or what is wrong. What was set
        `at_run_time` is no reload: whether the file that was read last is in use is another question."""
        if not at_run_time:
            self.metrics.config_reloaded(ok, self._wall_now())
        done = "configuration changed" if at_run_time else "configuration reloaded"
        level, said = ("info", done) if ok else ("error", "configuration not changed")
        self._tell("config_changed", level, Event.CONFIG, f"{said}: {summary}", {"ok": ok, "summary": summary, **facts})

    def dead_lettered(self, upstream: str, dlq_id: str, reason: str, session: Session | None = None) -> None:
        """A request was stored; `reason` is its error code. The store itself counts it, in `metrics.stored`."""
        facts = {"upstream": upstream, "dlq_id": dlq_id, "reason": reason}
        body = f"a request to {upstream} is kept as dead letter {dlq_id} ({reason})"
        self._tell("dead_lettered", "warn", Event.DLQ_ENQUEUED, body, facts, session)

    def replayed(self, upstream: str, dlq_id: str, outcome: str, session: Session | None = None) -> None:
        """A replay ended: completed, failed, escalated or discarded. Counted as above."""
        facts = {"upstream": upstream, "dlq_id": dlq_id, "outcome": outcome}
        level = "info" if outcome in ("completed", "discarded") else "warn"
        body = f"replay of dead letter {dlq_id} to {upstream}: {outcome}"
        self._tell("replayed", level, Event.DLQ_REPLAYED, body, facts, session)

    def escalated(self, upstream: str, dlq_id: str, error_class: str) -> None:
        """The same fatal error again: somebody has to look."""
        self.metrics.stored.dead_letter_escalated(upstream)
        facts = {"upstream": upstream, "dlq_id": dlq_id, "error_class": error_class, "severity": "critical"}
        body = f"dead letter {dlq_id} of {upstream} failed with {error_class} again; see `sidecar dlq show {dlq_id}`"
        self._tell("escalated", "error", Event.DLQ_ESCALATED, body, facts)

    def delivery_ended(self, upstream: str, job_id: str, state: str, told: Mapping[str, object]) -> None:
        """The outbox has done what it may for a delivery, and the provider has not said that it has it."""
        facts = {"upstream": upstream, "job_id": job_id, "state": state, "delivery": told["delivery"]}
        why = f"delivery {told['delivery']} of {job_id} to {upstream} is {state}: {told['error']}"
        todo = f"ask the provider, then `sidecar jobs resolve {job_id} {told['delivery']}` with what it says"
        self._tell("outbox_gave_up", "error", Event.OUTBOX_GAVE_UP, f"{why}. {todo}", {**facts, "error": told["error"]})

    def demoted(self, upstream: str, host: str, client: str, why: str, seconds: float) -> None:
        """An app does not trust the certificate it gets here, so its calls pass unopened for a while."""
        self.metrics.demotions[upstream] += 1
        todo = (
            "start it with `sidecar run -- CMD`, or with the variables of `sidecar env`; if it pins certificates on "
            f"purpose, set `intercept: false` for {upstream}"
        )
        facts = {"upstream": upstream, "host": host, "client": client, "why": why, "seconds": seconds, "todo": todo}
        body = f"{client}: {why}; its calls pass as a tunnel for {seconds:g} s, unseen. To see them, {todo}"
        self._tell("interception_demoted", "warn", Event.DEMOTED, body, facts)

    def internal_error(self, component: str, body: str, error: BaseException, **fields: object) -> None:
        """A fault of our own."""
        self.metrics.internal_error(component)
        self.log.exception(body, error, **fields)

    def _tell(
        self, event_type: str, level: str, event: str, body: str, facts: dict[str, Any], session: Session | None = None
    ) -> None:
        at = self._wall_now()
        try:
            self.events.state_changed(event_type, at, facts, session)
            self._log_facts(level, event, body, facts, at, session)
        except Exception as error:  # as in `observe`: what is told of must not suffer from the telling
            self._failed(error)

    def _log_facts(
        self, level: str, event: str, body: str, facts: dict[str, Any], at: float, session: Session | None = None
    ) -> None:
        trace = {} if session is None else log_lines.trace_fields(session)
        shown = {name: self.redactor.text(value) if isinstance(value, str) else value for name, value in facts.items()}
        upstream = shown.pop("upstream", None)
        named = {} if upstream is None else {Attribute.UPSTREAM: upstream}
        fields = {Field.BODY: self.redactor.text(body), **trace, **named, **shown}
        self.log.event(level, event, str(upstream), self._monotonic(), lambda: fields)
        if self.export is not None:
            self.export.log(level, event, at, lambda: fields)

    # ---- upkeep --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Once a second, from the event loop."""
        if self.export is not None:
            self.export.tick(now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_EVERY
            self._count_refused()
            self.log.tell_left_out()
            self.sessions.expire(now)
            if self._error_records is not None:
                self.writer.put(self._error_records.expire)
            if self._event_file is not None:
                self.writer.put(self._event_file.expire)
            if self.earlier is not None:
                self.writer.put(self.earlier.file.expire)

    def _count_refused(self) -> None:
        """What the disk would not take since the last time."""
        files = ((self._error_records, _ERROR_RECORD, "error"), (self._event_file, _EVENT_FILE, "info"))
        for file, what, level in files:
            refused = 0 if file is None else file.lost - self._refused[what]
            if refused:
                self._refused[what] += refused
                self.log.leave_out(what, level, refused)

    def gather_last(self) -> None:
        """After the last request, on the event loop's thread; then `close`."""
        if self.export is not None:
            self.export.gather_last()

    def close(self, timeout: float = _CLOSE_WITHIN) -> None:
        """Hand over what is queued, for at most so long. It waits: call it in a thread, after the last request."""
        self.events.close()
        if self.export is not None:
            self.export.close(timeout)
        self.log.detach()
        self.writer.close(timeout)
        if self._error_records is not None:
            self._error_records.close()
        if self._event_file is not None:
            self._event_file.close()
        if self.earlier is not None:
            self.earlier.file.close()

    def _wall_now(self) -> float:
        return self._wall(self._monotonic())

    def _begin_export(self, environ: Mapping[str, str], server_id: str) -> tuple[Export | None, Sampler | None]:
        """What is exported, and the sampler when spans are."""
        try:
            wanted = otel_settings.read(environ)
        except otel_settings.BadVariable as bad:
            self.log.error(
                Event.TELEMETRY, f"{bad}; nothing is exported until it is corrected and the sidecar restarted"
            )
            return None, None
        if wanted is None:
            return None, None
        for unknown in otel_settings.unknown_propagators(environ):
            self.log.warn(
                Event.TELEMETRY,
                f"OTEL_PROPAGATORS: {unknown[:40]!r} is not spoken here; a trace travels as tracecontext, and baggage "
                "passes as it is. Let the app and its upstreams speak tracecontext too, and take it out of the list",
            )
        if wanted.metrics is not None and wanted.metric_interval % 1:
            self.log.warn(
                Event.TELEMETRY,
                f"OTEL_METRIC_EXPORT_INTERVAL: {wanted.metric_interval * 1000:g} ms cannot be kept: metrics leave "
                "on whole seconds, at the first one after that time; give a multiple of 1000",
            )
        around = Surroundings(self.metrics, self.log, self.redactor, self._wall, self._wall_now, server_id)
        export = begin_export(wanted, around)
        return export, wanted.sampler if export is not None and wanted.traces is not None else None

    def _open_event_file(self, settings: Telemetry) -> RotatingFile | None:
        wanted = settings.events
        if wanted.file is None:
            return None
        path = Path(wanted.file)
        file = RotatingFile(path, wanted.max_bytes, wanted.keep, wanted.ttl, self._wall_now, self._file_refused)
        self.writer.flushers.append(file.flush)
        return file

    def _event_to_file(self, event: RetryEvent) -> None:
        if not self.writer.put(self._write_event, event):
            self.log.leave_out(_EVENT_FILE, "info")

    def _write_event(self, event: RetryEvent) -> None:
        assert self._event_file is not None
        self._event_file.append(as_line(event, self.redactor))

    def _file_refused(self, message: str) -> None:
        self.log.error(Event.TELEMETRY, message)

    def _job_failed(self, error: Exception) -> None:
        """In the writer's thread: what it was writing is lost, and said."""
        self.metrics.internal_error("telemetry")
        self.log.error(Event.TELEMETRY, f"a record could not be written: {error!r}")

    def _failed(self, error: Exception) -> None:
        self.metrics.internal_error("telemetry")
        self.log.exception("telemetry failed; the request was not touched", error)

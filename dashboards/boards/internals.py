"""The sidecar itself: process, connections, telemetry, configuration."""

from __future__ import annotations

from dashboards.board import Line, Row, board
from dashboards.boards.colors import ENDING_IN_RESULT, RESULTS
from dashboards.panel import GREEN, GREY, ORANGE, RED, Json, Query, series, stat, thresholds
from dashboards.promql import quantile, ratio

# With every job chosen, process metrics of anything that Prometheus scrapes would show up beside ours.
OURS = " and on (job, instance) sidecar_build_info{$I}"
YES_OR_NO = {
    "type": "value",
    "options": {"0": {"text": "no", "color": RED, "index": 0}, "1": {"text": "yes", "color": GREEN, "index": 1}},
}


def internals() -> Json:
    return board(
        "sidecar-internals",
        "Sidecar / Internals",
        "Whether the sidecars themselves are well: process, connections, telemetry and configuration.",
        [
            Row("Is it fine: is it running, ready and up to date?", [_now()]),
            Row("What is wrong: is it short of CPU, memory or files?", [_loop(), _process()]),
            Row("Why: connections and bytes", [_pool(), _traffic()]),
            Row("Can it be trusted: telemetry, configuration, its own faults", [_telemetry(), _faults()]),
        ],
    )


def _now() -> Line:
    return Line(
        5,
        [
            stat(
                "Version",
                "What is running, on how many sidecars. Several versions at once is a rollout that has not finished.",
                "none",
                Query(
                    "count by (version, revision, python_version) (sidecar_build_info{$I})",
                    "{{version}} {{revision}} on Python {{python_version}}",
                ),
                text="value_and_name",
                nothing="no sidecar",
            ),
            stat(
                "Ready",
                "Whether new requests are accepted. «no» for long: `curl -s http://127.0.0.1:4141/readyz` tells the "
                "reason.",
                "none",
                Query("sidecar_ready{$I}", "{{instance}}"),
                steps=thresholds(RED, (1, GREEN)),
                mappings=[YES_OR_NO],
                nothing="no sidecar",
            ),
            stat(
                "Running for",
                "Time since the process was started. Short times again and again are restarts: look at the last log "
                "lines before each.",
                "s",
                Query("time() - process_start_time_seconds{$I}" + OURS, "{{instance}}"),
                nothing="no sidecar",
            ),
            stat(
                "Configuration in use",
                "Whether the file last read is the one in use. «no»: the last reload was refused; `sidecar check -c "
                "FILE` names every mistake in it.",
                "none",
                Query("sidecar_config_last_reload_successful{$I}", "{{instance}}"),
                steps=thresholds(RED, (1, GREEN)),
                mappings=[YES_OR_NO],
                nothing="no sidecar",
            ),
            stat(
                "Configuration read",
                "How long ago the configuration in use was read. Longer than your last change: it was not reloaded; "
                "`curl -X POST http://127.0.0.1:4141/reload`.",
                "s",
                Query("time() - sidecar_config_last_reload_success_timestamp_seconds{$I} > 0", "{{instance}}"),
                nothing="no sidecar",
            ),
            stat(
                "Since last good export",
                "How long ago the collector last took a batch of each signal. Growing while there is traffic: the "
                "collector is down or refuses; the sidecar's log says which.",
                "s",
                Query(
                    "time() - max by (signal) (sidecar_telemetry_last_export_success_timestamp_seconds{$I} > 0)",
                    "{{signal}}",
                ),
                steps=thresholds(GREEN, (300, ORANGE)),
                nothing="no collector",
            ),
        ],
    )


def _loop() -> Line:
    lag = "sidecar_event_loop_lag_seconds_bucket{$I}"
    return Line(
        8,
        [
            series(
                "Event-loop lag p50/p99",
                "How late the event loop wakes up: every call waits at least this long. p99 above 100 ms is the alert "
                "SidecarEventLoopBlocked: give it CPU, or spread the load over more sidecars.",
                "s",
                Query(quantile(0.5, lag, "instance"), "{{instance}} p50"),
                Query(quantile(0.99, lag, "instance"), "{{instance}} p99"),
                steps=thresholds(GREEN, (0.1, RED)),
            ),
            series(
                "CPU cores",
                "Cores in use. One process uses about one core at most: near 1 it is saturated; run more sidecars.",
                "short",
                Query("rate(process_cpu_seconds_total{$I}[$W])" + OURS, "{{instance}}"),
            ),
        ],
    )


def _process() -> Line:
    return Line(
        8,
        [
            series(
                "Resident memory",
                "Memory in use. A slope that never ends is a leak; bodies are bounded by limits.replay_body_bytes "
                "times the calls in flight.",
                "bytes",
                Query("process_resident_memory_bytes{$I}" + OURS, "{{instance}}"),
            ),
            series(
                "Open fds of limit",
                "File descriptors, mostly connections. Near 100 % new connections fail: raise the limit (ulimit -n) or "
                "lower limits.connections.",
                "percentunit",
                Query(ratio("process_open_fds{$I}", "process_max_fds{$I}") + OURS, "{{instance}}"),
                top=1,
                steps=thresholds(GREEN, (0.8, RED)),
            ),
            series(
                "Garbage collections",
                "Runs of Python's cycle collector. Many of generation 2 together with event-loop lag: memory pressure.",
                "ops",
                Query(
                    "sum by (generation) (rate(python_gc_collections_total{$I}[$W])" + OURS + ")",
                    "generation {{generation}}",
                ),
            ),
        ],
    )


def _pool() -> Line:
    return Line(
        8,
        [
            series(
                "Pool: connections by state",
                "Connections to each upstream. Many active and none idle: the upstream is slow or the pool is too "
                "small.",
                "short",
                Query("sum by (upstream, state) (sidecar_upstream_connections{$S})", "{{upstream}} {{state}}"),
                colors={"/ idle$/": GREY},
            ),
            series(
                "Pool wait p99",
                "How long calls waited for a new connection. High: connecting is slow (name resolution, TLS) or the "
                "upstream closes connections that could be kept.",
                "s",
                Query(
                    quantile(0.99, "sidecar_upstream_connection_wait_seconds_bucket{$S}", "upstream"), "{{upstream}}"
                ),
            ),
            series(
                "Connects by result",
                "Connections opened. As many as requests: keep-alive does not work; look at the upstream's Connection "
                "header and timeouts.pool_idle.",
                "reqps",
                Query(
                    "sum by (upstream, result) (rate(sidecar_upstream_connects_total{$S}[$W]))",
                    "{{upstream}} {{result}}",
                ),
                colors=ENDING_IN_RESULT,
            ),
            series(
                "Answers with surplus bytes",
                "Connections closed because the upstream sent more than its answer. Not 0: its lengths are wrong, "
                "or something there forges answers; the log names the endpoint.",
                "short",
                Query("sum by (upstream) (increase(sidecar_upstream_surplus_total{$S}[$W]))", "{{upstream}}"),
            ),
        ],
    )


def _traffic() -> Line:
    return Line(
        8,
        [
            series(
                "Bytes",
                "Body bytes: sent by the app, and received by it.",
                "Bps",
                Query("sum by (upstream) (rate(sidecar_response_bytes_total{$S}[$W]))", "{{upstream}} received"),
                Query("sum by (upstream) (rate(sidecar_request_bytes_total{$S}[$W]))", "{{upstream}} sent"),
            ),
            series(
                "Connections of the app",
                "Open connections from the app. Close to limits.connections: new ones are refused.",
                "short",
                Query("sum by (instance) (sidecar_downstream_connections{$I})", "{{instance}}"),
            ),
            series(
                "Memory held for requests",
                "Request bodies kept for another attempt, answers that wait for their app, and what waits to be "
                "written to disk. At the limit (limits.memory_bytes) new requests with a body get 503; before that the "
                "largest bodies give up their copy, and cannot be sent again.",
                "bytes",
                Query("sum by (instance, kind) (sidecar_memory_held_bytes{$I})", "{{kind}}"),
                Query("max by (instance) (sidecar_memory_limit_bytes{$I})", "limit"),
            ),
            series(
                "Bodies not kept for lack of memory",
                "Request bodies whose copy for another attempt had to go: had they failed, nothing would have been "
                "sent again.",
                "ops",
                Query("sum by (instance) (rate(sidecar_request_bodies_given_up_total{$I}[$W]))", "{{instance}}"),
            ),
            series(
                "Tunnels by result",
                "CONNECT and Upgrade tunnels that ended; nothing inside them can be seen or retried.",
                "ops",
                Query("sum by (result) (rate(sidecar_tunnels_total{$S}[$W]))", "{{result}}"),
            ),
            series(
                "TLS: unverified upstreams, client errors, demotions",
                "Unverified is insecure_skip_verify: anyone on the way can read that traffic. Client errors are "
                "handshakes of the app that failed; demotions are clients that pin certificates.",
                "short",
                Query("sum by (upstream) (sidecar_tls_verification_disabled{$S})", "{{upstream}} unverified"),
                Query("sum by (reason) (increase(sidecar_tls_client_errors_total{$I}[$W]))", "client: {{reason}}"),
                Query(
                    "sum by (upstream) (increase(sidecar_interception_demotions_total{$S}[$W]))", "{{upstream}} demoted"
                ),
            ),
        ],
    )


def _telemetry() -> Line:
    return Line(
        8,
        [
            series(
                "Spans by fate",
                "What became of the spans. dropped_queue_full and export_failed are traces you will not find: see the "
                "runbook of SidecarTelemetryDropping.",
                "ops",
                Query("sum by (result) (rate(sidecar_telemetry_spans_total{$I}[$W]))", "{{result}}"),
                colors={"exported": GREEN, "unsampled": GREY, "dropped_queue_full": RED, "export_failed": ORANGE},
            ),
            series(
                "Span queue of capacity",
                "At 100 % the oldest spans are dropped. Full for long: the collector is too slow.",
                "percentunit",
                Query(
                    ratio("sidecar_telemetry_queue_size{$I}", "sidecar_telemetry_queue_capacity{$I}"), "{{instance}}"
                ),
                top=1,
                steps=thresholds(GREEN, (0.8, RED)),
            ),
            series(
                "Exports by result",
                "Batches handed to the collector. Failures: its address, its certificate, or its own log.",
                "ops",
                Query(
                    "sum by (signal, result) (rate(sidecar_telemetry_exports_total{$I}[$W]))", "{{signal}} {{result}}"
                ),
                colors=ENDING_IN_RESULT,
            ),
        ],
    )


def _faults() -> Line:
    return Line(
        8,
        [
            series(
                "Config reloads",
                "A failure leaves the old configuration in use; the log and `sidecar check` name the mistake.",
                "short",
                Query("sum by (result) (increase(sidecar_config_reloads_total{$I}[$W]))", "{{result}}"),
                colors=RESULTS,
                as_bars=True,
            ),
            series(
                "Label overflow / suppressed logs / internal errors",
                "Internal errors are bugs of the sidecar: keep the log line and report it. Overflow: more unknown "
                "hosts than limits.auto_upstreams. Suppressed: log lines left out by their rate limit.",
                "ops",
                Query(
                    "sum by (component) (rate(sidecar_internal_errors_total{$I}[$W]))", "internal error: {{component}}"
                ),
                Query("sum by (label) (rate(sidecar_label_overflow_total{$I}[$W]))", "overflow: {{label}}"),
                Query("sum by (level) (rate(sidecar_log_records_suppressed_total{$I}[$W]))", "suppressed: {{level}}"),
                Query(
                    "sum by (instance) (rate(sidecar_clock_steps_total{$I}[$W]))", "wall clock was set: {{instance}}"
                ),
            ),
        ],
    )

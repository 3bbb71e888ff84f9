"""Dead letters, idempotency and the outbox: what waits, what was lost, will it hold."""

from __future__ import annotations

from dashboards.board import Line, Row, board
from dashboards.boards.colors import REPLAYS
from dashboards.links import dead_letters_link
from dashboards.panel import (
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Column,
    Json,
    Query,
    bar_gauge,
    gauge,
    links_on,
    series,
    stat,
    table,
    thresholds,
)
from dashboards.promql import quantile, ratio

HOUR = 3600.0
AGE = "time() - min{by} (sidecar_dlq_oldest_entry_timestamp_seconds{{$S}} > 0)"


def dead_letters() -> Json:
    return board(
        "sidecar-dlq",
        "Sidecar / Dead letters & idempotency",
        "Requests kept after their last failure: what waits, what was lost, whether replays work and the disk will "
        "hold.",
        [
            Row("Is it fine: does anything wait, was anything lost?", [_now()]),
            Row("What is wrong: where do they come from, do they drain?", [_depth(), _replays()]),
            Row("Why: will the disk hold, is it fast enough?", [_disk()]),
            Row("Idempotency and the outbox: were repeats caught, are deliveries in order?", [_outbox()]),
        ],
    )


def _now() -> Line:
    lost = (
        "sum(increase(sidecar_dlq_evicted_total{$I}[$__range]))"
        " + sum(increase(sidecar_dlq_rejected_total{$I}[$__range]))"
    )
    return Line(
        5,
        [
            stat(
                "Entries waiting",
                "Dead letters that nobody has dealt with. `sidecar dlq list` groups them; remediate the cause, then "
                "replay those whose verdict is safe.",
                "short",
                Query("sum(sidecar_dlq_entries{$S})", "waiting"),
                steps=thresholds(GREEN, (1, ORANGE)),
                nothing="no dead letters",
                links=[dead_letters_link()],
            ),
            stat(
                "Oldest entry",
                "How long the oldest has been waiting. Over an hour is the alert SidecarDLQStale; over the provider's "
                "key window (24 h) a replay may execute the request a second time.",
                "s",
                Query(AGE.format(by=""), "oldest"),
                steps=thresholds(GREEN, (HOUR, ORANGE), (24 * HOUR, RED)),
                nothing="nothing waiting",
                links=[dead_letters_link()],
            ),
            gauge(
                "Disk used of limit",
                "Bytes of dead letters against dead_letter.max_bytes. At 100 % new ones are refused, which is loss: "
                "raise the limit, or replay, and shorten dead_letter.keep_completed, for which replayed ones keep "
                "their room.",
                "percentunit",
                Query("max(" + ratio("sidecar_dlq_size_bytes{$I}", "sidecar_dlq_capacity_bytes{$I}") + ")", "used"),
                steps=thresholds(GREEN, (0.6, YELLOW), (0.8, RED)),
                nothing="no dead letters",
            ),
            stat(
                "Lost requests (range)",
                "Requests of the chosen time range that could not be stored, or were removed unreplayed. Anything but "
                "0 is work that is gone: see «Losses by reason».",
                "short",
                Query(lost, "lost"),
                steps=thresholds(GREEN, (1, RED)),
                nothing="no dead letters",
                decimals=0,
            ),
            stat(
                "Replay success rate",
                "Share of replays that ended as completed. Low: the cause is not fixed yet; stop the replay "
                "(`POST /dlq/replays/REPLAY_ID/pause`) and look at one entry's history.",
                "percentunit",
                Query(
                    ratio(
                        'sum(rate(sidecar_dlq_replayed_total{$S,outcome="completed"}[$W]))',
                        "sum(rate(sidecar_dlq_replayed_total{$S}[$W]))",
                    ),
                    "completed",
                ),
                steps=thresholds(RED, (0.5, ORANGE), (0.95, GREEN)),
                nothing="no replays",
            ),
        ],
    )


def _depth() -> Line:
    return Line(
        8,
        [
            series(
                "Depth by upstream",
                "Dead letters waiting. A steep rise is an incident of that upstream; a plateau is waiting for you.",
                "short",
                Query("sum by (upstream) (sidecar_dlq_entries{$S})", "{{upstream}}"),
                stacked=True,
                links=[dead_letters_link("upstream")],
            ),
            table(
                "Upstreams: waiting and oldest",
                "Which upstream to start with: the one with the oldest entry. Click its name for its dead letters.",
                "upstream",
                Column("Waiting", "sum by (upstream) (sidecar_dlq_entries{$S})", "short"),
                Column(
                    "Oldest",
                    AGE.format(by=" by (upstream)"),
                    "s",
                    thresholds(GREEN, (HOUR, ORANGE), (24 * HOUR, RED)),
                ),
                links=[dead_letters_link("upstream")],
            ),
        ],
        [15, 9],
    )


def _replays() -> Line:
    return Line(
        8,
        [
            series(
                "In vs out",
                "Requests stored, by the error code they failed with, against «out»: replays that completed. While out "
                "is below the sum of the others the queue grows.",
                "reqps",
                Query("sum by (reason) (rate(sidecar_dlq_enqueued_total{$S}[$W]))", "{{reason}}"),
                Query('sum(rate(sidecar_dlq_replayed_total{$S,outcome="completed"}[$W]))', "out"),
                colors={"out": "purple"},
                overrides=[links_on("/^(?!out$)/", dead_letters_link(error_class="${__field.labels.reason}"))],
            ),
            series(
                "Replays by outcome",
                "escalated means the same fatal error again: somebody must look at it. failed went back to waiting, or "
                "was given up after replay.max_replays.",
                "reqps",
                Query("sum by (outcome) (rate(sidecar_dlq_replayed_total{$S}[$W]))", "{{outcome}}"),
                stacked=True,
                colors=REPLAYS,
            ),
            series(
                "Losses by reason",
                "full and capacity: raise dead_letter.max_bytes or replay sooner. disk_error: the volume. too_large: "
                "limits. ttl: retention removed entries that nobody replayed. corrupt: restore from a backup.",
                "short",
                Query("sum by (reason) (increase(sidecar_dlq_rejected_total{$I}[$W]))", "refused: {{reason}}"),
                Query("sum by (reason) (increase(sidecar_dlq_evicted_total{$I}[$W]))", "removed: {{reason}}"),
                as_bars=True,
            ),
        ],
    )


def _disk() -> Line:
    full = (
        "(sidecar_dlq_capacity_bytes{$I} - sidecar_dlq_size_bytes{$I}) / (deriv(sidecar_dlq_size_bytes{$I}[30m]) > 0)"
    )
    return Line(
        8,
        [
            series(
                "Predicted time to full",
                "At the growth of the last 30 minutes. Nothing is drawn while the queue does not grow. Under an hour: "
                "replay, discard or raise the limit now.",
                "s",
                Query(full, "{{instance}}"),
                steps=thresholds(RED, (HOUR, GREEN)),
            ),
            series(
                "Bytes used, limit and free disk",
                "Whichever of the limit and the free disk is reached first stops the storing of dead letters.",
                "bytes",
                Query("sum by (instance) (sidecar_dlq_size_bytes{$I})", "{{instance}} used"),
                Query("sum by (instance) (sidecar_dlq_capacity_bytes{$I})", "{{instance}} limit"),
                Query("sum by (instance) (sidecar_dlq_disk_free_bytes{$I})", "{{instance}} free disk"),
            ),
            series(
                "Write+fsync p99",
                "The app waits this long for its failed call to be safe on disk. Above 50 ms the disk is the "
                "bottleneck: give state_dir a faster volume.",
                "s",
                Query(quantile(0.99, "sidecar_dlq_write_duration_seconds_bucket{$I}"), "p99"),
                steps=thresholds(GREEN, (0.05, ORANGE)),
            ),
        ],
    )


def _outbox() -> Line:
    return Line(
        8,
        [
            series(
                "Idempotency lookups",
                "hit: a repeat got the stored answer and nothing was sent. conflict: the same key with another "
                "payload, a mistake in the app. in_progress: a repeat while the first is still running.",
                "reqps",
                Query("sum by (result) (rate(sidecar_idempotency_lookups_total{$I}[$W]))", "{{result}}"),
                colors={"hit": GREEN, "miss": GREY, "conflict": RED, "in_progress": YELLOW},
            ),
            bar_gauge(
                "Outbox jobs by state",
                "unknown needs a decision: `sidecar jobs` lists them, the runbook of SidecarOutboxOrderViolated tells "
                "how to settle one. retryable_failed goes on by itself.",
                "short",
                Query("sum by (state) (sidecar_outbox_jobs{$I})", "{{state}}"),
                steps=thresholds("blue"),
            ),
            series(
                "Outbox deliveries",
                "Deliveries that ended. reconciled ones were looked up at the provider after a crash instead of being "
                "sent again.",
                "reqps",
                Query("sum by (outcome) (rate(sidecar_outbox_deliveries_total{$S}[$W]))", "{{outcome}}"),
                colors={"delivered": GREEN, "failed": RED, "reconciled": "blue"},
            ),
            stat(
                "Outbox order violations (range)",
                "Deliveries found marked as sent without evidence of the provider; they were repaired and queued "
                "again. Anything but 0: follow the runbook of SidecarOutboxOrderViolated.",
                "short",
                Query("sum(increase(sidecar_outbox_order_violations_total{$S}[$__range]))", "violations"),
                steps=thresholds(GREEN, (1, RED)),
                nothing="no outbox",
                decimals=0,
            ),
        ],
        [8, 5, 7, 4],
    )

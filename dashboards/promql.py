"""PromQL as it is written on a dashboard.

Law: the only place that knows how a division or a quantile is kept from showing NaN. Without traffic a guarded
expression has no result at all, so Grafana says "no data" instead of drawing an artefact.
"""

from __future__ import annotations

import re

# As SPEC 6 sorts the outcomes; neutral ones are in no ratio. A test holds these against telemetry/record.py.
GOOD = "first_try|recovered|deduplicated|queued|tunnelled"
BAD = "exhausted|not_retryable|budget|deadline|breaker_open|failed_streaming|internal"

_WORDS = {
    "I": 'job=~"$job",instance=~"$instance"',
    "S": 'job=~"$job",instance=~"$instance",upstream=~"$upstream"',
    "GOOD": f'outcome=~"{GOOD}"',
    "BAD": f'outcome=~"{BAD}"',
    "JUDGED": f'outcome=~"{GOOD}|{BAD}"',
    "W": "$__rate_interval",
}


def written(short: str) -> str:
    """`$I`, `$S`, `$GOOD`, `$BAD`, `$JUDGED` and `$W` in full; `$job` and its like are Grafana's own."""
    return re.sub(r"\$([A-Z]+)\b", lambda found: _WORDS[found[1]], short)


def ratio(part: str, whole: str) -> str:
    """No result where the whole is 0, instead of NaN."""
    return f"{part} / ({whole} > 0)"


def quantile(share: float, bucket: str, by: str = "") -> str:
    """`bucket` is a selector of a `_bucket` metric. A quantile of nothing is NaN, which no comparison lets pass."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({bucket}[$W]))) >= 0"


def worst(expr: str, how: str = "max") -> str:
    """The worst value in the time range that is looked at, also where it is long over: `max`, or `min` where little is
    bad."""
    return f"{how}_over_time(({expr})[$__range:$W])"


def filled(
    expr: str,
    *,
    job: str = ".*",
    instance: str = ".+",
    upstream: str = ".+",
    rate_interval: str = "1m",
    span: str = "1h",
) -> str:
    """An expression of a dashboard as Grafana would send it: by default with «All» chosen everywhere."""
    values = {
        "job": job,
        "instance": instance,
        "upstream": upstream,
        "__rate_interval": rate_interval,
        "__range": span,
    }
    return re.sub(r"\$(__rate_interval|__range|job|instance|upstream)\b", lambda found: values[found[1]], expr)

"""No panel and no rule uses a name that does not exist, and no metric exists that nobody looks at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from config.errors import registry
from sidecar.durable.delivery import JOB_STATES
from telemetry import names, record
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import always, answer

FOLDER = Path(__file__).resolve().parent.parent / "dashboards"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text(encoding="utf-8"))
EVERY_RULE = [rule for group in RULES["groups"] for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in EVERY_RULE if "record" in rule}

# What a process collector and Prometheus itself add. Labels of every scraped series: job and instance.
FOREIGN = {
    "up": (),
    "process_cpu_seconds_total": (),
    "process_resident_memory_bytes": (),
    "process_open_fds": (),
    "process_max_fds": (),
    "process_start_time_seconds": (),
    "python_gc_collections_total": ("generation",),
}
ALWAYS = {"job", "instance"}

CODES = frozenset(registry())
WORDS = {
    "outcome": record.OUTCOMES | set(names.REPLAY_OUTCOMES) | set(names.DELIVERIES),
    "kind": frozenset(record.ATTEMPT_KINDS),
    "result": CODES | {"success", "failure"} | set(names.SPAN_FATES),
    "state": frozenset(names.BREAKER_STATES) | set(JOB_STATES),
    "from_state": frozenset(names.BREAKER_STATES),
    "to_state": frozenset(names.BREAKER_STATES),
}


class Selector(NamedTuple):
    """A metric as an expression names it."""

    metric: str
    matchers: dict[str, str]


def selectors(expr: str) -> Iterator[Selector]:
    """Every series an expression reads. Good enough for the PromQL in this folder, which has no odd spacing."""
    bare = re.sub(r"\b(by|on) \([^)]*\)", "", expr)
    for name, matchers in re.findall(r"\b((?:[a-z_]+:)?(?:sidecar|process|python)_[\w:]+|up)\b(?:\{([^}]*)\})?", bare):
        yield Selector(name, dict(re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', matchers)))


def grouped(expr: str) -> set[str]:
    found = re.findall(r"\b(?:by|on) \(([^)]*)\)", expr)
    return {label.strip() for labels in found for label in labels.split(",")} - {""}


def panel_expressions() -> dict[str, str]:
    found = {}
    for path in sorted(FOLDER.glob("sidecar-*.json")):
        board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found[f"{board['uid']}: {panel['title']} {target['refId']}"] = target["expr"]
        for each in board["annotations"]["list"]:
            if "expr" in each:
                found[f"{board['uid']}: annotation {each['name']}"] = each["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found[f"{board['uid']}: variable {variable['name']}"] = variable["definition"].rpartition(",")[0]
    return found


def rule_expressions() -> dict[str, str]:
    return {f"rules.yml: {rule.get('alert', rule.get('record'))}": rule["expr"] for rule in EVERY_RULE}


EXPRESSIONS = panel_expressions() | rule_expressions()
every_expression = pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())


def labels_of(name: str) -> set[str] | None:
    """The labels that a series of that name has, or None if there is no such metric."""
    if name in RECORDED:
        return grouped(RECORDED[name])
    if name in FOREIGN:
        return ALWAYS | set(FOREIGN[name])
    for what in names.CATALOGUE:
        if what.kind == "histogram":
            if name == f"{what.name}_bucket":
                return ALWAYS | set(what.labels) | {"le"}
            if name in (f"{what.name}_sum", f"{what.name}_count"):
                return ALWAYS | set(what.labels)
        elif name == what.exposed:
            return ALWAYS | set(what.labels)
    return None


def test_the_walk_finds_expressions_in_panels_and_rules() -> None:
    assert len(panel_expressions()) > 90
    assert 15 < sum("alert" in rule for rule in EVERY_RULE)


@every_expression
def test_every_metric_exists(expr: str) -> None:
    found = list(selectors(expr))
    assert found, expr
    assert [] == [each.metric for each in found if labels_of(each.metric) is None]


@every_expression
def test_every_label_that_is_matched_exists(expr: str) -> None:
    for each in selectors(expr):
        assert set(each.matchers) <= (labels_of(each.metric) or set()), each


@every_expression
def test_every_label_that_is_grouped_by_exists(expr: str) -> None:
    known: set[str] = set().union(*(labels_of(each.metric) or set() for each in selectors(expr)))
    assert grouped(expr) <= known


@every_expression
def test_every_word_that_is_matched_can_occur(expr: str) -> None:
    for each in selectors(expr):
        for label, wanted in each.matchers.items():
            if label in WORDS:
                assert set(wanted.split("|")) <= WORDS[label], f"{each}: {label}"


def used_metrics() -> set[str]:
    every = {each.metric for expr in EXPRESSIONS.values() for each in selectors(expr)}
    return {
        re.sub(r"_(bucket|sum|count)$", "", name) if name.endswith(("_bucket", "_sum", "_count")) else name
        for name in every
    }


def unused_on_purpose() -> dict[str, str]:
    text = (FOLDER / "unused.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))


def test_every_metric_of_ours_is_used_or_has_a_written_reason() -> None:
    exposed = {what.exposed for what in names.CATALOGUE}
    assert set() == exposed - used_metrics() - set(unused_on_purpose())


def test_what_is_listed_as_unused_is_unused_and_has_a_reason() -> None:
    listed = unused_on_purpose()
    assert listed
    assert set() == used_metrics() & set(listed)
    assert [] == [name for name, reason in listed.items() if len(reason) < 20]


async def live_metrics(start_sidecar: Starter, start_upstream: UpstreamStarter) -> str:
    upstream = await start_upstream(always(answer()))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    assert 200 == (await app.ask("GET /u/ HTTP/1.1\r\nHost: x\r\n\r\n")).status
    host, port = sidecar.admin_address
    async with httpx.AsyncClient(trust_env=False) as client:
        answered = await client.get(f"http://{host}:{port}/metrics")
    assert 200 == answered.status_code
    return answered.text


async def test_every_metric_is_on_the_live_page_and_every_live_one_is_covered(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    page = await live_metrics(start_sidecar, start_upstream)
    live = set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
    recorded = set(RECORDED)
    assert set() == used_metrics() - live - recorded - {"up"}, "used and not there"
    assert set() == live - used_metrics() - set(unused_on_purpose()), "there, and neither used nor excused"


async def test_every_live_label_is_the_one_of_the_catalogue(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    page = await live_metrics(start_sidecar, start_upstream)
    seen = 0
    for name, labels in re.findall(r"^(sidecar_\w+)\{([^}]*)\}", page, re.MULTILINE):
        seen += 1
        assert set(re.findall(r'(\w+)="', labels)) <= (labels_of(name) or set()) - ALWAYS, name
    assert seen > 50

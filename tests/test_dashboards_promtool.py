"""Prometheus' own judgement: expressions and rules parse, every alert fires and keeps silent, /metrics is in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml

from dashboards.promql import filled
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.prometheus import promtool
from tests.doubles.upstream import always, answer
from tests.test_dashboards_names import EVERY_RULE, FOLDER, panel_expressions

CASES = sorted(FOLDER.glob("rules*.test.yml"))
ALERTS = [rule["alert"] for rule in EVERY_RULE if "alert" in rule]
# The names of OBSERVABILITY, «Alerts».
AGREED = {
    *("SidecarErrorBudgetBurnFast", "SidecarErrorBudgetBurnSlow", "SidecarHighErrorRate", "SidecarDatabaseErrors"),
    *("SidecarUpstreamDown", "SidecarBreakerOpen", "SidecarBreakerFlapping", "SidecarRetryStorm"),
    *("SidecarRetriesUseless", "SidecarDLQStale", "SidecarDLQNearFull", "SidecarDLQDataLoss"),
    "SidecarStoreNotKeeping",
    "SidecarStoreIncomplete",
    "SidecarMemoryNearFull",
    *("SidecarTelemetryDropping", "SidecarEventLoopBlocked", "SidecarConfigReloadFailed", "SidecarInternalErrors"),
    *("SidecarOutboxOrderViolated", "SidecarOutboxUndecided", "SidecarOutboxFailed", "SidecarDLQEscalated"),
    "SidecarDown",
}


def test_the_alerts_are_the_ones_agreed_on() -> None:
    assert len(AGREED) == len(ALERTS)
    assert set(ALERTS) == AGREED


@pytest.mark.parametrize("rule", [rule for rule in EVERY_RULE if "alert" in rule], ids=ALERTS)
def test_an_alert_says_how_urgent_it_is_what_it_means_and_where_to_read_on(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    assert rule["annotations"]["runbook_url"].endswith(f"/runbooks/{rule['alert']}.md")
    # A label that the expression does not keep would be an empty place in the sentence.
    told = " ".join(rule["annotations"].values())
    kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", str(rule["expr"]))))) | {
        "job",
        "instance",
        "upstream",
    }
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= kept


def test_the_rules_are_in_order() -> None:
    done = promtool("check", "rules", FOLDER / "rules.yml")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert f"{len(EVERY_RULE)} rules found" in done.stdout


def test_prometheus_takes_its_configuration() -> None:
    done = promtool("check", "config", FOLDER / "prometheus.yml")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_every_expression_of_a_panel_parses(tmp_path: Path) -> None:
    found = panel_expressions()
    rules = [
        {"record": f"panel:{number}", "expr": filled(expr), "labels": {"where": where}}
        for number, (where, expr) in enumerate(found.items())
        if "variable" not in where
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", "--lint=none", tmp_path / "panels.yml")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_an_expression_that_does_not_parse_would_be_found(tmp_path: Path) -> None:
    rules = [{"record": "panel:0", "expr": "sum by (upstream (rate(sidecar_sessions_total[1m]))"}]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert 0 != promtool("check", "rules", tmp_path / "panels.yml").returncode


def test_no_variable_of_grafana_is_left_in_a_filled_expression() -> None:
    for where, expr in panel_expressions().items():
        assert "$" not in filled(expr), where


@pytest.mark.timeout(300)  # days of history, minute by minute
def test_every_alert_fires_and_keeps_silent_as_written_down() -> None:
    done = promtool("test", "rules", *CASES)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for file in CASES for case in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]]
    fires, silent = set(), set()
    for case in cases:
        [check] = case["promql_expr_test"]
        alert = re.search(r'alertname="(\w+)"', check["expr"])[1]  # type: ignore[index]
        assert case["name"].startswith(f"{alert} {'fires' if check['exp_samples'] else 'is silent'}: ")
        (fires if check["exp_samples"] else silent).add(alert)
    assert set(ALERTS) == fires
    assert set(ALERTS) == silent


async def test_the_live_page_is_in_order(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer()))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    await app.ask("GET /u/ HTTP/1.1\r\nHost: x\r\n\r\n")
    async with httpx.AsyncClient(trust_env=False) as client:
        page = await client.get("http://{}:{}/metrics".format(*sidecar.admin_address))
    done = promtool("check", "metrics", given=page.text)
    complaints = [line for line in done.stderr.splitlines() if "sidecar_" in line or "parsing" in line]
    assert [] == complaints

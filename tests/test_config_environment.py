"""`SIDECAR__SECTION__KEY` wins over the file, and its mistakes name the variable."""

from pathlib import Path

import pytest

from config.loader import ConfigError, Problem, load
from config.model import Settings


def settings_of(environ: dict[str, str], path: Path | None = None) -> Settings:
    return load(path, environ).settings


def problems_of(environ: dict[str, str], path: Path | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, environ)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sidecar.yaml"
    path.write_text(
        "listen: {host: 127.0.0.2, port: 5000}\nupstreams:\n  my-api.v1: {hosts: [a.test], max_in_flight: 5}\n"
    )
    return path


def test_a_variable_wins_over_the_file_and_leaves_the_rest(file: Path) -> None:
    settings = settings_of({"SIDECAR__LISTEN__PORT": "6000"}, file)
    assert ("127.0.0.2", 6000) == (settings.listen.host, settings.listen.port)


def test_variables_are_enough_without_a_file() -> None:
    settings = settings_of(
        {"SIDECAR__UPSTREAMS__PAY__HOSTS": "[pay.test, '*.pay.test']", "SIDECAR__SHUTDOWN_GRACE": "2.5"}
    )
    assert ("pay.test", "*.pay.test") == settings.upstreams["pay"].hosts
    assert 2.5 == settings.shutdown_grace


def test_a_value_is_yaml_so_a_mapping_is_merged_into_what_is_there(file: Path) -> None:
    settings = settings_of({"SIDECAR__LISTEN": "{port: 6000}"}, file)
    assert ("127.0.0.2", 6000) == (settings.listen.host, settings.listen.port)


def test_a_list_replaces_the_whole_list(file: Path) -> None:
    settings = settings_of({"SIDECAR__UPSTREAMS__MY_API_V1__HOSTS": "[b.test]"}, file)
    assert ("b.test",) == settings.upstreams["my-api.v1"].hosts


def test_names_match_whatever_their_case_and_hyphens(file: Path) -> None:
    settings = settings_of({"sidecar__Upstreams__MY_API_V1__MAX_IN_FLIGHT": "7"}, file)
    assert ["my-api.v1"] == list(settings.upstreams)
    assert 7 == settings.upstreams["my-api.v1"].max_in_flight


def test_the_more_precise_variable_wins() -> None:
    settings = settings_of({"SIDECAR__LISTEN__PORT": "6000", "SIDECAR__LISTEN": "{host: 127.0.0.3, port: 7000}"})
    assert ("127.0.0.3", 6000) == (settings.listen.host, settings.listen.port)


def test_null_takes_a_value_of_the_file_away(file: Path) -> None:
    assert (
        None
        is settings_of({"SIDECAR__UPSTREAMS__MY_API_V1__MAX_IN_FLIGHT": "null"}, file)
        .upstreams["my-api.v1"]
        .max_in_flight
    )


def test_other_variables_are_none_of_our_business() -> None:
    assert settings_of({}) == settings_of({"SIDECAR_SEAL_KEY": "x", "SIDECAR": "{", "HTTP_PROXY": "http://x"})


def test_the_given_environment_and_file_are_left_as_they_were(file: Path) -> None:
    environ = {"SIDECAR__LISTEN__PORT": "6000"}
    load(file, environ)
    assert {"SIDECAR__LISTEN__PORT": "6000"} == environ
    assert 5000 == settings_of({}, file).listen.port


@pytest.mark.parametrize(
    ("name", "value", "key", "words"),
    [
        ("SIDECAR__LISTEN__PORT", "abc", "listen.port", "must be a whole number"),
        ("SIDECAR__LISTEN__PORT", "", "listen.port", "has no value"),
        ("SIDECAR__LISTEN__PORT", "{", "listen.port", "not valid YAML"),
        ("SIDECAR__LISTEN__PORT", "{a: 1, a: 2}", "listen.port.a", "given twice"),
        ("SIDECAR__LISTEN", "5", "listen", "must hold keys of its own"),
        ("SIDECAR__LISTN__PORT", "5", "listn", "unknown key"),
        ("SIDECAR__LISTEN__PROT", "5", "listen.prot", "unknown key"),
        ("SIDECAR__PROBES__PORT", "5", "probes.host", "required"),
        ("SIDECAR__EGRESS__DENY", "*.ads.test", "egress.deny", "must be in quotes"),
        ("SIDECAR__UPSTREAMS__X", "{}", "upstreams.x", "no request can ever match"),
        ("SIDECAR__ADMIN__HOST", "0.0.0.0", "admin.host", "set `admin.token_file`"),
        ("SIDECAR__LISTEN__PORT", "4141", "admin.port", "already takes 127.0.0.1:4141"),
        ("SIDECAR__", "5", "", "the name is incomplete"),
        ("SIDECAR__LISTEN____PORT", "5", "", "the name is incomplete"),
        ("SIDECAR_LISTEN__PORT", "5", "", "two underscores: SIDECAR__LISTEN__PORT"),
        ("SIDECAR_DEAD_LETTER__MAX_BYTES", "5", "", "two underscores: SIDECAR__DEAD_LETTER__MAX_BYTES"),
    ],
)
def test_a_mistake_in_a_variable_names_the_variable(name: str, value: str, key: str, words: str) -> None:
    problem = next(problem for problem in problems_of({name: value}) if words in problem.message)
    assert (name, key, None, None) == (problem.variable, problem.key, problem.file, problem.line)
    assert str(problem).startswith(f"environment variable {name}: ")


def test_a_variable_changes_one_upstream_and_not_another_that_shares_its_values(tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    path.write_text(
        "upstreams:\n"
        "  a: {hosts: [a.test], timeouts: &patient {connect: 9}}\n"
        "  b: {hosts: [b.test], timeouts: *patient}\n"
    )
    upstreams = settings_of({"SIDECAR__UPSTREAMS__A__TIMEOUTS__CONNECT": "1"}, path).upstreams
    assert (1, 9) == (upstreams["a"].timeouts.connect, upstreams["b"].timeouts.connect)


def test_a_wrong_variable_over_a_right_file_is_not_blamed_on_the_file(file: Path) -> None:
    (problem,) = problems_of({"SIDECAR__UPSTREAMS__MY_API_V1__MAX_IN_FLIGHT": "0"}, file)
    assert ("SIDECAR__UPSTREAMS__MY_API_V1__MAX_IN_FLIGHT", None) == (problem.variable, problem.line)
    assert "upstreams.my-api.v1.max_in_flight" == problem.key


def test_two_spellings_of_one_variable_are_a_mistake() -> None:
    (problem,) = problems_of({"SIDECAR__LISTEN__PORT": "1", "sidecar__listen__port": "2"})
    assert "sets the same key; remove one of the two" in problem.message


def test_mistakes_of_file_and_variables_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("listen: {port: -1}\n")
    problems = problems_of({"SIDECAR__ADMIN__PORT": "-1"}, path)
    assert [("listen.port", None), ("admin.port", "SIDECAR__ADMIN__PORT")] == [
        (problem.key, problem.variable) for problem in problems
    ]


def test_the_file_can_be_named_by_a_variable(file: Path) -> None:
    loaded = load(None, {"SIDECAR_CONFIG": str(file)})
    assert file == loaded.path
    assert 5000 == loaded.settings.listen.port


def test_a_file_given_directly_wins_over_the_variable(file: Path, tmp_path: Path) -> None:
    assert file == load(file, {"SIDECAR_CONFIG": str(tmp_path / "other.yaml")}).path


def test_an_empty_variable_names_no_file() -> None:
    assert None is load(None, {"SIDECAR_CONFIG": ""}).path


def test_a_missing_file_says_which_variable_named_it(tmp_path: Path) -> None:
    (problem,) = problems_of({"SIDECAR_CONFIG": str(tmp_path / "absent.yaml")})
    assert "named by SIDECAR_CONFIG" in problem.message

"""A file goes in, and every mistake in it comes out at once, with its line, its key and what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from config.loader import ConfigError, Loaded, Problem, load
from config.policy import SHIPPED

Given = Callable[..., Path]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """Write a configuration file and say where it is."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "sidecar.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def problems_of(path: Path | None, environ: dict[str, str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {})
    return caught.value.problems


def the_problem_of(path: Path | None) -> Problem:
    (problem,) = problems_of(path)
    return problem


def places(problems: tuple[Problem, ...]) -> list[tuple[int | None, str]]:
    return [(problem.line, problem.key) for problem in problems]


def test_no_file_at_all_is_a_local_proxy() -> None:
    loaded = load(None, {})
    assert isinstance(loaded, Loaded)
    assert None is loaded.path
    assert ("127.0.0.1", 4140) == (loaded.settings.listen.host, loaded.settings.listen.port)
    assert ("127.0.0.1", 4141) == (loaded.settings.admin.host, loaded.settings.admin.port)
    assert None is loaded.settings.probes
    assert SHIPPED.keys() == loaded.settings.policies.keys()
    assert {"default"} == set(loaded.origins.values())


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "---\n", "listen:\nlimits:\nupstreams:\npolicies:\n"])
def test_a_file_that_says_nothing_changes_nothing(given: Given, content: str) -> None:
    assert load(None, {}).settings == load(given(content), {}).settings


def test_every_mistake_is_told_at_once_and_on_its_own_line(given: Given) -> None:
    path = given(
        "version: '2.0.0'\n"
        "listen:\n"
        "  prot: 4140\n"
        "  port: 99999\n"
        "limts: {}\n"
        "egress:\n"
        "  deny:\n"
        "    - 10.0.0.0/8\n"
        "    - 10.0.0.1/8\n"
        "upstreams:\n"
        "  payments:\n"
        "    hosts: [pay.test]\n"
        "    policy: defalt\n"
        "    ca_bundle: missing.pem\n"
        "  orphan: {}\n"
    )
    assert [
        (1, "version"),
        (3, "listen.prot"),
        (4, "listen.port"),
        (5, "limts"),
        (9, "egress.deny[1]"),
        (13, "upstreams.payments.policy"),
        (14, "upstreams.payments.ca_bundle"),
        (15, "upstreams.orphan"),
    ] == places(problems_of(path))


def test_the_error_as_a_whole_reads_as_one_line_per_mistake(given: Given) -> None:
    path = given("listen:\n  prot: 1\n  port: 99999\n")
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert (
        f'{path}:2: listen.prot: unknown key; did you mean "port"? (value: 1)\n'
        f"{path}:3: listen.port: must be at most 65535 (value: 99999)"
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("content", "key", "nearest"),
    [
        ("limts: {}", "limts", "limits"),
        ("Listen: {}", "Listen", "listen"),
        ("listen: {prot: 1}", "listen.prot", "port"),
        ("limits: {head-bytes: 2048}", "limits.head-bytes", "head_bytes"),
        ("policies: {slow: {attempt_timout: 5}}", "policies.slow.attempt_timout", "attempt_timeout"),
        ("upstreams: {a: {hosts: [a.test], endpoint: []}}", "upstreams.a.endpoint", "endpoints"),
        ("upstreams: {a: {hosts: [a.test], timeouts: {conect: 1}}}", "upstreams.a.timeouts.conect", "connect"),
        ("upstreams: {a: {hosts: [a.test], tls: orginate}}", "upstreams.a.tls", "originate"),
        ("egress: {mode: configured-only}", "egress.mode", "configured_only"),
        ("upstreams: {a: {hosts: [a.test], policy: defualt}}", "upstreams.a.policy", "default"),
    ],
)
def test_a_wrong_key_or_choice_is_explained_with_the_nearest_one(
    given: Given, content: str, key: str, nearest: str
) -> None:
    problem = the_problem_of(given(content))
    assert (key, nearest) == (problem.key, problem.nearest)
    assert f'did you mean "{nearest}"?' in str(problem)


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(given: Given) -> None:
    assert "it belongs in `upstreams.<name>.timeouts`" in the_problem_of(given("timeouts: {}")).message
    assert "it belongs in `limits.tunnels`" in the_problem_of(given("listen: {TUNNELS: 5}")).message


def test_a_key_like_nothing_known_is_answered_with_the_keys_there_are(given: Given) -> None:
    assert "the keys here are host, port" in the_problem_of(given("listen: {zzz: 1}")).message


@pytest.mark.parametrize("word", ["on", "no", "null", "1", "1.5"])
def test_a_key_means_its_letters_even_where_yaml_sees_something_else(given: Given, word: str) -> None:
    problem = the_problem_of(given(f"listen:\n  port: 1\n  {word}: 2\n"))
    assert (3, f"listen.{word}") == (problem.line, problem.key)
    assert "unknown key" in problem.message


def test_an_upstream_may_be_called_by_a_number(given: Given) -> None:
    assert ["1"] == list(load(given("upstreams: {1: {hosts: [a.test]}}"), {}).settings.upstreams)


def test_a_key_given_twice_is_a_mistake_at_every_depth(given: Given) -> None:
    path = given(
        "listen: {port: 1, port: 2}\n"
        "upstreams:\n"
        "  a: {hosts: [a.test]}\n"
        "  b: {hosts: [b.test]}\n"
        "  a: {hosts: [c.test]}\n"
    )
    problems = problems_of(path)
    assert [(1, "listen.port"), (5, "upstreams.a")] == places(problems)
    assert "given twice, first on line 3" in problems[1].message


def test_the_same_key_in_other_spelling_is_still_given_twice(given: Given) -> None:
    assert (
        "given twice" in the_problem_of(given('upstreams:\n  1: {hosts: [a.test]}\n  "1": {hosts: [b.test]}\n')).message
    )


def test_a_wrong_value_is_not_told_a_second_time_as_missing(given: Given) -> None:
    assert [(1, "probes.host")] == places(problems_of(given("probes: {host: '0.0.0.0:80', port: 80}")))


def test_a_wrong_value_does_not_hide_a_contradiction_elsewhere(given: Given) -> None:
    path = given("limits: {tunnels: 0}\nadmin: {host: 10.0.0.1}\n")
    assert [(1, "limits.tunnels"), (2, "admin.host")] == places(problems_of(path))


def test_what_follows_from_a_wrong_value_is_not_told(given: Given) -> None:
    path = given("listen: {host: 0.0.0.0}\negress: {mode: shut}\n")
    assert [(2, "egress.mode")] == places(problems_of(path))


def test_a_collision_with_a_default_points_at_the_key_that_was_given(given: Given) -> None:
    problem = the_problem_of(given("version: '1.0.0'\nlisten:\n  host: 127.0.0.1\n  port: 4141\n"))
    assert (4, "admin.port") == (problem.line, problem.key)


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("listen:\n\tport: 1\n", 2, "a tab is used"),
        ("a: 1\nupstreams: {x: {hosts: [*.a.test]}}\n", 2, 'must be in quotes, as in "*.example.com"'),
        ("a: 'x\n", 2, "a quote was opened"),
        ("a: [1\n", 2, "never closed"),
        ("a: {b: 1\n", 2, "never closed"),
        ("a: b: c\n", 1, "a second `:`"),
        ("a: 1\n---\nb: 2\n", 2, "a second document"),
        ("a: !!python/object:os.system x\n", 1, "tags are not supported"),
        ("? [a]\n: 1\n", 1, "a key must be plain text"),
        ("a: \x07\n", 1, "control character U+0007"),
        ("a: " + "[" * 60, 1, "nested more than 50 levels"),
        ("a: 1\nb: @x\n", 2, "unless it is in quotes"),
        ("- a\n", 1, "must hold keys with values"),
        ("text\n", 1, "must hold keys with values"),
    ],
)
def test_text_that_is_not_yaml_is_explained_where_it_breaks(given: Given, content: str, line: int, words: str) -> None:
    problem = the_problem_of(given(content))
    assert line == problem.line
    assert words in problem.message


def test_a_number_beyond_all_measure_is_refused_in_words(given: Given) -> None:
    assert "cannot be read" in the_problem_of(given("a: " + "9" * 5000)).message


def test_a_file_in_another_encoding_is_refused_with_its_line(given: Given) -> None:
    problem = the_problem_of(given(b"a: 1\nb: \xff\n"))
    assert 2 == problem.line
    assert "not UTF-8" in problem.message


def test_a_byte_order_mark_is_no_mistake(given: Given) -> None:
    assert 5000 == load(given(b"\xef\xbb\xbflisten: {port: 5000}"), {}).settings.listen.port


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    problem = the_problem_of(tmp_path / "absent.yaml")
    assert str(tmp_path / "absent.yaml") == problem.file
    assert "does not exist" in problem.message


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    assert "this is a directory" in the_problem_of(tmp_path).message


def test_a_file_of_absurd_size_is_not_read(given: Given) -> None:
    assert "is it the right one?" in the_problem_of(given("#" * (4 * 1024 * 1024 + 1))).message


def test_aliases_work_and_a_mistake_in_one_is_told_where_it_stands(given: Given) -> None:
    path = given(
        "upstreams:\n"
        "  a: &shared\n"
        "    hosts: [a.test]\n"
        "    max_in_flight: 5\n"
        "  b:\n"
        "    <<: *shared\n"
        "    hosts: [b.test]\n"
    )
    assert 5 == load(path, {}).settings.upstreams["b"].max_in_flight


@pytest.mark.parametrize("content", ["a: &x [*x]\n", "upstreams: &x {a: *x}\n", "listen: &x {port: *x}\n"])
def test_an_alias_of_itself_ends_in_words_too(given: Given, content: str) -> None:
    assert 1 <= len(problems_of(given(content)))


@pytest.mark.parametrize(
    "content",
    [
        "password: hunter2000\n",
        "listen: {token: hunter2000}\n",
        "listen: {apikey: hunter2000}\n",
        "upstreams: {a: {hosts: [a.test], endpoints: ['https://user:hunter2000@a.test']}}\n",
        "upstreams: {a: {hosts: [a.test], endpoints: ['https://a.test/?api_key=hunter2000']}}\n",
        "listen: {zzz: Bearer hunter2000}\n",
        "listen: {zzz: sk_live_hunter2000}\n",
        "listen: {host: 'hunter2000\n",
    ],
)
def test_a_secret_is_never_repeated_in_a_mistake(given: Given, content: str) -> None:
    assert "hunter2000" not in "\n".join(map(str, problems_of(given(content))))


def test_a_long_value_is_shortened_to_one_line(given: Given) -> None:
    problem = the_problem_of(given('egress: {mode: "' + "word \\n" * 40 + '"}'))
    assert problem.value is not None
    assert len(problem.value) <= 60
    assert problem.value.isprintable()


def test_it_is_known_where_each_value_came_from(given: Given) -> None:
    path = given("listen: {port: 5000}\nlimits:\nupstreams: {a: {hosts: [a.test]}}\n")
    loaded = load(path, {"SIDECAR__ADMIN__PORT": "5001"})
    assert path == loaded.path
    assert {
        "listen.port": "file",
        "admin.port": "environment",
        "upstreams.a.hosts": "file",
    } == {key: origin for key, origin in loaded.origins.items() if origin != "default"}
    assert "default" == loaded.origins["limits.tunnels"]
    assert "default" == loaded.origins["upstreams.a.timeouts.connect"]

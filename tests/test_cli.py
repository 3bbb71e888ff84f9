"""The command line: exit codes 0 fine, 1 failed, 2 wrong use, and words a person can act on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import __version__
from sidecar.__main__ import main
from sidecar.cli.completion import places
from sidecar.cli.parser import COMMANDS, parser

REPOSITORY = Path(__file__).resolve().parent.parent
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SIDECAR")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sidecar.yaml"


def test_check_says_that_a_good_file_is_fine(file: Path, capsys: Captured) -> None:
    file.write_text("upstreams:\n  a: {hosts: [a.test]}\n  b: {hosts: [b.test]}\n")
    assert 0 == main(["check", "-c", str(file)])
    said = capsys.readouterr()
    assert f"{file}: fine, 2 upstreams configured\n" == said.out
    assert "" == said.err


def test_check_without_a_file_checks_the_defaults(capsys: Captured) -> None:
    assert 0 == main(["check"])
    assert "built-in defaults: fine" in capsys.readouterr().out


def test_check_takes_the_file_from_the_environment(
    file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("nonsense: 1\n")
    monkeypatch.setenv("SIDECAR_CONFIG", str(file))
    assert 2 == main(["check"])
    assert f"{file}:1" in capsys.readouterr().err


def test_check_tells_all_mistakes_at_once_with_line_value_and_the_nearest_key(file: Path, capsys: Captured) -> None:
    file.write_text(
        "limts: {}\nlisten:\n  prot: 1\n  port: 99999\nupstreams:\n  pay:\n    hosts: [p.test]\n    polcy: x\n"
    )
    assert 2 == main(["check", "-c", str(file)])
    said = capsys.readouterr()
    assert "" == said.out
    for line, key, words in (
        (1, "limts", "limits"),
        (3, "listen.prot", "port"),
        (4, "listen.port", "99999"),
        (8, "upstreams.pay.polcy", "policy"),
    ):
        (told,) = [text for text in said.err.splitlines() if text.startswith(f"{file}:{line}: {key}: ")]
        assert words in told.partition(f"{key}: ")[2]


def test_check_names_a_variable_that_is_wrong(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR__LISTEN__PROT", "1")
    assert 2 == main(["check"])
    assert "SIDECAR__LISTEN__PROT" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_file_that_is_not_there_is_wrong_use(command: str, file: Path, capsys: Captured) -> None:
    assert 2 == main([command, "-c", str(file)])
    assert str(file) in capsys.readouterr().err


def test_run_refuses_a_bad_file_like_check_does(file: Path, capsys: Captured) -> None:
    file.write_text("limts: {}\n")
    assert 2 == main(["check", "-c", str(file)])
    checked = capsys.readouterr().err
    assert 2 == main(["run", "-c", str(file)])
    assert checked == capsys.readouterr().err


def test_schema_is_json_with_a_description_for_every_key(capsys: Captured) -> None:
    assert 0 == main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    assert "https://json-schema.org/draft/2020-12/schema" == schema["$schema"]
    assert {"listen", "admin", "limits", "egress", "upstreams"} <= set(schema["properties"])
    assert [] == [name for name, key in _keys(schema) if "description" not in key and "$ref" not in key]
    assert [] == [name for name, model in schema["$defs"].items() if "description" not in model]


def _keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for model_name, model in {"": schema, **schema["$defs"]}.items():
        for name, key in model.get("properties", {}).items():
            yield f"{model_name}.{name}", key


def test_version_prints_the_version(capsys: Captured) -> None:
    assert 0 == main(["version"])
    assert f"sidecar {__version__}\n" == capsys.readouterr().out
    assert 0 == main(["version", "--json"])
    assert {"version": __version__} == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["nonsense"], [], ["check", "--nonsense"], ["run", "-c"], ["version", "x"]])
def test_wrong_use_ends_with_2_and_shows_the_usage(arguments: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert 2 == ended.value.code
    assert "usage: sidecar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["sesions"], "sessions"),
        (["sessions", "--outcme", "x"], "--outcome"),
        (["breakers", "forceopen", "u"], "force-open"),
        (["tokens", "new", "x", "--role", "opertae"], "operate"),
        (["check", "--hosts", "x"], "--host"),
    ],
)
def test_a_misspelled_word_is_told_with_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert 2 == ended.value.code
    assert f'did you mean "{meant}"?' in capsys.readouterr().err


def test_an_option_of_other_commands_is_not_suggested_for_itself(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["dlq", "discard", "--limit", "5", "--reason", "x"])
    told = capsys.readouterr().err
    assert ("did you mean" in told, "other commands have that" in told) == (False, True)


def test_every_command_that_tells_something_tells_it_to_programs_too() -> None:
    without = {place.path for place in places(parser(), "sidecar") if not place.commands} - {
        place.path for place in places(parser(), "sidecar") for option in place.options if "--json" in option.flags
    }
    assert {"sidecar run", "sidecar schema", "sidecar completion"} == without  # a log, a schema, a script


def test_check_tells_programs_what_is_wrong(file: Path, capsys: Captured) -> None:
    file.write_text("limts: {}\n")
    assert 2 == main(["check", "-c", str(file), "--json"])
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert ("limts", str(file), 1, "limits") == tuple(problem[key] for key in ("key", "file", "line", "nearest"))


def test_ctrl_c_ends_a_command_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(chosen: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sidecar.cli.version.version", interrupted)
    assert 130 == main(["version"])


def test_help_names_every_command(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert 0 == ended.value.code
    said = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", said, re.MULTILINE), command


def test_the_module_can_be_run_and_returns_its_exit_code(file: Path) -> None:
    file.write_text("limts: {}\n")
    for arguments, code in ((["version"], 0), (["check", "-c", str(file)], 2), (["nonsense"], 2)):
        ended = subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments], cwd=REPOSITORY, capture_output=True, timeout=20, check=False
        )
        assert code == ended.returncode
        assert b"Traceback" not in ended.stderr


def test_a_reader_that_has_read_enough_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar", "schema"],
        cwd=REPOSITORY,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=20,
        check=False,
    )
    os.close(writing)
    assert (0, b"") == (ended.returncode, ended.stderr)

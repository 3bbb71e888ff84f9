"""Completion, in the shells themselves: what they offer is what the parser takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.cli.completion import places
from sidecar.cli.parser import COMMANDS, ORDERS, parser

LINES = {
    "sidecar ": set(COMMANDS),
    "sidecar bre": {"breakers"},
    "sidecar breakers force-": {"force-open", "force-close"},
    "sidecar interception ": {"list", "clear"},
    "sidecar interception clear --a": {"--all", "--admin"},
    "sidecar check --ho": {"--host"},
    "sidecar sessions --out": {"--outcome"},
    "sidecar breakers force-open u --t": {"--ttl", "--token-file"},
    "sidecar tokens new x --role ": {"read", "operate"},
    "sidecar tokens new x --role op": {"operate"},
    "sidecar completion ": {"bash", "zsh", "fish"},
    "sidecar sessions --limit ": set(),
}
BASH = """
source {script}
words=({line}); [[ {line!r} == *' ' ]] && words+=('')
COMP_WORDS=("${{words[@]}}"); COMP_CWORD=$((${{#words[@]}} - 1))
_sidecar; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ }}
compadd() {{ shift; print -rl -- $@ }}
_describe() {{ print -rl -- ${{${{(P)2}}%%:*}} }}
source {script}
words=({line}); [[ {line!r} == *' ' ]] && words+=('')
CURRENT=$#words; _sidecar
"""
FISH = "source {script}; complete -C {line!r}"
PROGRAMS = {"bash": (["bash", "-c"], BASH), "zsh": (["zsh", "-f", "-c"], ZSH), "fish": (["fish", "-c"], FISH)}


@pytest.fixture(params=PROGRAMS)
def shell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    return name


def offered(shell: str, line: str, script: Path) -> set[str]:
    command, program = PROGRAMS[shell]
    ended = subprocess.run(
        [*command, program.format(script=script, line=line)],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/bin:/bin", "HOME": str(script.parent)},
    )
    assert "" == ended.stderr
    words = {word.partition("\t")[0] for word in ended.stdout.splitlines() if word}
    beginning = line.rpartition(" ")[2]
    return {word for word in words if word.startswith(beginning)}  # zsh itself sorts out what does not fit


def test_each_shell_offers_what_the_parser_takes(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["completion", shell])
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    for line, words in LINES.items():
        found = offered(shell, line, script)
        plain = found if line.rpartition(" ")[2].startswith("-") else {word for word in found if word[0] != "-"}
        assert words == plain, line


def test_no_command_and_no_option_is_left_out() -> None:
    known = {place.path: place for place in places(parser(), "sidecar")}
    assert set(COMMANDS) == {name for name, _ in known["sidecar"].commands}
    assert {f"sidecar breakers {order}" for order in ORDERS} <= set(known)
    assert all(text for place in known.values() for _, text in place.commands), "a command without help"
    assert all(option.help for place in known.values() for option in place.options), "an option without help"
    flags = {flag for option in known["sidecar sessions"].options for flag in option.flags}
    assert {"--outcome", "--admin", "--json", "-c", "--config"} <= flags


def test_a_shell_that_is_not_known_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert 2 == ended.value.code
    assert "tcsh" in capsys.readouterr().err

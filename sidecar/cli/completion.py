"""`sidecar completion SHELL`: a script that lets a shell complete commands, options and their words.

Law: made from the parser itself, so it knows every word the command line takes and no other. All three scripts do the
same: find out which command the line has got to, then offer what may follow there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sidecar.cli.parser import parser


class Option(NamedTuple):
    """`words` are what its value can be; None when it takes none, empty when it can be anything."""

    flags: tuple[str, ...]
    help: str
    words: tuple[str, ...] | None
    file: bool


class Place(NamedTuple):
    """What may follow after the words in `path`."""

    path: str
    commands: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]
    words: tuple[str, ...]
    """Of arguments that are one of a few."""
    file: bool
    """An argument is a file."""


def completion(chosen: argparse.Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[chosen.shell](list(places(parser(), "sidecar"))), end="")
    return 0


def places(command: argparse.ArgumentParser, path: str) -> Iterator[Place]:
    """This one first, then those below it."""
    commands: list[tuple[str, str]] = []
    options: list[Option] = []
    words: list[str] = []
    file = False
    below: dict[str, argparse.ArgumentParser] = {}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            helps = {known.dest: known.help or "" for known in action._choices_actions}
            commands = [(name, helps.get(name, "")) for name in below]
        elif action.option_strings:
            given = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            options.append(Option(tuple(action.option_strings), action.help or "", given, action.type is Path))
        else:
            words.extend(map(str, action.choices or ()))
            file = file or action.type is Path
    yield Place(path, tuple(commands), tuple(options), tuple(words), file)
    for name, parsed in below.items():
        yield from places(parsed, f"{path} {name}")


def bash(known: list[Place]) -> str:
    values, here = [], []
    for place in known:
        for option in place.options:
            if option.words is not None:
                offered = "compopt -o default" if option.file else f'_sidecar_offer "{" ".join(option.words)}"'
                values.append(f"    {_cases(place, option)}) {offered}; return ;;")
        flags = [flag for option in place.options for flag in option.flags]
        words = " ".join([*(name for name, _ in place.commands), *place.words, *flags])
        files = "compopt -o default; " if place.file else ""
        here.append(f'    "{place.path}") {files}_sidecar_offer "{words}" ;;')
    return f"""# bash completion of sidecar; in ~/.bashrc: source <(sidecar completion bash)
_sidecar_offer() {{
  mapfile -t COMPREPLY < <(compgen -W "$1" -- "${{COMP_WORDS[COMP_CWORD]}}")
}}
_sidecar() {{
  local at=sidecar i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$at ${{COMP_WORDS[i]}}" in
    {_ways(known)}) at="$at ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$at ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{_lines(values)}
  esac
  case "$at" in
{_lines(here)}
  esac
}}
complete -F _sidecar sidecar
"""


def zsh(known: list[Place]) -> str:
    values, here = [], []
    for place in known:
        for option in place.options:
            if option.words is not None:
                offered = "_files" if option.file else f"compadd -- {' '.join(option.words)}" if option.words else ":"
                values.append(f"    {_cases(place, option)}) {offered}; return ;;")
        told = [*place.commands, *((word, "") for word in place.words)]
        told += [(flag, option.help) for option in place.options for flag in option.flags]
        offered = " ".join(_quoted(f"{word}:{text}" if text else word) for word, text in told)
        files = "_files; " if place.file else ""
        here.append(f'    "{place.path}") {files}offered=({offered}) ;;')
    return f"""#compdef sidecar
# zsh completion of sidecar; in ~/.zshrc after compinit: source <(sidecar completion zsh)
_sidecar() {{
  local at=sidecar i
  local -a offered
  for ((i = 2; i < CURRENT; i++)); do
    case "$at $words[i]" in
    {_ways(known)}) at="$at $words[i]" ;;
    esac
  done
  case "$at $words[CURRENT-1]" in
{_lines(values)}
  esac
  case "$at" in
{_lines(here)}
  esac
  _describe sidecar offered
}}
if [[ $funcstack[1] == _sidecar ]]; then _sidecar "$@"; else compdef _sidecar sidecar; fi
"""


def fish(known: list[Place]) -> str:
    lines = []
    for place in known:
        here = f"complete -c sidecar -n 'test (__sidecar_at) = \"{place.path}\"'"
        lines += [f"{here} -a {name} -d {_quoted(text)}" for name, text in place.commands]
        lines += [f"{here} -a {word}" for word in place.words]
        lines += [f"{here} -F"] if place.file else []
        for option in place.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = "" if option.words is None else " -r -F" if option.file else " -x"
            words = f" -a {_quoted(' '.join(option.words))}" if option.words else ""
            lines.append(f"{here} {flags}{value}{words} -d {_quoted(option.help)}")
    ways = " ".join(f'"{place.path}"' for place in known[1:])
    offered = "\n".join(lines)
    return f"""# fish completion of sidecar; sidecar completion fish > ~/.config/fish/completions/sidecar.fish
function __sidecar_at
  set -l at sidecar
  for word in (commandline -opc)[2..-1]
    switch "$at $word"
      case {ways}
        set at "$at $word"
    end
  end
  echo $at
end
complete -c sidecar -f
{offered}
"""


def _ways(known: list[Place]) -> str:
    return " | ".join(f'"{place.path}"' for place in known[1:])


def _cases(place: Place, option: Option) -> str:
    return " | ".join(f'"{place.path} {flag}"' for flag in option.flags)


def _lines(lines: list[str]) -> str:
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """For a POSIX shell and for zsh; fish takes the same, as no text here ends in a backslash."""
    return "'" + text.replace("'", "'\\''") + "'"

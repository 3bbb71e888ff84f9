"""`sidecar explain ID`: what happened to one request.

Law: the words are the admin port's; here they are only fitted to the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from urllib.parse import quote

from sidecar.cli.admin import connect, telling_failures
from sidecar.cli.listing import whole_id
from sidecar.cli.terminal import Terminal, printable

_INDENT = 12
_STEP = re.compile(r"( *\+[\d.]+ \w+)(  )(.*)")
_NOTE = re.compile(r"( {12})(decided by:|what would change it:)(.*)")
_NOTE_COLOURS = {"decided by:": "dim", "what would change it:": "cyan"}


@telling_failures
def explain(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    path = f"/sessions/{quote(whole_id(admin, 'session', chosen.id), safe='')}"
    terminal = Terminal()
    if chosen.json:
        terminal.line(json.dumps(admin.get(path), indent=2))
        return 0
    summary, *steps = admin.text(path).splitlines()
    for line in terminal.wrapped(printable(summary), 0):
        terminal.line(terminal.paint(line, "bold"))
    for step in steps:
        for number, line in enumerate(terminal.wrapped(printable(step), _INDENT)):
            terminal.line(_coloured(terminal, line) if number == 0 else line)
    return 0


def _coloured(terminal: Terminal, line: str) -> str:
    if found := _STEP.fullmatch(line):
        return terminal.paint(found[1], "dim") + found[2] + found[3]
    if found := _NOTE.fullmatch(line):
        return found[1] + terminal.paint(found[2], _NOTE_COLOURS[found[2]]) + found[3]
    return line

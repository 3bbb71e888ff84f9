"""`sidecar check`: what is wrong with a configuration, and where a host leads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from config.loader import ConfigError, load
from sidecar.cli.terminal import Terminal
from telemetry.sentences import counted

_INDENT = 13


def check(chosen: argparse.Namespace) -> int:
    try:
        loaded = load(chosen.config, os.environ)
    except ConfigError as wrong:
        if chosen.json:
            print(json.dumps({"problems": [dataclasses.asdict(problem) for problem in wrong.problems]}, indent=2))
        else:
            print(wrong, file=sys.stderr)
        return 2
    where = loaded.path or "built-in defaults"
    upstreams = len(loaded.settings.upstreams)
    if chosen.host is None:
        if chosen.json:
            print(json.dumps({"file": str(loaded.path) if loaded.path else None, "upstreams": upstreams}))
        else:
            print(f"{where}: fine, {counted(upstreams, 'upstream')} configured")
        return 0
    from sidecar.cli.standing import as_it_is_now
    from sidecar.cli.whereto import NotAHost, ways_to  # most of the data path, which a plain check does not need

    try:
        ways = [as_it_is_now(way, chosen, os.environ) for way in ways_to(chosen.host, loaded.settings)]
    except NotAHost as wrong:
        print(f"sidecar check: --host: {wrong}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps({"items": [dataclasses.asdict(way) for way in ways]}, indent=2))
        return 0
    terminal = Terminal()
    terminal.line(f"{where}: fine, {counted(upstreams, 'upstream')} configured")
    for way in ways:
        terminal.line(f"\n{terminal.paint(way.url, 'bold')}  ({way.means})")
        for name, text in way.lines():
            for line in terminal.wrapped(f"  {name:<11}{text}", _INDENT):
                terminal.line(line)
    return 0

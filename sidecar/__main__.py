"""The command line.

Law: imports what a command needs when it runs, so that `sidecar version` is instant. Exit codes: 0 fine, 1 failed,
2 wrong use (a bad configuration included).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sidecar import __version__


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    command = {"run": _run, "check": _check, "schema": _schema, "version": _version}[chosen.command]
    return command(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidecar", description="A proxy beside your app: point HTTP_PROXY at it and see every outgoing call."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("run", "start the proxy"), ("check", "explain what is wrong with a configuration")):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "-c", "--config", type=Path, metavar="FILE", help="YAML file (default: $SIDECAR_CONFIG, else none)"
        )
    commands.add_parser("schema", help="print the JSON Schema of the configuration file")
    commands.add_parser("version", help="print the version")
    return parser


def _run(chosen: argparse.Namespace) -> int:
    from config.loader import ConfigError, load

    try:
        loaded = load(chosen.config, os.environ)
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    from sidecar.lifecycle import run

    return run(loaded)


def _check(chosen: argparse.Namespace) -> int:
    from config.loader import ConfigError, load

    try:
        loaded = load(chosen.config, os.environ)
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    where = loaded.path or "built-in defaults"
    print(f"{where}: fine, {len(loaded.settings.upstreams)} upstream(s) configured")
    return 0


def _schema(chosen: argparse.Namespace) -> int:
    import json

    from config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _version(chosen: argparse.Namespace) -> int:
    print(f"sidecar {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

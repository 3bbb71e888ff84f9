"""`sidecar backup` and `sidecar restore`: all that is kept, in one file, and back."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from pathlib import Path

from sidecar.cli.admin import Failed, telling_failures

_WRONG_USE = 400


@telling_failures
def backup(chosen: argparse.Namespace) -> int:
    from sidecar.durable.backup import back_up
    from sidecar.durable.trouble import Trouble

    state_dir = _state_dir(chosen)
    os.umask(0o077)
    try:
        made = back_up(state_dir, chosen.file, overwrite=chosen.force)
    except Trouble as trouble:
        raise Failed(str(trouble), 2 if trouble.status == _WRONG_USE else 1) from None
    if chosen.json:
        told = {"file": str(made.path), "parts": made.parts, "bytes": made.bytes, "schema": made.version}
        print(json.dumps({**told, "missing": made.missing}))
        return 0
    print(f"{made.path}: {made.bytes} bytes of {state_dir} in {made.parts} parts. Keep it safe: the keys are in it.")
    for name in made.missing:
        print(f"The body {name} is missing in {state_dir}, so it is not in the backup either.", file=sys.stderr)
    if os.environ.get("SIDECAR_SEAL_KEY"):
        print("SIDECAR_SEAL_KEY is not in it; without that nothing sealed can be read.", file=sys.stderr)
    return 0


@telling_failures
def restore(chosen: argparse.Namespace) -> int:
    from sidecar.assembly import CannotStart, lock_state_dir
    from sidecar.durable.backup import restore as put_back
    from sidecar.durable.trouble import Trouble

    state_dir = _state_dir(chosen)
    os.umask(0o077)
    try:
        lock = lock_state_dir(state_dir)
    except CannotStart as why:
        raise Failed(f"{why} (a store is restored while its sidecar does not run)") from None
    with closing(lock):
        try:
            made, aside = put_back(chosen.file, state_dir, overwrite=chosen.force)
        except Trouble as trouble:
            raise Failed(str(trouble), 2 if trouble.status == _WRONG_USE else 1) from None
    if chosen.json:
        told = {"state_dir": str(state_dir), "parts": made.parts, "bytes": made.bytes, "schema": made.version}
        print(json.dumps({**told, "set_aside": None if aside is None else str(aside)}))
        return 0
    print(f"{state_dir} is as {made.path} has it: {made.bytes} bytes in {made.parts} parts.")
    print("It knows nothing of what happened since: what was replayed or delivered then waits here once more.")
    if aside is not None:
        print(f"What was there is in {aside}; remove it when you do not need it any more.")
    return 0


def _state_dir(chosen: argparse.Namespace) -> Path:
    if chosen.state_dir is not None:
        return Path(chosen.state_dir)
    from config.loader import ConfigError, load

    try:
        return Path(load(chosen.config, os.environ).settings.state_dir)
    except ConfigError as wrong:
        raise Failed(
            f"the configuration that names `state_dir` cannot be read; use --state-dir DIR\n{wrong}", 2
        ) from None

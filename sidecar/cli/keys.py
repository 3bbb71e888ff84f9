"""`sidecar keys`: which keys seal what is kept, and a new one."""

from __future__ import annotations

import argparse
import json
import os
from time import sleep
from typing import Any

from sidecar.cli.admin import Admin, Failed, connect, telling_failures
from sidecar.cli.progress import Progress
from sidecar.cli.terminal import Terminal

_POLL = 0.25


@telling_failures
def keys(chosen: argparse.Namespace) -> int:
    admin, terminal = connect(chosen, os.environ), Terminal()
    if chosen.action == "rotate":
        admin.post("/keys/rotate", {} if chosen.reason is None else {"reason": chosen.reason})
        shown = _until_done(admin)
    else:
        shown = admin.get("/keys")
    if chosen.json:
        terminal.line(json.dumps(shown, indent=2))
    else:
        _tell(terminal, shown)
    resealing = shown["resealing"]
    return 1 if resealing is not None and (resealing["state"] == "interrupted" or resealing["damaged"]) else 0


def _until_done(admin: Admin) -> dict[str, Any]:
    progress = Progress(0)
    try:
        while (shown := admin.get("/keys"))["resealing"]["state"] == "running":
            done = shown["resealing"]
            progress.show(done["values"] + done["files"], "sealed anew")
            sleep(_POLL)
    except KeyboardInterrupt:
        raise Failed("the new key seals already; the rest goes on without being watched, see `sidecar keys`") from None
    finally:
        progress.end()
    return dict(shown)


def _tell(terminal: Terminal, shown: dict[str, Any]) -> None:
    if shown["active"] is None:
        terminal.line("No keys yet: one is made when the first dead letter is kept.")
        return
    terminal.line(f"Key {shown['active']} seals.")
    others = [key for key in shown["needed"] if key != shown["active"]]
    if others:
        terminal.line(f"Still needed: {', '.join(others)}. Keep their files.")
    done = shown["resealing"]
    if done is not None:
        terminal.line(f"Sealing anew: {done['state']}, {done['values']} values and {done['files']} files.")
        if done["why"]:
            terminal.line(f"{done['why']}; rotate again to go on.")
        if done["damaged"]:
            terminal.line(f"{done['damaged']} could not be opened; old keys stay needed. The log says which.")

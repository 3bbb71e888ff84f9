"""`sidecar retries` and `sidecar reload`: two orders to the whole sidecar."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from sidecar.cli.admin import connect, telling_failures
from sidecar.cli.terminal import Terminal, printable

_AS_IT_IS = "Nothing changed: the file is in force as it is."


@telling_failures
def retries(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    if chosen.order is None:
        answer = admin.get("/retries")
    else:
        lasting = {} if chosen.ttl is None else {"ttl": chosen.ttl}
        answer = admin.post(f"/retries/{chosen.order}", {**lasting, **_why(chosen)})
    terminal = Terminal()
    if chosen.json:
        terminal.line(json.dumps(answer, indent=2))
    elif answer["retries_enabled"]:
        terminal.line(terminal.paint(f"Retries are on{_until(answer)}.", "green"))
    else:
        terminal.line(terminal.paint(f"Retries are off{_until(answer)}: nothing is sent a second time.", "yellow"))
    return 0


@telling_failures
def reload(chosen: argparse.Namespace) -> int:
    answer = connect(chosen, os.environ).post("/reload", _why(chosen))
    terminal = Terminal()
    if chosen.json:
        terminal.line(json.dumps(answer, indent=2))
        return 0
    for role in answer.get("renewed", ()):
        terminal.line(f"{role}: a renewed certificate is shown from now on")
    if not answer["changed"] and not answer.get("renewed"):
        terminal.line("Nothing changed: all else in the file is in force." if answer["needs_restart"] else _AS_IT_IS)
    for change in answer["changed"]:
        terminal.line(printable(f"{change['key']}: {_short(change['before'])} → {_short(change['after'])}"))
    if answer["needs_restart"]:
        told = f"Needs a restart: {', '.join(answer['needs_restart'])}"
        terminal.line(terminal.paint(printable(told), "yellow"))
    return 0


def _until(answer: dict[str, Any]) -> str:
    return "" if answer["until"] is None else f" until {answer['until']}"


def _why(chosen: argparse.Namespace) -> dict[str, str]:
    return {} if chosen.reason is None else {"reason": chosen.reason}


def _short(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)

"""`sidecar dlq replay` and `replays`: send again, and see how that goes.

Law: what would happen is shown before it happens; many are sent only by somebody who said yes. Whoever stops watching
stops nothing, and is told how to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from time import sleep
from typing import Any
from urllib.parse import quote

from sidecar.cli.admin import Admin, Failed
from sidecar.cli.dlq import next_steps, path_of, which
from sidecar.cli.listing import listed, tell
from sidecar.cli.progress import Progress
from sidecar.cli.table import Cell, Column, when
from sidecar.cli.terminal import Terminal, printable

_POLL = 0.25
_LONGEST_REPLAY = 900.0
_ENDED = ("done", "cancelled", "interrupted")
_COLUMNS = (
    Column("STARTED (UTC)", importance=2, brief="STARTED"),
    Column("ID", brief="ID"),
    Column("STATE"),
    Column("DONE", right=True),
    Column("OUTCOMES", flexible=True, importance=3),
    Column("BY", flexible=True, importance=1),
)


def replay(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    if chosen.force and not (chosen.reason or "").strip():
        raise Failed("--force needs --reason: say why it is safe to send it", 2)
    if chosen.id is not None:
        if which(chosen) or chosen.all:
            raise Failed("give either one ID or a filter, not both", 2)
        return _one(admin, terminal, chosen)
    if not which(chosen) and not chosen.all:
        raise Failed("say which: an ID, a filter as in --upstream NAME, or --all", 2)
    return _many(admin, terminal, chosen)


# ---- one ---------------------------------------------------------------------------------------------------------


def _one(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    letter = admin.get(path_of(chosen.id))
    allowed = letter["replay"]["allowed"]
    if chosen.dry_run:
        if chosen.json:
            terminal.line(json.dumps({"dlq_id": letter["dlq_id"], **letter["replay"]}, indent=2))
        else:
            _say(terminal, f"{letter['verdict']}: {letter['sentence']}")
            _say(terminal, "It would be sent." if allowed else f"It would not be sent: {letter['replay']['why_not']}")
        return 0 if allowed else 1
    if not allowed and not chosen.force and letter["status"] in ("pending", "failed"):
        raise Failed("\n  ".join([f"{letter['dlq_id']} is not sent", *next_steps(letter)]))
    order = {"force": chosen.force, **({"reason": chosen.reason} if chosen.reason else {})}
    done = admin.post(f"{path_of(chosen.id)}/replay", order, patience=_LONGEST_REPLAY)
    if chosen.json:
        terminal.line(json.dumps(done, indent=2))
    else:
        _tell_one(terminal, done)
    return 0 if done["outcome"] == "completed" else 1


def _tell_one(terminal: Terminal, done: dict[str, Any]) -> None:
    entry, outcome = done["entry"], done["outcome"]
    failure = f"{entry['error_class']}: {entry['error_details']['error_message']}"
    held = entry["history"][-1].get("why") or "breaker, limits or egress"
    told = {
        "completed": f"{entry['dlq_id']} succeeded at {entry['replayed_at']}.",
        "failed": f"{entry['dlq_id']} failed again and stays {entry['status']} ({failure}).",
        "escalated": f"{entry['dlq_id']} failed with the same fatal class again: engineering has to look ({failure}).",
        "held_back": f"{entry['dlq_id']} was held back, nothing was sent: {held}.",
    }
    _say(terminal, told.get(outcome, f"{entry['dlq_id']}: {outcome}"))
    for step in next_steps(entry):
        _say(terminal, f"  {step}")


# ---- many --------------------------------------------------------------------------------------------------------


def _many(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    order: dict[str, Any] = {"filter": which(chosen), "force": chosen.force, "ramp": not chosen.no_ramp}
    order |= {
        name: value
        for name in ("rate", "limit", "stop_after", "reason")
        if (value := getattr(chosen, name)) is not None
    }
    would = admin.post("/dlq/replay", {**order, "dry_run": True})["dry_run"]
    if chosen.dry_run and chosen.json:
        terminal.line(json.dumps(would, indent=2))
        return 0
    if not chosen.json:
        _tell_dry_run(terminal, would, forced=chosen.force)
    if chosen.dry_run:
        return 0
    if not would["would_replay"]:
        if would["by_verdict"]:
            raise Failed("nothing would be sent, so nothing was started")
        if chosen.json:
            terminal.line(json.dumps(would, indent=2))
        return 0  # there was nothing to do
    if not chosen.yes:
        _ask(would["would_replay"])
    started = admin.post("/dlq/replay", order)["replay"]
    if chosen.no_wait:
        shown = started
    else:
        shown = follow(admin, started["job_id"])
    return _tell_end(terminal, shown, as_json=chosen.json)


def _ask(number: int) -> None:
    if not sys.stdin.isatty():
        raise Failed("nothing was sent: nobody is there to ask, so say --yes", 2)
    print(f"Replay {number} of them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failed("nothing was sent")


def _tell_dry_run(terminal: Terminal, would: dict[str, Any], *, forced: bool) -> None:
    total = sum(would["by_verdict"].values())
    fit = (
        f"{total} waiting entr{'y fits' if total == 1 else 'ies fit'}: {_counted(would['by_verdict'])}."
        if total
        else "No waiting entry fits."
    )
    _say(terminal, f"{fit} {would['would_replay']} would go out{' by force' if forced else ''}.")
    if would["refused_in_first_page"]:
        skipped = _counted(would["refused_in_first_page"]).replace("remediation", "without evidence of what was fixed")
        _say(terminal, f"Of the first of them these would be skipped: {skipped}.")
    for upstream, state in would["breakers"].items():
        _say(
            terminal,
            f"The breaker of {upstream} is {state}: replays to it wait until it lets calls through again, and then go "
            "on by themselves.",
        )
    if would["would_replay"] and would["stop_after"]:
        _say(
            terminal,
            f"It pauses after {would['stop_after']} failures, until `sidecar dlq replays ID resume` (--stop-after N).",
        )


def follow(admin: Admin, job_id: str) -> dict[str, Any]:
    """Watch until it ends or pauses."""
    shown = admin.get(_path(job_id))
    progress = Progress(shown["total"])
    try:
        while shown["state"] == "running":
            progress.show(shown["done"], _pace(shown))
            sleep(_POLL)
            shown = admin.get(_path(job_id))
    except KeyboardInterrupt:
        progress.end()
        how = f"sidecar dlq replays {job_id} [pause|cancel]"
        raise Failed(f"{job_id} goes on without being watched; look at it or stop it with: {how}") from None
    finally:
        progress.end()
    return dict(shown)


def _pace(shown: dict[str, Any]) -> str:
    """How fast it goes, how long it will take, and what it waits for."""
    words = [f"{shown['percent']:.0f} %"]
    if shown["per_second"] is not None:
        words.append(f"{shown['per_second']:g}/s")
    if shown["seconds_left"]:
        minutes, seconds = divmod(round(shown["seconds_left"]), 60)
        words.append(f"{minutes} min {seconds} s left" if minutes else f"{seconds} s left")
    if shown["current"].startswith("waiting"):
        words.append(shown["current"])
    return ", ".join([*words, _counted(shown["outcomes"])]).rstrip(", ")


def _tell_end(terminal: Terminal, shown: dict[str, Any], *, as_json: bool) -> int:
    outcomes = shown["outcomes"]
    good = shown["state"] in ("done", "running") and not any(outcomes.get(word) for word in ("failed", "escalated"))
    if as_json:
        terminal.line(json.dumps(shown, indent=2))
        return 0 if good else 1
    why = f" ({shown['why']})" if shown["why"] else ""
    _say(terminal, f"{shown['job_id']} is {shown['state']}{why}: {_counted(outcomes) or 'nothing sent yet'}.")
    for reason, number in shown["skipped"].items():
        _say(terminal, f"  {number} not sent: {reason}")
    if shown["state"] == "paused":
        _say(terminal, f"  sidecar dlq replays {shown['job_id']} resume|cancel")
    return 0 if good else 1


# ---- replays -----------------------------------------------------------------------------------------------------


def replays(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    if chosen.id is None:
        return _list(admin, terminal, chosen)
    if chosen.order is None:
        return _tell_end(terminal, follow(admin, chosen.id), as_json=chosen.json)
    shown = admin.post(f"{_path(chosen.id)}/{chosen.order}", {"reason": chosen.reason} if chosen.reason else {})
    if chosen.json:
        terminal.line(json.dumps(shown, indent=2))
    else:
        _say(terminal, f"{shown['job_id']} is {shown['state']}: {_counted(shown['outcomes']) or 'nothing sent yet'}.")
    return 0


def _list(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    found = listed(admin, "/dlq/replays", chosen.limit, 1000, since=chosen.since)
    if chosen.json:
        terminal.line(json.dumps(found.as_json(), indent=2))
    elif not found.items:
        terminal.line("No replays of many so far." if chosen.since is None else "No such replays.")
    else:
        rows = [
            (
                when(item["created_at"]),
                Cell(item["job_id"], None, item["job_id"][:8]),
                Cell(item["state"], {"done": "green", "running": "cyan"}.get(item["state"], "yellow")),
                Cell(f"{item['done']} of {item['total']}"),
                Cell(_counted(item["outcomes"])),
                Cell(str(item["order"].get("by", ""))),
            )
            for item in found.items
        ]
        tell(terminal, found, _COLUMNS, rows)
    return 0


def _path(job_id: str) -> str:
    return f"/dlq/replays/{quote(job_id, safe='')}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items() if number)


def _say(terminal: Terminal, text: str) -> None:
    for line in terminal.wrapped(printable(text), 2):
        terminal.line(line)

"""`sidecar dlq`: dead letters as a table, one of them for reading, and what a person does to it.

Law: what may be done is decided by the sidecar; here it is asked, and every refusal comes with the command that
leads on.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from sidecar.cli.admin import Admin, Failed, connect, telling_failures
from sidecar.cli.listing import listed, must_be_upstreams, tell, whole_id
from sidecar.cli.table import Cell, Column, when
from sidecar.cli.terminal import Terminal, printable
from sidecar.cli.whenever import ago

Letter = dict[str, Any]

WHICH = ("status", "upstream", "error_class", "verdict", "since", "until", "q", "workflow")
_ELSEWHERE = {
    "replay": "sidecar.cli.dlq_replay:replay",
    "replays": "sidecar.cli.dlq_replay:replays",
    "groups": "sidecar.cli.dlq_bulk:groups",
    "verify": "sidecar.cli.dlq_verify:verify",
    "export": "sidecar.cli.dlq_files:export",
    "import": "sidecar.cli.dlq_files:bring_in",
}
_LARGEST_PAGE = 500
_LONGEST_BODY = 600.0
_LABEL = 13
_VERDICTS = {"safe": "green", "unsafe": "red", "not_replayable": "red"}
_STATUSES = {"completed": "green", "discarded": "dim", "failed": "red"}
_COLUMNS = (
    Column("KEPT (UTC)", importance=4, brief="KEPT"),
    Column("ID", brief="ID"),
    Column("UPSTREAM", flexible=True, importance=2),
    Column("REQUEST", flexible=True, importance=5, narrow=16, request=True),
    Column("ERROR CLASS", flexible=True, importance=6),
    Column("VERDICT"),
    Column("STATUS"),
    Column("SEEN", importance=1, right=True),
)


@telling_failures
def dlq(chosen: argparse.Namespace) -> int:
    admin, terminal = connect(chosen, os.environ), Terminal()
    kind = "replay" if chosen.action == "replays" else "dead_letter"
    if getattr(chosen, "id", None) is not None:
        chosen.id = whole_id(admin, kind, chosen.id)
    if getattr(chosen, "ids", None):
        chosen.ids = [whole_id(admin, kind, given) for given in chosen.ids]
    if chosen.action in _ELSEWHERE:
        module, _, name = _ELSEWHERE[chosen.action].partition(":")
        done: int = getattr(importlib.import_module(module), name)(admin, terminal, chosen)
        return done
    action = {"list": _list, "show": _show, "annotate": _annotate, "edit": _edit, "discard": _discard}[chosen.action]
    return action(admin, terminal, chosen)


def which(chosen: argparse.Namespace) -> dict[str, str]:
    """The filter that was given."""
    return {name: value for name in WHICH if (value := getattr(chosen, name)) is not None}


def many(chosen: argparse.Namespace) -> bool:
    """All that fit a filter are meant."""
    return bool(which(chosen)) or chosen.all


def change_many(
    admin: Admin, terminal: Terminal, chosen: argparse.Namespace, path: str, change: dict[str, Any], verb: str
) -> int:
    module = importlib.import_module("sidecar.cli.dlq_bulk")
    done: int = module.change(admin, terminal, chosen, path, change, verb)
    return done


def path_of(dlq_id: str) -> str:
    return f"/dlq/{quote(dlq_id, safe='')}"


# ---- list --------------------------------------------------------------------------------------------------------


def _list(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    found = listed(admin, "/dlq", chosen.limit, _LARGEST_PAGE, **which(chosen))
    if not found.items:
        must_be_upstreams(admin, chosen.upstream)
    if chosen.json:
        terminal.line(json.dumps(found.as_json(), indent=2))
    elif not found.items:
        terminal.line("No such dead letters." if which(chosen) else "No dead letters are kept here.")
    else:
        tell(terminal, found, _COLUMNS, list(map(_row, found.items)))
    return 0


def _row(letter: Letter) -> Sequence[Cell]:
    status = letter["status"] + (" (escalated)" if letter["escalated"] else "")
    return (
        when(letter["created_at"]),
        Cell(letter["dlq_id"], None, letter["dlq_id"].rpartition("_")[2]),
        Cell(letter["upstream"]),
        Cell(f"{letter['method']} {letter['url']}"),
        Cell(letter["error_class"]),
        Cell(letter["verdict"], _VERDICTS.get(letter["verdict"], "yellow")),
        Cell(status, _STATUSES.get(letter["status"])),
        Cell(str(letter["occurrences"])),
    )


def time_of(timestamp: str | None) -> str:
    return "-" if timestamp is None else f"{timestamp[5:10]} {timestamp[11:19]}"


# ---- show --------------------------------------------------------------------------------------------------------


def _show(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    if chosen.body or chosen.response:
        return _reveal(admin, chosen)
    _tell(terminal, admin.get(path_of(chosen.id)), chosen)
    return 0


def _reveal(admin: Admin, chosen: argparse.Namespace) -> int:
    """Bytes as they are; what a terminal makes of them is what whoever asked wants to see."""
    if not (chosen.reason or "").strip():
        raise Failed("--body and --response need --reason: reading what is sealed is written down", 2)
    part = "body" if chosen.body else "response"
    order = {"part": part, "reason": chosen.reason}
    data = admin.post_for_bytes(f"{path_of(chosen.id)}/reveal", order, patience=_LONGEST_BODY)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return 0


def _tell(terminal: Terminal, letter: Letter, chosen: argparse.Namespace) -> None:
    if chosen.json:
        terminal.line(json.dumps(letter, indent=2))
        return
    terminal.line(terminal.paint(printable(f"{letter['method']} {letter['url']}"), "bold"))
    for label, text in _facts(letter):
        for number, line in enumerate(terminal.wrapped(f"{label:<{_LABEL}}{printable(text)}", _LABEL)):
            head = terminal.paint(line[:_LABEL], "dim") if number == 0 else line[:_LABEL]
            terminal.line(head + line[_LABEL:])


def _facts(letter: Letter) -> Iterator[tuple[str, str]]:
    yield "id", letter["dlq_id"]
    escalated = ", escalated" if letter["escalated"] else ""
    yield "status", f"{letter['status']}, in {letter['state']}{escalated}"
    yield "verdict", f"{letter['verdict']}: {letter['sentence']}"
    details = letter["error_details"]
    yield "failed", f"{letter['error_class']} ({letter['category']}): {details['error_message']}"
    times = f"first {_moment(letter['first_failure_at'])}, last {_moment(letter['last_failure_at'])}"
    yield "when", f"{times}, seen {_number(letter['occurrences'], 'time')}, {_number(letter['replays'], 'replay')}"
    stage = f", stage {letter['stage']}" if letter["stage"] else ""
    workflow = f", workflow {letter['workflow']}" if letter["workflow"] else ""
    yield "upstream", f"{letter['upstream']} at {letter['host']}, operation {letter['operation_type']}{stage}{workflow}"
    session = letter["sanitized_context"].get("request_id")
    if session:
        yield "session", f"{session}: sidecar explain {session}"
    body = letter["body"]
    yield "body", f"{body['size']} bytes, kept" if body["kept"] else body["note"]
    readable = ", ".join(f"{name}: {value}" for name, value in letter["headers"])
    yield "headers", "; sealed: ".join(part for part in (readable, ", ".join(letter["sealed_headers"])) if part) or "-"
    if letter["response"] is not None:
        yield "last answer", f"{letter['response'].get('status')}"
    if letter["edited"]:
        yield "edited", "yes; the original is kept"
    if letter["remediation"] is not None:
        fixed = letter["remediation"]
        ticket = f" ({fixed['ticket']})" if fixed["ticket"] else ""
        yield "remediation", f"{fixed['kind']}{ticket}: {fixed['evidence']}, by {fixed['by']} at {fixed['at']}"
    for number, note in enumerate(letter["notes"]):
        yield "notes" if number == 0 else "", f"{note['at']} {note['by']}: {note['text']}"
    for number, event in enumerate(letter["history"]):
        yield "history" if number == 0 else "", _event(event)
    for number, step in enumerate(next_steps(letter)):
        yield "next" if number == 0 else "", step


def _moment(timestamp: str) -> str:
    """With how long ago that is."""
    return f"{timestamp} ({ago(timestamp)})"


def _event(event: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {_words(value)}" for name, value in event.items() if name not in ("at", "event"))
    return f"{event['at']} {event['event'].replace('_', ' ')}{f' ({facts})' if facts else ''}"


def _words(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def next_steps(letter: Letter) -> list[str]:
    """What can be done now, as commands."""
    dlq_id, status, state, replay = letter["dlq_id"], letter["status"], letter["state"], letter["replay"]
    annotate = f"sidecar dlq annotate {dlq_id}"
    if status == "completed" and state == "replayed":
        return [f"see whether it arrived, then {annotate} --state verified --note TEXT"]
    if state == "verified":
        return [f"{annotate} --state closed --note TEXT"]
    if status not in ("pending", "failed"):
        return []
    if replay["allowed"]:
        return [f"sidecar dlq replay {dlq_id}"]
    steps = [f"not replayed as it is: {replay['why_not']}"]
    if "remediation" in (replay["what_to_do"] or ""):
        steps.append(f"{annotate} --kind {{transient,data,auth_config,code_defect}} --evidence TEXT")
    if "force" in (replay["what_to_do"] or ""):
        steps.append(f"sidecar dlq replay {dlq_id} --force --reason TEXT")
    return [*steps, f"sidecar dlq discard {dlq_id} --reason TEXT"]


# ---- changes -----------------------------------------------------------------------------------------------------


def _annotate(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    if (chosen.id is None) == (not many(chosen)):
        raise Failed("say which: either one ID, or a filter as in --upstream NAME, or --all", 2)
    change: dict[str, Any] = {}
    if chosen.note is not None:
        change["notes"] = chosen.note
    if chosen.state is not None:
        change["state"] = chosen.state
    if (chosen.kind is None) != (chosen.evidence is None) or (chosen.ticket is not None and chosen.kind is None):
        raise Failed("a remediation needs both --kind and --evidence; --ticket goes with them", 2)
    if chosen.kind is not None:
        given = {"kind": chosen.kind, "evidence": chosen.evidence, "ticket": chosen.ticket or ""}
        change["remediation"] = given
    if not change:
        raise Failed("say what to note: --note, --kind with --evidence, or --state", 2)
    if chosen.id is None:
        if "state" in change:
            raise Failed("--state is a step of one dead letter: give its ID", 2)
        return change_many(admin, terminal, chosen, "/dlq/annotate", change, "Annotate")
    _tell(terminal, admin.patch(path_of(chosen.id), change), chosen)
    return 0


def _edit(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    edit: dict[str, Any] = {} if chosen.url is None else {"url": chosen.url}
    headers: dict[str, str | None] = dict.fromkeys(chosen.drop_header)
    for field in chosen.header:
        name, colon, value = field.partition(":")
        if not colon:
            raise Failed(f"--header {field!r}: write it as NAME: VALUE", 2)
        headers[name.strip()] = value.strip()
    if headers:
        edit["headers"] = headers
    if chosen.body is not None:
        try:
            edit["body_base64"] = base64.b64encode(chosen.body.read_bytes()).decode()
        except OSError as error:
            raise Failed(f"--body {chosen.body}: cannot be read: {error.strerror}", 2) from None
    if not edit:
        raise Failed("say what to correct: --url, --header, --drop-header or --body", 2)
    change = {"edit": edit, **({} if chosen.note is None else {"notes": chosen.note})}
    _tell(terminal, admin.patch(path_of(chosen.id), change), chosen)
    return 0


def _discard(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    if bool(chosen.ids) == many(chosen):
        raise Failed("say which: either IDs, or a filter as in --upstream NAME, or --all", 2)
    if not chosen.ids:
        return change_many(admin, terminal, chosen, "/dlq/discard", {"reason": chosen.reason}, "Discard")
    done = []
    for dlq_id in chosen.ids:
        done.append(admin.delete(path_of(dlq_id), reason=chosen.reason))
        if not chosen.json:
            terminal.line(f"{dlq_id} is discarded: it stays to be looked at and is never sent.")
    if chosen.json:
        terminal.line(json.dumps({"items": done, "next_cursor": None}, indent=2))
    return 0

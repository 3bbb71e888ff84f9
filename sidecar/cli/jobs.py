"""`sidecar jobs`: what the outbox delivers, and what somebody has to decide."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.parse import quote

from sidecar.cli.admin import Admin, Failed, connect, telling_failures
from sidecar.cli.dlq import time_of
from sidecar.cli.listing import listed, tell, whole_id
from sidecar.cli.table import Cell, Column, Table, when
from sidecar.cli.terminal import Terminal, printable

_LARGEST_PAGE = 500
_COLOURS = {"succeeded": "green", "sent": "green", "failed": "red", "unknown": "yellow", "retryable_failed": "yellow"}
_JOBS = (
    Column("CREATED (UTC)", importance=3, brief="CREATED"),
    Column("JOB", brief="JOB"),
    Column("SUBJECT", flexible=True, importance=1),
    Column("VERSION", importance=1, right=True),
    Column("UPSTREAM", flexible=True, importance=2),
    Column("REQUEST", flexible=True, importance=4, request=True),
    Column("STATE"),
    Column("FINISHED (UTC)", importance=1),
)
_DELIVERIES = (
    Column("DELIVERY", right=True),
    Column("RECIPIENT", flexible=True, importance=3),
    Column("UPSTREAM", flexible=True, importance=2),
    Column("REQUEST", flexible=True, importance=3, request=True),
    Column("STATE"),
    Column("TRIES", importance=1, right=True),
    Column("NEXT (UTC)", importance=1),
    Column("LAST ERROR OR ID", flexible=True, importance=4),
)


@telling_failures
def jobs(chosen: argparse.Namespace) -> int:
    admin, terminal = connect(chosen, os.environ), Terminal()
    if getattr(chosen, "id", None) is not None:
        chosen.id = whole_id(admin, "job", chosen.id)
    if chosen.action == "show":
        _tell(terminal, admin.get(_path(chosen.id)), as_json=chosen.json)
    elif chosen.action == "result":
        _show_results(terminal, admin.get(f"{_path(chosen.id)}/result"), as_json=chosen.json)
    elif chosen.action == "resolve":
        delivery = _undecided(admin, chosen.id) if chosen.delivery is None else chosen.delivery
        found = {"delivery": delivery, "delivered": chosen.delivered, "reason": chosen.reason}
        if chosen.notification_id is not None:
            found["notification_id"] = chosen.notification_id
        _tell(terminal, admin.post(f"{_path(chosen.id)}/resolve", found), as_json=chosen.json)
    else:
        _list(admin, terminal, chosen)
    return 0


def _undecided(admin: Admin, job_id: str) -> int:
    """The only delivery of the job that waits for a decision."""
    states = {int(one["delivery_id"]): one["state"] for one in admin.get(_path(job_id))["deliveries"]}
    unknown = [number for number, state in states.items() if state == "unknown"]
    if len(unknown) == 1:
        return unknown[0]
    told = ", ".join(f"{number} is {state}" for number, state in states.items())
    raise Failed(f"say which delivery of {job_id}: {told}")


def _path(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"


def _request(one: dict[str, Any]) -> str:
    return f"{one['method']} {one['url']}"


def _unanswered(delivery: dict[str, Any]) -> str:
    """The provider may have told of it when it was asked, or an earlier release delivered it."""
    return "what the provider answered was not kept" if delivery["state"] == "sent" else "the provider has not answered"


def _show_results(terminal: Terminal, found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.line(json.dumps(found, indent=2))
        return
    for one in found["results"]:
        answer = one["answer"]
        told = f"delivery {one['delivery_id']} is {one['state']}; "
        if answer is None:
            terminal.line(told + printable(one.get("problem") or _unanswered(one)))
            continue
        terminal.line(terminal.paint(told + f"the provider answered {answer['status']}", "bold"))
        for name, value in answer["headers"]:
            terminal.line(printable(f"{name}: {value}"))
        terminal.line("")
        body = answer.get("body")
        for line in (f"({answer['body_bytes']} bytes, not text)" if body is None else body).splitlines():
            terminal.line(printable(line))
        if not answer["complete"]:
            terminal.line(f"({answer['body_bytes']} bytes in all; `outbox.max_response_bytes` says how many are kept)")


def _list(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> None:
    found = listed(admin, "/jobs", chosen.limit, _LARGEST_PAGE, state=chosen.state, since=chosen.since)
    if chosen.json:
        terminal.line(json.dumps(found.as_json(), indent=2))
    elif not found.items:
        terminal.line("No such jobs." if chosen.state or chosen.since else "No jobs: nothing has been handed in.")
    else:
        rows = [
            (
                when(job["created_at"]),
                Cell(job["job_id"], None, job["job_id"][:12]),
                Cell(job["subject"]),
                Cell(str(job["version"])),
                Cell(job["upstream"]),
                Cell(_request(job) + (f" +{job['delivery_count'] - 1}" if job["delivery_count"] > 1 else "")),
                Cell(job["state"], _COLOURS.get(job["state"])),
                Cell(time_of(job["finished_at"])),
            )
            for job in found.items
        ]
        tell(terminal, found, _JOBS, rows)


def _tell(terminal: Terminal, job: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.line(json.dumps(job, indent=2))
        return
    told = f"{job['job_id']} about {job['subject']}, version {job['version']}, is {job['state']}"
    terminal.line(terminal.paint(printable(told), "bold"))
    rows = [
        (
            Cell(str(one["delivery_id"])),
            Cell(one["recipient"]),
            Cell(one["upstream"]),
            Cell(_request(one)),
            Cell(one["state"], _COLOURS.get(one["state"])),
            Cell(str(one["attempts"])),
            Cell(time_of(one["next_at"])),
            Cell(one["notification_id"] or one["last_error"] or "-"),
        )
        for one in job["deliveries"]
    ]
    table = Table(terminal, _DELIVERIES, rows)
    table.head()
    table.show(rows)
    for one in job["deliveries"]:
        if one["state"] == "unknown":
            resolve = f"sidecar jobs resolve {job['job_id']} {one['delivery_id']}"
            terminal.line(f"Look at the provider, then: {resolve} --delivered|--not-delivered --reason TEXT")

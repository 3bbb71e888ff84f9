"""The words for what is kept on disk: `sidecar dlq`, `jobs`, `keys`, `backup`, `restore`.

Law: as in parser.py, which puts them in: nothing but argparse is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Talking = Callable[..., None]

_DURATIONS = "90s, 15m, 2h"
_ID = "a dead letter: from `sidecar dlq list`, or x-sidecar-dlq-id"
KINDS = ("transient", "data", "auth_config", "code_defect")


def add_dlq(commands: Any, talking: Talking) -> None:
    dlq = commands.add_parser(
        "dlq",
        help="requests that finally failed: look at them, fix what was wrong, send them again",
        description="Dead letters: requests that finally failed and are kept until somebody has dealt with them.",
        epilog="The way of one: list, show, annotate --kind --evidence, replay --dry-run, replay, annotate --state.",
    )
    actions = dlq.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_list(actions, talking)
    _add_groups(actions, talking)
    _add_show(actions, talking)
    _add_annotate(actions, talking)
    _add_edit(actions, talking)
    _add_replay(actions, talking)
    _add_replays(actions, talking)
    _add_discard(actions, talking)
    _add_files(actions, talking)
    _add_verify(actions, talking)


def _action(actions: Any, name: str, text: str, more: str = "") -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.{' ' if more else ''}{more}"
    )
    return made


def _add_which(command: argparse.ArgumentParser) -> None:
    which = command.add_argument_group("which", "Several words in one option, separated by commas, mean any of them.")
    which.add_argument("--status", metavar="WORDS", help="pending, replaying, completed, failed, discarded")
    which.add_argument("--upstream", metavar="NAMES", help="only those of these upstreams")
    which.add_argument(
        "--error-class", "--code", metavar="CODES", help="only those that failed so, as in NETWORK_TIMEOUT"
    )
    which.add_argument("--verdict", metavar="WORDS", help="only those with this verdict, as in safe or unsafe")
    which.add_argument("--since", metavar="WHEN", help=f"kept since: {_DURATIONS} ago, or 2026-01-29T12:00:00Z")
    which.add_argument("--until", metavar="WHEN", help="kept before")
    which.add_argument("--q", metavar="TEXT", help="with these words in operation, message, ids or notes; charg* too")
    which.add_argument("--workflow", metavar="ID", help="only those of this workflow")


def _add_list(actions: Any, talking: Talking) -> None:
    command = _action(actions, "list", "list dead letters, newest first")
    _add_which(command)
    command.add_argument("--limit", type=_count, default=20, metavar="N", help="at most so many (default: 20)")
    talking(command)


def _add_groups(actions: Any, talking: Talking) -> None:
    command = _action(actions, "groups", "count them by what they have in common, the largest group first")
    command.add_argument(
        "--by",
        default="error_class,upstream",
        metavar="WORDS",
        help="error_class, upstream, verdict, status, stage, operation (default: error_class,upstream)",
    )
    _add_which(command)
    talking(command)


def _add_many(command: argparse.ArgumentParser) -> None:
    """For what is done to all that fit a filter."""
    _add_which(command)
    command.add_argument("--all", action="store_true", help="every one, where no filter says otherwise")
    command.add_argument("--dry-run", action="store_true", help="only show how many that are")
    command.add_argument("--yes", action="store_true", help="do not ask")


def _add_show(actions: Any, talking: Talking) -> None:
    command = _action(actions, "show", "show one: why it failed, whether it may be sent again, what to do next")
    command.add_argument("id", metavar="ID", help=_ID)
    part = command.add_mutually_exclusive_group()
    part.add_argument(
        "--body", action="store_true", help="write the body of its request to standard output; needs --reason"
    )
    part.add_argument(
        "--response", action="store_true", help="write what is kept of the last answer's body; needs --reason"
    )
    command.add_argument("--reason", metavar="TEXT", help="why it is looked at: reading it is written down")
    talking(command)


def _add_annotate(actions: Any, talking: Talking) -> None:
    command = _action(
        actions,
        "annotate",
        "note what was found and fixed, and take the next step of the workflow",
        "CRITICAL classes need --kind and --evidence before they are replayed. With a filter instead of an ID the same "
        "is noted on all that fit it.",
    )
    command.add_argument("id", metavar="ID", nargs="?", help=_ID)
    _add_many(command)
    command.add_argument("--note", metavar="TEXT", help="something to remember")
    command.add_argument("--kind", choices=KINDS, help="what was wrong; needs --evidence")
    command.add_argument("--evidence", metavar="TEXT", help="what was fixed and where that can be seen")
    command.add_argument("--ticket", metavar="ID", help="where it is tracked; with --kind")
    command.add_argument(
        "--state",
        choices=("validated", "verified", "closed"),
        help="validated: nothing speaks against a replay; verified: its effect was seen; closed: done (needs --note)",
    )
    talking(command)


def _add_edit(actions: Any, talking: Talking) -> None:
    command = _action(
        actions,
        "edit",
        "correct the request before it is sent again",
        "The original is kept beside it, the destination stays, headers that are not named stay sealed as they are.",
    )
    command.add_argument("id", metavar="ID", help=_ID)
    command.add_argument("--url", metavar="URL", help="the whole url, on the same host")
    command.add_argument(
        "--header", action="append", default=[], metavar="NAME: VALUE", help="set this header (may be repeated)"
    )
    command.add_argument("--drop-header", action="append", default=[], metavar="NAME", help="leave this header out")
    command.add_argument("--body", type=Path, metavar="FILE", help="the whole body, from a file")
    command.add_argument("--note", metavar="TEXT", help="why")
    talking(command)


def _add_replay(actions: Any, talking: Talking) -> None:
    command = _action(
        actions,
        "replay",
        "send one again, or many by a filter",
        "Many: what would happen is shown first, then you are asked. Nothing that succeeded is ever sent again, and "
        "only what is safe goes out unless you use --force.",
    )
    command.add_argument("id", metavar="ID", nargs="?", help=_ID)
    _add_which(command)
    command.add_argument("--all", action="store_true", help="everything that waits")
    command.add_argument("--dry-run", action="store_true", help="only show what would happen")
    command.add_argument("--rate", type=float, metavar="N", help="replays per second (default: `replay.rate`)")
    command.add_argument("--no-ramp", action="store_true", help="not one first and then more and more")
    command.add_argument("--limit", type=_count, metavar="N", help="at most so many, the oldest")
    command.add_argument(
        "--stop-after",
        type=_count_or_none,
        metavar="N",
        help="pause after so many failures, until it is resumed (default: 10; 0: never)",
    )
    command.add_argument("--force", action="store_true", help="send what is not known to be safe; needs --reason")
    command.add_argument("--reason", metavar="TEXT", help="why, for whoever looks at it")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.add_argument("--no-wait", action="store_true", help="do not wait for the end")
    talking(command)


def _add_replays(actions: Any, talking: Talking) -> None:
    command = _action(actions, "replays", "list replays of many, follow one, pause, resume or cancel it")
    command.add_argument("id", metavar="ID", nargs="?", help="a replay, rpl_…: follow it to its end")
    command.add_argument(
        "--since", metavar="WHEN", help=f"of the list: begun since {_DURATIONS} ago, or 2026-01-29T12:00:00Z"
    )
    command.add_argument("--limit", type=_count, default=20, metavar="N", help="at most so many (default: 20)")
    command.add_argument("order", nargs="?", choices=("pause", "resume", "cancel"), help="what it is to do")
    command.add_argument("--reason", metavar="TEXT", help="why, for whoever looks at it")
    talking(command)


def _add_discard(actions: Any, talking: Talking) -> None:
    command = _action(actions, "discard", "mark them as never to be sent; they stay to be looked at")
    command.add_argument("ids", metavar="ID", nargs="*", help=_ID)
    _add_many(command)
    command.add_argument("--reason", metavar="TEXT", required=True, help="why, for whoever looks at it")
    talking(command)


def _add_files(actions: Any, talking: Talking) -> None:
    export = _action(
        actions,
        "export",
        "write dead letters to files, {operation}/{dlq_id}.json",
        "It goes through the admin port, so it works while the sidecar runs. Secrets stay sealed: the files are of use "
        "only to a sidecar with the same keys (state_dir/keys).",
    )
    export.add_argument("folder", type=Path, metavar="FOLDER", help="where to; made if it is not there")
    _add_which(export)
    talking(export)
    bring_in = _action(
        actions,
        "import",
        "take exported dead letters in",
        "It goes through the admin port, so it works while the sidecar runs. A file that was cut off or edited is "
        "refused with its line; what is there already stays as it is.",
    )
    bring_in.add_argument("folder", type=Path, metavar="FOLDER", help="what `sidecar dlq export` wrote")
    talking(bring_in)


def _add_verify(actions: Any, talking: Talking) -> None:
    command = _action(
        actions,
        "verify",
        "read and check everything that is kept: what is damaged, what is missing",
        "It also happens by itself every `dead_letter.verify_every` seconds. Exit code 1 if anything is wrong.",
    )
    command.add_argument(
        "--accept", action="store_true", help="what is missing has been looked into: stop saying so; needs --reason"
    )
    command.add_argument("--reason", metavar="TEXT", help="what was found out, for whoever looks at it")
    talking(command)


def add_jobs(commands: Any, talking: Talking) -> None:
    jobs = commands.add_parser(
        "jobs",
        help="what the outbox delivers; decide what it cannot know",
        description="Jobs of the outbox, newest first. The unknown ones wait for somebody to look at the provider.",
    )
    _add_job_filters(jobs)
    talking(jobs)
    actions = jobs.add_subparsers(dest="action", required=False, metavar="ACTION")
    listed = _action(actions, "list", "list jobs, newest first")
    _add_job_filters(listed, default=argparse.SUPPRESS)
    talking(listed, default=argparse.SUPPRESS)
    show = _action(actions, "show", "show one with its deliveries")
    show.add_argument("id", metavar="JOB", help="a job, job_…")
    talking(show, default=argparse.SUPPRESS)
    result = _action(actions, "result", "show what the provider answered last to each delivery of one")
    result.add_argument("id", metavar="JOB", help="a job, job_…")
    talking(result, default=argparse.SUPPRESS)
    resolve = _action(actions, "resolve", "say whether the provider has a delivery whose fate is unknown")
    resolve.add_argument("id", metavar="JOB", help="a job, job_…")
    resolve.add_argument(
        "delivery", metavar="DELIVERY", type=_count, nargs="?",
        help="its number, from `sidecar jobs show` (default: the one that is unknown)",
    )  # fmt: skip
    found = resolve.add_mutually_exclusive_group(required=True)
    found.add_argument("--delivered", action="store_true", help="the provider has it")
    found.add_argument("--not-delivered", action="store_true", help="it has not, send it again")
    resolve.add_argument("--notification-id", metavar="ID", help="the provider's own id of it")
    resolve.add_argument("--reason", metavar="TEXT", required=True, help="where you looked")
    talking(resolve, default=argparse.SUPPRESS)


def _add_job_filters(command: argparse.ArgumentParser, **options: Any) -> None:
    words = ("in_progress", "succeeded", "retryable_failed", "failed", "unknown")
    command.add_argument("--state", "--status", choices=words, help="only those in this state", **options)
    command.add_argument(
        "--since", metavar="WHEN", help=f"only those since: {_DURATIONS} ago, or 2026-01-29T12:00:00Z", **options
    )
    given = {"default": 20, **options}
    command.add_argument("--limit", type=_count, metavar="N", help="at most so many (default: 20)", **given)


def add_backups(commands: Any, config: Talking, as_json: Talking) -> None:
    backup = commands.add_parser(
        "backup",
        help="copy all that is kept into one file, also while the sidecar runs",
        description="Copy all that is kept in `state_dir` (dead letters, jobs, what was set at run time, the audit, "
        "keys) into one file, as of one moment, also while the sidecar runs. The keys are in it: keep it safe.",
    )
    backup.add_argument("file", type=Path, metavar="FILE", help="the file to write, only you can read it")
    backup.add_argument("--force", action="store_true", help="replace the file if it exists")
    restore = commands.add_parser(
        "restore",
        help="put back what `sidecar backup` has copied",
        description="Put back what `sidecar backup` has copied, while the sidecar does not run.",
    )
    restore.add_argument("file", type=Path, metavar="FILE", help="a file that `sidecar backup` has made")
    restore.add_argument("--force", action="store_true", help="set aside what is there, and replace it")
    for command in (backup, restore):
        command.add_argument(
            "--state-dir", type=Path, metavar="DIR", help="where it is kept (default: `state_dir` of the configuration)"
        )
        config(command)
        as_json(command)


def add_keys(commands: Any, talking: Talking) -> None:
    keys = commands.add_parser(
        "keys",
        help="the keys that secrets on disk are sealed with",
        description="Which keys seal what is kept, by id, and how to change them.",
    )
    talking(keys)
    actions = keys.add_subparsers(dest="action", required=False, metavar="ACTION")
    rotate = _action(
        actions, "rotate", "seal with a new key from now on, and everything older anew", "The sidecar goes on working."
    )
    rotate.add_argument("--reason", metavar="TEXT", help="why, for the log of changes")
    talking(rotate, default=argparse.SUPPRESS)


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000_000_000):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 1 up")
    return int(text)

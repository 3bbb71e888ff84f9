"""The words of the command line.

Law: nothing but argparse is loaded here, so that `sidecar version` and every mistake are instant. `COMMANDS` says
where each command is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sidecar.cli.parser_kept import add_backups, add_dlq, add_jobs, add_keys
from sidecar.cli.parser_live import add_interception, add_policies, add_reload, add_retries
from sidecar.cli.suggesting import SuggestingParser

COMMANDS = {
    "run": "sidecar.cli.running:run",
    "env": "sidecar.cli.env:env",
    "check": "sidecar.cli.checking:check",
    "schema": "sidecar.cli.schema:schema",
    "sessions": "sidecar.cli.sessions:sessions",
    "inflight": "sidecar.cli.inflight:inflight",
    "explain": "sidecar.cli.explaining:explain",
    "breakers": "sidecar.cli.breakers:breakers",
    "dlq": "sidecar.cli.dlq:dlq",
    "jobs": "sidecar.cli.jobs:jobs",
    "keys": "sidecar.cli.keys:keys",
    "policies": "sidecar.cli.policies:policies",
    "retries": "sidecar.cli.switching:retries",
    "interception": "sidecar.cli.interception:interception",
    "reload": "sidecar.cli.switching:reload",
    "audit": "sidecar.cli.audit:audit",
    "backup": "sidecar.cli.backup:backup",
    "restore": "sidecar.cli.backup:restore",
    "tokens": "sidecar.cli.tokens:tokens",
    "ca": "sidecar.cli.ca:ca",
    "password": "sidecar.cli.password:password",
    "health": "sidecar.cli.health:health",
    "top": "sidecar.cli.top:top",
    "completion": "sidecar.cli.completion:completion",
    "version": "sidecar.cli.version:version",
}
ORDERS = {
    "reset": "close it and forget what it saw",
    "force-open": "refuse every call until the time is up, or until reset",
    "force-close": "let every call through until the time is up, or until reset",
}
ROLES = ("read", "operate")
_DURATIONS = "90s, 15m, 2h"


def parser() -> argparse.ArgumentParser:
    top = SuggestingParser(
        prog="sidecar",
        description="A proxy beside your app: point HTTP_PROXY at it and see every outgoing call.",
        epilog="`sidecar COMMAND --help` tells more. Exit codes: 0 fine, 1 failed, 2 wrong use.",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_env(commands)
    _add_check(commands)
    commands.add_parser("schema", help="print the JSON Schema of the configuration file")
    _add_sessions(commands)
    _add_inflight(commands)
    _add_explain(commands)
    _add_breakers(commands)
    add_dlq(commands, _add_talking)
    add_jobs(commands, _add_talking)
    add_keys(commands, _add_talking)
    add_policies(commands, _add_talking)
    add_retries(commands, _add_talking)
    add_interception(commands, _add_talking, _count)
    add_reload(commands, _add_talking)
    _add_audit(commands)
    add_backups(commands, _add_config, _add_json)
    _add_tokens(commands)
    _add_ca(commands)
    password = commands.add_parser(
        "password",
        help="hash a password for listen.auth",
        description="Ask for a password, or read it from standard input, and print its hash for `listen.auth.users`.",
    )
    _add_json(password)
    _add_health(commands)
    _add_top(commands)
    completion = commands.add_parser(
        "completion",
        help="print a script that lets your shell complete this command line",
        description="Print a script that lets a shell complete this command line; its first line says how to use it.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    _add_json(commands.add_parser("version", help="print the version"))
    return top


class _Version(argparse.Action):
    """Known only once it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from sidecar import __version__

        print(f"sidecar {__version__}")
        parser.exit()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """What stands behind `--` is a program of its own: none of it is looked at."""
    given = sys.argv[1:] if arguments is None else arguments
    behind: list[str] | None = None
    if given[:1] == ["run"] and "--" in given:
        border = given.index("--")
        given, behind = given[:border], given[border + 1 :]
    chosen = parser().parse_args(given)
    chosen.behind = behind
    return chosen


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="start the proxy, alone or for one command",
        usage="sidecar run [-h] [-c FILE] [--intercept HOST] [--takeover] [-- CMD ...]",
        description="Start the proxy. With a command behind `--`: on free ports unless ports are configured, with "
        "every proxy and CA variable set for it; ends with it and returns its exit code.",
    )
    _add_config(run)
    run.add_argument(
        "--intercept",
        action="append",
        default=[],
        metavar="HOST",
        help="open HTTPS for this host, as `intercept: true` on its upstream does (may be repeated)",
    )
    run.add_argument(
        "--takeover",
        action="store_true",
        help="take the place of the sidecar that owns the same state_dir, without refusing a connection; start as "
        "usual if there is none",
    )


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env",
        help="print the proxy and CA variables for a shell",
        description='Print what an app needs in its environment: eval "$(sidecar env)".',
    )
    _add_config(env)
    _add_json(env)


def _add_ca(commands: Any) -> None:
    authority = commands.add_parser(
        "ca",
        help="show, export or replace the local certificate authority",
        description="The authority whose certificates intercepted apps are shown; it is kept in state_dir.",
    )
    actions = authority.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what it is called, which hosts it is for, until when")
    _add_config(show)
    _add_json(show)
    export = actions.add_parser("export", help="its certificate, for those who have to trust it")
    _add_config(export)
    _add_json(export)
    export.add_argument("--bundle", action="store_true", help="together with the roots that apps trust on this machine")
    export.add_argument("file", nargs="?", type=Path, metavar="FILE", help="where to (default: standard output)")
    rotate = actions.add_parser("rotate", help="another one with another key; apps have to trust it anew")
    _add_config(rotate)
    _add_json(rotate)


def _add_config(command: argparse.ArgumentParser, **options: Any) -> None:
    command.add_argument(
        "-c", "--config", type=Path, metavar="FILE", help="YAML file (default: $SIDECAR_CONFIG, else none)", **options
    )


def _add_admin(command: argparse.ArgumentParser, **options: Any) -> None:
    command.add_argument(
        "--admin",
        metavar="URL",
        help="where its admin port is (default: $SIDECAR_ADMIN, else the configuration's, else http://127.0.0.1:4141)",
        **options,
    )


def _add_talking(command: argparse.ArgumentParser, **options: Any) -> None:
    """For commands that ask a running sidecar."""
    _add_admin(command, **options)
    command.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with your token for its admin port (default: the token in $SIDECAR_ADMIN_TOKEN, else none)",
        **options,
    )
    command.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM file with the authority to trust for an https admin port (default: those of this machine)",
        **options,
    )
    _add_config(command, **options)
    _add_json(command, **options)


def _add_json(command: argparse.ArgumentParser, **options: Any) -> None:
    command.add_argument("--json", action="store_true", help="answer in JSON, for programs", **options)


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="explain what is wrong with a configuration, or where a host leads",
        description="Explain what is wrong with a configuration. With --host: which upstream a host belongs to, where "
        "its requests go, under which policy, and why; of one that is intercepted also whom the running sidecar lets "
        "through unopened now.",
    )
    check.add_argument("--host", metavar="HOST", help="a host, host:port or url: what happens to requests for it")
    _add_talking(check)


_WAITS = (
    *("routing", "max_in_flight", "rate_limit_gate", "store", "connection", "upload", "answer", "backoff"),
    *("streaming", "tunnel"),
)


def _add_inflight(commands: Any) -> None:
    inflight = commands.add_parser(
        "inflight",
        help="requests that have not ended: what each waits for, and since when",
        description="Requests that have not ended, the oldest first: what each waits for, and since when.",
    )
    inflight.add_argument("--upstream", metavar="NAME", help="only those to this upstream")
    inflight.add_argument("--waits-for", choices=_WAITS, help="only those that wait for this")
    inflight.add_argument("--limit", type=_count, default=100, metavar="N", help="at most so many (default: 100)")
    _add_talking(inflight)


def _add_sessions(commands: Any) -> None:
    sessions = commands.add_parser(
        "sessions",
        help="list requests that were retried, failed, refused or slow",
        description="List requests worth looking at, newest first. `sidecar explain ID` tells the story of one.",
    )
    sessions.add_argument("--outcome", metavar="WORD", help="only those that ended so, as in recovered or exhausted")
    sessions.add_argument("--upstream", metavar="NAME", help="only those of this upstream")
    sessions.add_argument(
        "--code", "--error-class", metavar="CODE", help="only those with this error code, as in NETWORK_TIMEOUT"
    )
    sessions.add_argument("--trace", metavar="ID", help="only those of this trace: 32 hex digits")
    sessions.add_argument(
        "--since", metavar="WHEN", help=f"only those since: {_DURATIONS} ago, or 2026-01-29T12:00:00Z"
    )
    sessions.add_argument("--limit", type=_count, default=20, metavar="N", help="at most so many (default: 20)")
    sessions.add_argument("--earlier", action="store_true", help="those of earlier runs, from the disk")
    sessions.add_argument("-f", "--follow", action="store_true", help="go on with new ones until interrupted")
    _add_talking(sessions)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="tell what happened to one request, step by step, and why",
        description="Tell what happened to one request, step by step: which rule decided, what would have changed it.",
    )
    explain.add_argument(
        "id",
        metavar="ID",
        nargs="?",
        help="a session id, or four characters of its beginning or more: from `sidecar sessions`, or x-sidecar-session",
    )
    explain.add_argument("--last", action="store_true", help="the newest request that is known")
    explain.add_argument("--upstream", metavar="NAME", help="with --last: the newest of this upstream")
    explain.add_argument("--trace", metavar="ID", help="all requests of a trace: its 32 hex digits, or a traceparent")
    _add_talking(explain)


def _add_breakers(commands: Any) -> None:
    breakers = commands.add_parser(
        "breakers",
        help="show circuit breakers, reset them, or hold them open or closed",
        description="Show the circuit breakers and their last changes. With an order: give it to those of an upstream.",
    )
    _add_talking(breakers)
    orders = breakers.add_subparsers(dest="order", required=False, metavar="ORDER")
    for name, text in ORDERS.items():
        order = orders.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        order.add_argument("upstream", metavar="UPSTREAM", help="the name of an upstream, or host:port")
        order.add_argument("--endpoint", metavar="HOST:PORT", help="one endpoint only (default: all of the upstream)")
        if name != "reset":
            order.add_argument("--ttl", metavar="TIME", help=f"for how long: {_DURATIONS} (default: until reset)")
        order.add_argument("--reason", metavar="TEXT", help="why, for whoever looks at it")
        _add_talking(order, default=argparse.SUPPRESS)


def _add_tokens(commands: Any) -> None:
    tokens = commands.add_parser(
        "tokens",
        help="make, list or revoke the tokens that open the admin port",
        description="Make, list or revoke the tokens that open the admin port. A running sidecar notices at once.",
    )
    actions = tokens.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new",
        help="add a token and print it, this once",
        description="Add a token to the file and print it, this once: the file keeps only its digest.",
    )
    revoke = actions.add_parser("revoke", help="take a token out", description="Take a token out of the file.")
    listing = actions.add_parser("list", help="who has a token", description="Who has a token, and its role.")
    for action in (new, revoke):
        action.add_argument("name", metavar="NAME", help="whose it is; the audit calls them so")
    new.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the token to a new FILE that only you can read, instead of printing it",
    )
    new.add_argument(
        "--role", choices=ROLES, default="read", help="read may only look, operate may change (default: read)"
    )
    for action in (new, revoke, listing):
        action.add_argument(
            "--file",
            type=Path,
            metavar="FILE",
            help="the file of tokens (default: the configuration's admin.token_file)",
        )
        _add_config(action)
        _add_json(action)


def _add_health(commands: Any) -> None:
    health = commands.add_parser(
        "health",
        help="whether the sidecar is ready: exit code 0, or 1 and why not",
        description="Whether the sidecar on this machine is ready, for the health check of a container: exit code 0, "
        "or 1 and why not. Asks `probes` if there is such a listener, else the admin port.",
    )
    _add_admin(health)
    _add_config(health)
    _add_json(health)


def _add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="watch it live: upstreams, rates, retries, breakers, dead letters, events",
        description="Watch a sidecar live, once a second, until q or Ctrl-C: upstreams with their rates, retries, "
        "breakers and dead letters, and the last events.",
    )
    top.add_argument("--once", action="store_true", help="show it once, as plain text, and end (--json: as JSON)")
    _add_talking(top)


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser(
        "audit",
        help="show who changed what",
        description="Show who changed what, when, from where and why, newest first. --json shows all of each change.",
    )
    audit.add_argument("--since", metavar="WHEN", help=f"only those since: {_DURATIONS} ago, or 2026-01-29T12:00:00Z")
    audit.add_argument("--until", metavar="WHEN", help="only those until then")
    audit.add_argument("--who", metavar="NAME", help="only those of this token, or of local, signal or file")
    audit.add_argument("--what", metavar="TEXT", help="only those with this in what was done, as in force-open")
    audit.add_argument("--about", metavar="TEXT", help="only those about a thing with this in its name")
    audit.add_argument("--limit", type=_count, default=20, metavar="N", help="at most so many (default: 20)")
    _add_talking(audit)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 10_000):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 1 to 10000")
    return int(text)

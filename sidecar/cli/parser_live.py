"""The words for what is in force: `sidecar policies`, `sidecar retries`, `sidecar interception`,
`sidecar reload`.

Law: as in parser.py, which puts them in: nothing but argparse is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Talking = Callable[..., None]


def add_policies(commands: Any, talking: Talking) -> None:
    policies = commands.add_parser(
        "policies",
        help="show retry policies; change one at run time, and take that back",
        description="Show the retry policies and who uses them. What is set here lies over the file and outlives a "
        "restart, until it is removed.",
    )
    talking(policies)
    orders = policies.add_subparsers(dest="order", required=False, metavar="ORDER")
    given = orders.add_parser(
        "set",
        help="change some keys of a policy, or make one",
        description="Change some keys of a policy, or make one. The others stay as they are.",
    )
    given.add_argument("name", metavar="POLICY")
    given.add_argument("changes", metavar="KEY=VALUE", nargs="+", help="as in max_attempts=2 base_delay=0.5")
    given.add_argument(
        *("--for", "--ttl"),
        dest="ttl",
        metavar="TIME",
        help="for how long: 90s, 10m, 2h; then it is taken back by itself (default: until it is removed)",
    )
    remove = orders.add_parser(
        "remove",
        help="take back what was set at run time",
        description="Take back what was set at run time; the policy of the file is in force again.",
    )
    remove.add_argument("name", metavar="POLICY")
    for order in (given, remove):
        order.add_argument("--reason", metavar="TEXT", help="why, for the audit")
        talking(order, default=argparse.SUPPRESS)


def add_retries(commands: Any, talking: Talking) -> None:
    retries = commands.add_parser(
        "retries",
        help="the kill switch: whether anything is ever sent a second time",
        description="Show the switch for all retries, or turn it. It takes effect at once and outlives a restart.",
    )
    retries.add_argument("order", choices=("enable", "disable"), nargs="?", help="what to do (default: show it)")
    retries.add_argument(
        *("--for", "--ttl"),
        dest="ttl",
        metavar="TIME",
        help="for how long: 90s, 10m, 2h; then it is as the file says again (default: until it is switched back)",
    )
    retries.add_argument("--reason", metavar="TEXT", help="why, for the audit")
    talking(retries)


def add_interception(commands: Any, talking: Talking, count: Callable[[str], int]) -> None:
    interception = commands.add_parser(
        "interception",
        help="show which clients are let through unopened, and open them again",
        description="Clients that refused our certificate: their calls to an intercepted host pass as a tunnel for a "
        "while, unseen.",
    )
    orders = interception.add_subparsers(dest="order", required=True, metavar="ORDER")
    listing = orders.add_parser(
        "list", help="who is let through now, since when and why", description="Who is let through now, and why."
    )
    listing.add_argument("--host", metavar="HOST", help="only those that call this host, or host:port")
    listing.add_argument("--limit", type=count, default=100, metavar="N", help="at most so many (default: 100)")
    clear = orders.add_parser(
        "clear",
        help="open their calls again, from the next one on",
        description="Open their calls again, from the next one on: after they were given the authority.",
    )
    clear.add_argument("which", metavar="HOST|ID", nargs="?", help="a host, host:port, or an id of the list")
    clear.add_argument("--all", action="store_true", help="all of them")
    clear.add_argument("--reason", metavar="TEXT", help="why, for the audit")
    for order in (listing, clear):
        talking(order)


def add_reload(commands: Any, talking: Talking) -> None:
    reload = commands.add_parser(
        "reload",
        help="read the configuration file again, now",
        description="Read the configuration file again and put it in force; a bad one changes nothing. A changed file "
        "is noticed without this, too.",
    )
    reload.add_argument("--reason", metavar="TEXT", help="why, for the audit")
    talking(reload)

"""The words for what is in force: `sidecar policies`, `sidecar retries`, `sidecar reload`.

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


def add_reload(commands: Any, talking: Talking) -> None:
    reload = commands.add_parser(
        "reload",
        help="read the configuration file again, now",
        description="Read the configuration file again and put it in force; a bad one changes nothing. A changed file "
        "is noticed without this, too.",
    )
    reload.add_argument("--reason", metavar="TEXT", help="why, for the audit")
    talking(reload)

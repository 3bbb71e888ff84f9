"""What the keys of `sidecar top` do: order, filter, selection, and which page is shown.

Law: pure; a key changes the view and nothing else. What has to be asked for is said as a wish, which whoever can ask
fulfils.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sidecar.cli.snapshot import UpstreamSeen

ORDERS: dict[str, Callable[[UpstreamSeen], tuple[float, str]]] = {
    "requests": lambda one: (-(one.requests or 0.0), one.name),
    "errors": lambda one: (-(one.errors or 0.0), one.name),
    "slowest": lambda one: (-(one.p99 or 0.0), one.name),
    "name": lambda one: (0.0, one.name),
}
URGENT = "urgent"
HELP = (
    ("s", "another order: urgent (open breakers, then errors), requests, errors, slowest, name"),
    ("/", "only upstreams and events with this text; Enter keeps it, Esc drops it"),
    ("up, down", "choose an upstream"),
    ("Enter", "explain the last failure of the chosen upstream, step by step"),
    ("?", "this help"),
    ("q", "end; on another page: back"),
)
_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|(?s:.)")  # one key, however many bytes a terminal makes of it
_LINES_AT_ONCE = 10


@dataclass
class View:
    """What is to be seen of a snapshot."""

    order: str = URGENT
    filter: str = ""
    typing: bool = False
    chosen: int = 0
    page: str = "main"
    """main, help or explanation."""
    text: list[str] = field(default_factory=list)
    """Of an explanation."""
    scrolled: int = 0
    wish: str | None = None
    """The session that is to be explained."""

    def upstreams(self, known: Sequence[UpstreamSeen]) -> list[UpstreamSeen]:
        """Those that are shown, in their order."""
        fitting = [one for one in known if self.filter.lower() in one.name.lower()]
        order = ORDERS.get(self.order)
        return fitting if order is None else sorted(fitting, key=order)

    def typed(self, keys: str, known: Sequence[UpstreamSeen]) -> bool:
        """Whether it goes on."""
        return all(self._one(key, self.upstreams(known)) for key in _KEY.findall(keys))

    def explained(self, text: list[str]) -> None:
        self.page, self.text, self.scrolled = "explanation", text, 0

    def _one(self, key: str, shown: Sequence[UpstreamSeen]) -> bool:
        if self.typing:
            self._filter(key)
        elif self.page != "main":
            return self._elsewhere(key)
        elif key in "qQ":
            return False
        elif key == "s":
            orders = [URGENT, *ORDERS]
            self.order = orders[(orders.index(self.order) + 1) % len(orders)]
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key == "?":
            self.page = "help"
        elif key == "\x1b":
            self.filter = ""
        elif key in _UP or key in _DOWN:
            step = -1 if key in _UP else 1
            self.chosen = min(max(0, self.chosen + step), max(0, len(shown) - 1))
        elif key in ("\r", "\n") and shown:
            self.wish = shown[min(self.chosen, len(shown) - 1)].last_session or ""
        return True

    def _filter(self, key: str) -> None:
        if key in ("\r", "\n"):
            self.typing = False
        elif key == "\x1b":
            self.typing, self.filter = False, ""
        elif key in ("\x7f", "\b"):
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter = (self.filter + key)[:60]
        self.chosen = 0

    def _elsewhere(self, key: str) -> bool:
        if key in _DOWN or key == " ":
            self.scrolled = min(self.scrolled + (_LINES_AT_ONCE if key == " " else 1), max(0, len(self.text) - 1))
        elif key in _UP:
            self.scrolled = max(0, self.scrolled - 1)
        elif key in "qQ?\x1b\r\n":
            self.page = "main"
        return True

"""`sidecar top`: a running sidecar, live.

Law: one thread asks, once a second, and one listens to the events; the screen only shows what they found, so a key is
heard at once whatever the network does. A sidecar that goes away is said so and waited for; one that was never there is
an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from time import sleep
from typing import Any

from sidecar.cli.admin import Admin, Failed, connect, telling_failures
from sidecar.cli.screen import Screen, whole_screen
from sidecar.cli.snapshot import Looking, Snapshot
from sidecar.cli.terminal import Terminal
from sidecar.cli.topkeys import View
from sidecar.cli.topview import frame

_EVERY = 1.0
_EVENTS_KEPT = 2_000
_EVENTS_ONCE = 1_000
_EVENTS_AS_JSON = 20
_ANY_EVENT = "evt_0_0"  # older than all: the stream begins with the oldest that is known
_PATIENCE = 10.0
_HEARTBEATS = 40.0


@telling_failures
def top(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    looking = Looking(admin)
    snapshot = looking.look()  # before the screen is taken, so that what is wrong can be told
    if chosen.once or chosen.json:
        return _once(admin, looking, as_json=chosen.json)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Failed("this is no terminal; `sidecar top --once` shows it once, --json as JSON", 2)
    terminal = Terminal()
    try:
        with whole_screen() as screen:
            _live(screen, _Watch(admin, looking, snapshot, screen), colour=terminal.colour)
    except KeyboardInterrupt:
        pass  # Ctrl-C is a way to end it
    return 0


def _once(admin: Admin, looking: Looking, *, as_json: bool) -> int:
    sleep(_EVERY)  # a rate takes two looks
    known = deque((event for _, event in admin.events(None, _PATIENCE, follow=False)), maxlen=_EVENTS_ONCE)
    snapshot = looking.look(tuple(reversed(known))[: _EVENTS_AS_JSON if as_json else None])
    terminal = Terminal()
    if as_json:
        terminal.line(json.dumps(snapshot.as_json(), indent=2))
        return 0
    for line in frame(snapshot, admin.url, _now(), width=terminal.width, height=None, colour=terminal.colour):
        terminal.line(line)
    return 0


class _Watch:
    """What is known, kept up to date by two threads that end with the process."""

    def __init__(self, admin: Admin, looking: Looking, snapshot: Snapshot, screen: Screen) -> None:
        self._admin = admin
        self._looking = looking
        self._screen = screen
        self.url = admin.url
        self.snapshot = snapshot
        self.trouble = ""
        self.events: deque[Mapping[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        for work in (self._look, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def explained(self, session_id: str) -> list[str]:
        """The story of a session, or why there is none."""
        if not session_id:
            return ["No request to this upstream has failed, as far as is known."]
        try:
            return self._admin.text(f"/sessions/{session_id}").splitlines()
        except Failed as failed:
            return str(failed).splitlines()

    def _look(self) -> None:
        while True:
            sleep(_EVERY)
            try:
                self.snapshot, self.trouble = self._looking.look(), ""
            except Failed as failed:
                self.trouble = f"{str(failed).splitlines()[0]}; trying again"
            self._screen.wake()

    def _listen(self) -> None:
        last = _ANY_EVENT
        while True:
            try:
                for event_id, event in self._admin.events(last, patience=_HEARTBEATS):
                    last = event_id
                    self.events.appendleft(event)
            except Failed:
                pass  # `_look` says so
            sleep(_EVERY)


def _live(screen: Screen, watch: _Watch, *, colour: bool) -> None:
    view = View()
    while True:
        width, height = screen.size()
        snapshot = replace(watch.snapshot, events=tuple(watch.events))
        screen.show(
            frame(
                snapshot,
                watch.url,
                _now(),
                width=width,
                height=height,
                colour=colour,
                trouble=watch.trouble,
                view=view,
            )
        )
        if not view.typed(screen.key(_EVERY), snapshot.upstreams):
            return
        if view.wish is not None:
            view.explained(watch.explained(view.wish))
            view.wish = None


def _now() -> float:
    return datetime.now(UTC).timestamp()

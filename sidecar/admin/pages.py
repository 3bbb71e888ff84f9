"""Pages of a list that lives in memory and changes while it is read.

Law: sorted by a key that does not move; a cursor is the key of the last item that was shown, so that what comes or
goes in between neither repeats nor hides another one. Traffic gets its turn while a long page is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sidecar import clock

Item = TypeVar("Item", bound=tuple[Any, ...])
Thing = TypeVar("Thing")
_BETWEEN = "|"
_SLICE = 20


def page_of(items: Iterable[Item], limit: int, cursor: str | None) -> tuple[list[Item], str | None, int | None]:
    """The items after the cursor, the cursor of the page that follows (None: there is none), and with the first page
    how many there are. The first element of an item is its key, a tuple of text without `|`."""
    ordered = sorted(items, key=lambda item: item[0])
    total = len(ordered) if cursor is None else None
    if cursor is not None:
        after = tuple(cursor.split(_BETWEEN))
        ordered = [item for item in ordered if item[0] > after]
    page = ordered[:limit]
    more = len(ordered) > limit
    return page, _BETWEEN.join(page[-1][0]) if more else None, total


async def in_slices(things: Iterable[Thing], show: Callable[[Thing], Any]) -> list[Any]:
    """Each of the things as it is shown."""
    shown = []
    for number, thing in enumerate(things, 1):
        shown.append(show(thing))
        if number % _SLICE == 0:
            await clock.sleep(0)
    return shown

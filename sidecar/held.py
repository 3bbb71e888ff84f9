"""How much memory is held for requests under way, and who gives some back when it is too much.

Law: three things are added up: request bodies, answers that wait for their app, and what waits to be written to disk.
Near `limits.memory_bytes` the largest bodies give up the copy that is kept for another attempt, as far as the upstream
has them; when that is not enough new bodies are not kept and less is read ahead; at the limit a new request with a body
is refused. A request without a body pays nothing and is always served. Bodies are counted as they come and go, the rest
is looked at twice a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.failures import Refused

if TYPE_CHECKING:
    from sidecar.body import RequestBody

_WORTH_IT = 16_384
"""Smaller bodies are not asked to give anything up."""


class Held:
    """One for the whole sidecar."""

    __slots__ = ("_again_at", "_large", "_most", "_near", "answers", "bodies", "given_up", "short", "unwritten")

    def __init__(self, most: int) -> None:
        self.bodies = 0
        self.answers = 0
        self.unwritten = 0
        self.given_up = 0
        """How many bodies have given up their copy."""
        self.short = False
        """Asking the large ones was not enough."""
        self._large: set[RequestBody] = set()
        self.most = most

    @property
    def most(self) -> int:
        return self._most

    @most.setter
    def most(self, most: int) -> None:
        self._most = most
        self._near = self._again_at = most - most // 8

    @property
    def all(self) -> int:
        return self.bodies + self.answers + self.unwritten

    def grow(self, body: RequestBody, size: int) -> None:
        self.bodies += size
        if body.kept >= _WORTH_IT:
            self._large.add(body)
        if self.bodies + self.answers + self.unwritten > self._again_at:
            self._relieve()

    def shrink(self, body: RequestBody, size: int) -> None:
        self.bodies -= size
        if body.kept < _WORTH_IT:
            self._large.discard(body)
        if self.short or self._again_at != self._near:
            self._look_again()

    def look(self, answers: Callable[[], int], unwritten: int) -> None:
        """Now and then: what is not counted as it comes."""
        self.answers, self.unwritten = answers(), unwritten
        self._look_again()
        if self.all > self._again_at:
            self._relieve()

    def refusal(self) -> Refused | None:
        """Whether there is room for another body."""
        if not self.short or self.all < self._most:
            return None
        told = f"{self._most} bytes of bodies and answers are held in memory already (limits.memory_bytes)"
        return Refused("OVERLOADED", told, reason="memory", retry_after=1)

    def _look_again(self) -> None:
        if self.all <= self._near:
            self.short, self._again_at = False, self._near

    def _relieve(self) -> None:
        """The largest first, until an eighth is free again."""
        enough = self._near - self._most // 8
        for body in sorted(self._large, key=_size, reverse=True):
            if self.all <= enough:
                break
            self.given_up += body.give_up()
        self.short = self.all > self._near
        # Not again with every byte: those who could have given something up have.
        self._again_at = max(self._near, self.all + self._most // 64) if self.short else self._near


def _size(body: RequestBody) -> int:
    return body.kept

"""How many replays go out at a time: one first, then twice as many after each batch that went well.

Law: pure. A canary that fails stops the climb before it begins; a failure later on halves the step.
"""

from __future__ import annotations


class Ramp:
    """`size` is the size of the next batch."""

    def __init__(self, most: int, *, careful: bool) -> None:
        self._most = most
        self._careful = careful
        self.size = 1 if careful else most
        self.canary = careful
        """True until the first batch has ended."""

    def ended(self, failures: int) -> bool:
        """After a batch. False: the canary failed, nothing more should go out."""
        if not self._careful:
            return True
        was_canary, self.canary = self.canary, False
        if failures == 0:
            self.size = min(self._most, self.size * 2)
            return True
        self.size = max(1, self.size // 2)
        if was_canary:
            self.canary = True  # whoever resumes begins with one again
        return not was_canary

"""What a contradiction between settings looks like, before anyone knows on which line it stands."""

from __future__ import annotations

from dataclasses import dataclass

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Settings that are valid each but not together."""

    path: KeyPath
    """The key to point at."""
    message: str
    derived_from: tuple[KeyPath, ...]
    """Every key that was looked at, the likeliest to blame first."""
    candidates: tuple[str, ...] = ()
    """Values that would have been right, for suggesting the nearest."""
    wrong_name: str | None = None
    """The name that is wrong when it is the key itself and not its value."""

    @property
    def key(self) -> str:
        return ".".join(str(part) for part in self.path)

"""Which form of an answer somebody asked for.

Law: the asker's order counts, then ours; whoever asks for nothing that there is gets the first form, because an
answer that can be read beats a 406.
"""

from __future__ import annotations

from collections.abc import Sequence

JSON = "application/json"
HTML = "text/html"
PLAIN = "text/plain"


def preferred(accept: str, offers: Sequence[str]) -> str:
    """The offer that suits an Accept field best."""
    wanted = [_range(part) for part in accept.split(",") if part.strip()]
    best, most = offers[0], 0.0
    for offer in offers:
        matching = [(len(kind), quality) for kind, quality in wanted if _matches(kind, offer)]
        quality = max(matching)[1] if matching else 0.0  # the most specific range says how much
        if quality > most:
            best, most = offer, quality
    return best


def _range(part: str) -> tuple[str, float]:
    kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return kind, min(1.0, max(0.0, float(value)))
            except ValueError:
                return kind, 0.0
    return kind, 1.0


def _matches(kind: str, offer: str) -> bool:
    return kind in (offer, "*/*") or (kind.endswith("/*") and offer.startswith(kind[:-1]))

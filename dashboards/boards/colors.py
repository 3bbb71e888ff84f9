"""A word has the same colour wherever it is drawn: good ones green and blue, neutral ones grey, bad ones warm.

Law: colours of words only; what the words are is decided in telemetry/record.py, and a test holds these against it.
"""

from __future__ import annotations

from dashboards.panel import GREEN, GREY, ORANGE, RED, YELLOW

OUTCOMES = {
    "first_try": GREEN,
    "recovered": "blue",
    "deduplicated": "super-light-blue",
    "queued": "light-blue",
    "tunnelled": "light-green",
    "rejected": GREY,
    "denied": "#b0b0b0",
    "cancelled": "#6e6e6e",
    "exhausted": RED,
    "not_retryable": ORANGE,
    "budget": "purple",
    "deadline": YELLOW,
    "breaker_open": "dark-red",
    "failed_streaming": "dark-orange",
    "internal": "#ff00ff",
}
FAILED_OUTCOMES = {word: OUTCOMES[word] for word in tuple(OUTCOMES)[8:]}
RESULTS = {"success": GREEN, "failure": RED}
ENDING_IN_RESULT = {"/ success$/": GREEN, "/ failure$/": RED}
REPLAYS = {"completed": GREEN, "failed": RED, "escalated": "dark-red", "discarded": GREY}

"""What the process does about memory, for the sake of speed and of its neighbours."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from sidecar import memory
from tests.e2e.process import REPOSITORY

_BURST = """
import sys
from sidecar import memory

quiet = sys.argv[1] == "quiet"
memory.keep_freed()
slack = memory.Slack(lambda: quiet, patience=5.0)
before = memory._resident()
burst, lives = [], []
for _ in range(1_000):
    burst.append(b"x" * 100_000)
    lives.append(bytes(1_000))  # between the pieces, so that no end of the heap is free
del burst
left = memory._resident() - before
slack.check(100.0)
early = memory._resident() - before
slack.check(106.0)
print(*(size // 1_000_000 for size in (left, early, memory._resident() - before)))
"""


class _NoLibc:
    def __init__(self, name: str) -> None:
        raise OSError(name)


def test_freed_memory_is_kept_up_to_sixteen_mebibytes_in_two_heaps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Libc:
        def mallopt(self, option: int, value: int) -> int:
            asked.append((option, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc())
    memory.keep_freed()
    assert [(-1, 16 * 1024 * 1024), (-3, 16 * 1024 * 1024), (-8, 2)] == asked


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", _NoLibc)
    memory.keep_freed()
    memory.give_back()
    assert 0 == memory._freed()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to give memory back")
def test_what_a_burst_left_is_given_back_after_a_while() -> None:
    left, early, late = _after_a_burst("quiet")
    assert left >= 90 and early >= 90, "the test shows nothing: the heap shrank by itself"
    assert late <= 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to give memory back")
def test_while_requests_are_under_way_nothing_is_given_back() -> None:
    left, _, late = _after_a_burst("busy")
    assert left >= 90 and late >= 90


def _after_a_burst(state: str) -> list[int]:
    """Megabytes that a process took more than before: at once, at the first look, and when its patience is over."""
    ended = subprocess.run(
        [sys.executable, "-c", _BURST, state], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    return [int(size) for size in ended.stdout.split()]

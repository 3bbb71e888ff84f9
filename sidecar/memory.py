"""What glibc does with freed memory: kept for the next large buffer, given back when nobody wanted it for a while.

Law: all of this is a matter of speed and size, never of function; another C library is left alone. Freed memory lies
between objects that live, so the heap seldom shrinks by itself: without `Slack` a burst of uploads would be seen in the
process for ever. Giving back takes a fifth of a millisecond per megabyte, in which nothing else happens, so it waits
for a moment without requests.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_16_MIB = 16 * 1024 * 1024
_HEAPS = 2  # one for the event loop, one for all other threads, who take turns anyway; glibc would make one for each
_WORTH_IT = 32 * 1024 * 1024
_PATIENCE = 30.0  # seconds in which a burst may come back and find what the last one left
_LEAST = 128 * 1024 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Account(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def too_little() -> str | None:
    """What to say when the address space of the process is too small to run in: the libraries below would abort."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY or most >= _LEAST:
        return None
    return (
        f"the process may use {most // 1024} KiB of address space (ulimit -v), which is too little to run in; raise it "
        f"to at least {4 * _LEAST // 1024}, or take the limit away and bound resident memory instead (MemoryMax= of "
        "systemd, the memory of the container)"
    )


def keep_freed() -> None:
    """glibc gives memory back to the kernel after each large buffer and asks for it again for the next one."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_TRIM_THRESHOLD, _16_MIB)
        libc.mallopt(_M_MMAP_THRESHOLD, _16_MIB)
        libc.mallopt(_M_ARENA_MAX, _HEAPS)
    except (OSError, AttributeError):
        return


def give_back() -> None:
    """Every page of the heap that holds nothing."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


class Slack:
    """Gives back what a burst left. `quiet` says whether nothing is under way; `check` is called every second."""

    def __init__(self, quiet: Callable[[], bool], patience: float = _PATIENCE) -> None:
        self._quiet = quiet
        self._patience = patience
        self._least = _resident()
        """What the process took when it last took little."""
        self._since: float | None = None

    def check(self, now: float) -> None:
        resident = _resident()
        self._least = min(self._least, resident)
        if resident - self._least < _WORTH_IT:
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since < self._patience or not self._quiet():
            return
        if _freed() >= _WORTH_IT:
            give_back()
        self._least = _resident()  # the rest is in use: the new measure
        self._since = None


def _resident() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0  # not Linux: then there is never anything to give back


def _freed() -> int:
    """Bytes that glibc holds and nobody uses, as far as it can tell."""
    try:
        account: Any = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return 0
    account.restype = _Account
    return int(account().fordblks)

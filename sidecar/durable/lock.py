"""One process owns a state directory.

Law: the lock is the kernel's and dies with the process; the file stays and names the holder. Should the file be
removed, another process could lock a new one beside us: it is locked anew, or nothing is promised any more.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sidecar.durable.presence import Identity, identity_of
from sidecar.durable.trouble import CannotUse

_FILE = "lock"


class InUse(CannotUse):
    """Another process has it."""


class StateLock:
    """Made by `take`, given back by `close`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._identity = _identity(descriptor)

    @classmethod
    def take(cls, state_dir: Path) -> StateLock:
        """Raises InUse when another process has it, CannotUse when the directory cannot be written."""
        path = state_dir / _FILE
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if state_dir.stat().st_mode & 0o077:
                state_dir.chmod(0o700)  # made by somebody else, for everybody: what is kept here is not
            descriptor = _locked(path)
        except BlockingIOError:
            raise InUse(
                f"state_dir {state_dir} is in use by {_holder(path)}",
                "stop that one, or give this one a `state_dir` of its own",
            ) from None
        except OSError as error:
            raise CannotUse(
                f"state_dir {state_dir} cannot be used: {error.strerror}",
                "make it writable or set another `state_dir`",
            ) from error
        return cls(path, descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def missing(self) -> str | None:
        if identity_of(self._path) == self._identity:
            return None
        return (
            f"{self._path} was removed or replaced while the sidecar runs; it is locked anew unless another one has it"
        )

    def mend(self) -> str | None:
        try:
            descriptor = _locked(self._path)
        except OSError:
            return None
        os.close(self._descriptor)
        self._descriptor, self._identity = descriptor, _identity(descriptor)
        return f"{self._path} was removed or replaced while the sidecar runs; it was made and locked anew"


def _identity(descriptor: int) -> Identity:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _locked(path: Path) -> int:
    """A new descriptor of the file, with the lock and our name in it. Raises OSError, BlockingIOError if it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip() or "another process"
    except OSError:
        return "another process"

"""The few things that are done to files, in one place.

Law: nothing is called written before it has been synced, and a name appears only for a whole file:
temporary name → write → fsync → rename → fsync of the directory. Files are 0600, directories 0700, and names are
never taken from a request. A test can make any single step fail by putting its own Disk here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# File systems whose content is gone with the machine or the container.
_VOLATILE = frozenset({"tmpfs", "ramfs", "overlay", "aufs"})


class Disk:
    """Every call blocks: use it in a thread."""

    def create(self, path: Path) -> int:
        return os.open(path, _NEW_FILE, 0o600)

    def write(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """What this process may still write; space reserved for root does not count."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def write_whole(self, path: Path, data: bytes) -> None:
        """A file that is there completely, and durably, or not at all."""
        temporary = path.with_name(path.name + TEMPORARY)
        self.remove(temporary)
        descriptor = self.create(temporary)
        try:
            try:
                self.write(descriptor, data)
                self.sync(descriptor)
            finally:
                self.close(descriptor)
            self.rename(temporary, path)
        except OSError:
            self.remove(temporary)
            raise
        self.sync_directory(path.parent)


def private_directory(path: Path) -> bool:
    """Make sure it exists and nobody else can look in. True if its mode had to be tightened."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tightened(path)


def tightened(path: Path) -> bool:
    """Take away what others may do with it; True if there was something to take away."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return False
    path.chmod(mode & 0o700)
    return True


def volatile_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The kind of file system below `path` if it does not outlive the machine or the container, else None.

    `mounts` is the text of /proc/self/mountinfo; where there is none, nothing can be said.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    place = path.resolve()
    deepest = max(
        (
            (len(mount.parts), order, kind)
            for order, (mount, kind) in enumerate(_mounts(mounts))
            if _within(place, mount)
        ),
        default=None,
    )
    return deepest[2] if deepest is not None and deepest[2] in _VOLATILE else None


def _mounts(text: str) -> Iterator[tuple[Path, str]]:
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        if dash:
            yield Path(before.split(" ")[4].replace("\\040", " ")), after.split(" ")[0]


def _within(place: Path, mount: Path) -> bool:
    return place == mount or mount in place.parents

"""Everything that is kept, in one file; and back.

Law: a backup is taken while the sidecar runs: the database by SQLite's own backup, one moment of it, and then the body
files that this moment refers to. It ends with a manifest of every part and its digest, so that half a backup is none.
A restore takes nothing on trust: all parts are unpacked beside the state and checked before the first one gets its
place, and what was there before is set aside, never deleted. The file holds the keys that open what is sealed: 0600.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sidecar import __version__, clock
from sidecar.durable.account import FILE as ACCOUNT
from sidecar.durable.disk import TEMPORARY, Disk, private_directory
from sidecar.durable.opening import BODIES, FILE, quick_check
from sidecar.durable.schema import VERSION
from sidecar.durable.trouble import BadInput, Damaged, NotNow, Trouble
from telemetry.timestamps import rfc3339

_MANIFEST = "manifest.json"
_FORMAT = 1
_FOLDERS = ("keys", "ca")
"""Besides the database and its bodies: what opens sealed values, and who apps were told to trust."""
_PART = re.compile(rf"{re.escape(FILE)}|{BODIES}/[0-9a-f]{{64}}\.body|(?:{'|'.join(_FOLDERS)})/[A-Za-z0-9._-]{{1,100}}")
_LARGEST_MANIFEST = 64 * 1024 * 1024
_TRIES = 5
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Made:
    """What a backup holds."""

    path: Path
    parts: int
    bytes: int
    version: int
    missing: tuple[str, ...]
    """Bodies that the store refers to and does not have."""


class _Changed(Exception):
    """A body was deleted while it was being copied, together with its entry: take a newer moment."""


def back_up(state_dir: Path, target: Path, *, overwrite: bool = False) -> Made:
    """Blocks. Raises Trouble; then there is no new file."""
    if not (state_dir / FILE).exists():
        raise NotNow(f"nothing is kept in {state_dir} yet", "name another with --state-dir, or -c its configuration")
    if target.exists() and not overwrite:
        raise NotNow(f"{target} exists already", "give another name, or --force")
    temporary = target.with_name(target.name + TEMPORARY)
    snapshot = target.with_name(target.name + ".db" + TEMPORARY)
    disk = Disk()
    try:
        for left in range(_TRIES, 0, -1):
            try:
                made = _write(state_dir, snapshot, temporary, disk, lenient=left == 1)
                break
            except _Changed:
                continue
        disk.rename(temporary, target)
        disk.sync_directory(target.absolute().parent)
    except (OSError, sqlite3.Error) as error:
        raise Trouble(
            f"{target} cannot be written: {_why(error)}", "look at the disk, or give another place"
        ) from error
    finally:
        for path in (snapshot, temporary):
            path.unlink(missing_ok=True)
    return Made(target, *made)


def _write(
    state_dir: Path, snapshot: Path, archive: Path, disk: Disk, *, lenient: bool
) -> tuple[int, int, int, tuple[str, ...]]:
    """`lenient`: leave out bodies that are not there, which by now is no accident."""
    for path in (snapshot, archive):
        disk.remove(path)
        disk.close(disk.create(path))
    source = sqlite3.connect(f"{(state_dir / FILE).absolute().as_uri()}?mode=ro", uri=True)
    with closing(source), closing(sqlite3.connect(snapshot)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        version: int = copy.execute("PRAGMA user_version").fetchone()[0]
        bodies = [str(row[0]) for row in copy.execute("SELECT name FROM body_files ORDER BY name")]
    parts: dict[str, dict[str, Any]] = {}
    missing: list[str] = []
    with archive.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in _sources(state_dir, snapshot, bodies):
                try:
                    parts[name] = _add(tar, name, path)
                except FileNotFoundError:
                    if not lenient:
                        raise _Changed from None
                    missing.append(path.name)
            manifest = {
                "format": _FORMAT,
                "schema": version,
                "sidecar": __version__,
                "made_at": rfc3339(clock.wall()),
                "parts": parts,
                "missing": missing,
            }
            data = json.dumps(manifest, indent=1).encode()
            tar.addfile(_member(_MANIFEST, len(data)), io.BytesIO(data))
        file.flush()
        disk.sync(file.fileno())
    return len(parts), sum(part["bytes"] for part in parts.values()), version, tuple(missing)


def _sources(state_dir: Path, snapshot: Path, bodies: list[str]) -> Iterator[tuple[str, Path]]:
    yield FILE, snapshot
    for name in bodies:
        yield f"{BODIES}/{name}", state_dir / BODIES / name
    for folder in _FOLDERS:
        for path in sorted((state_dir / folder).glob("*")):
            if path.is_file() and path.name != "lock" and not path.name.endswith(TEMPORARY):
                yield f"{folder}/{path.name}", path


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(clock.wall())
    return member


class _Digesting:
    """Reads on, and remembers what it was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _add(tar: tarfile.TarFile, name: str, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = path.stat().st_size
        reading = _Digesting(file)
        tar.addfile(_member(name, size), reading)
        return {"bytes": size, "sha256": reading.digest.hexdigest()}


# ---- back --------------------------------------------------------------------------------------------------------


def restore(archive: Path, state_dir: Path, *, overwrite: bool = False) -> tuple[Made, Path | None]:
    """Blocks; whoever calls holds the lock of the directory. What is in the file, and where what was there is now.
    Raises Trouble; then the state is as it was."""
    ours = (FILE, f"{FILE}-wal", f"{FILE}-shm", ACCOUNT, BODIES, *_FOLDERS)
    there = [name for name in ours if (state_dir / name).exists()]
    if FILE in there and not overwrite:
        raise NotNow(f"{state_dir} holds a store already", "with --force it is set aside, not deleted, and replaced")
    stamp = re.sub(r"[^0-9]", "", rfc3339(clock.wall()))
    unpacked, aside = state_dir / f"restoring-{stamp}", state_dir / f"before-restore-{stamp}"
    disk = Disk()
    try:
        private_directory(unpacked)
        try:
            manifest = _unpack(archive, unpacked, disk)
            _check(unpacked, manifest, archive)
            if there:
                private_directory(aside)
            for name in (*there[1:], *there[:1]):  # the database last, in both directions: it is what counts
                disk.rename(state_dir / name, aside / name)
            disk.sync_directory(state_dir)
            for name in (*_FOLDERS, BODIES, FILE):
                if (unpacked / name).exists():
                    disk.rename(unpacked / name, state_dir / name)
            disk.sync_directory(state_dir)
        finally:
            _remove(unpacked)
    except OSError as error:
        raise Trouble(f"{state_dir} cannot be written: {_why(error)}", "look at the disk") from error
    parts = manifest["parts"]
    size = sum(part["bytes"] for part in parts.values())
    made = Made(archive, len(parts), size, manifest["schema"], tuple(manifest["missing"]))
    return made, aside if there else None


def _unpack(archive: Path, folder: Path, disk: Disk) -> dict[str, Any]:
    """Write every part; the manifest, which comes last."""
    digests: dict[str, str] = {}
    manifest: Any = None
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or manifest is not None:
                    raise _not_ours(archive, f"it holds {member.name[:100]!r}")
                if member.name == _MANIFEST:
                    if member.size > _LARGEST_MANIFEST:
                        raise _not_ours(archive, "its manifest is too large")
                    manifest = json.loads(content.read())
                elif _PART.fullmatch(member.name) and member.name not in digests:
                    digests[member.name] = _copy(content, folder / member.name, disk)
                else:
                    raise _not_ours(archive, f"it holds {member.name[:100]!r}")
    except FileNotFoundError:
        raise BadInput("FILE", f"there is no {archive}", "name a file that `sidecar backup` has made") from None
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise _not_ours(archive, str(error)) from None
    if manifest is None:
        raise _not_ours(archive, "it ends before its manifest, so it is not whole")
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise BadInput(
            "FILE",
            f"{archive} has the format {found!r}, this sidecar reads {_FORMAT}",
            "restore it with the release that made it",
        )
    try:
        expected = {name: part["sha256"] for name, part in manifest["parts"].items()}
        sizes = [int(part["bytes"]) for part in manifest["parts"].values()]
        complete = len(sizes) == len(digests) and isinstance(manifest["missing"], list) and "schema" in manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_ours(archive, f"its manifest cannot be understood: {error!r}") from None
    if expected != digests or not complete:
        raise _not_ours(archive, "its parts are not those of its manifest")
    return manifest


def _copy(content: IO[bytes], path: Path, disk: Disk) -> str:
    private_directory(path.parent)
    digest = hashlib.sha256()
    descriptor = disk.create(path)
    try:
        while data := content.read(_PIECE):
            digest.update(data)
            disk.write(descriptor, data)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.sync_directory(path.parent)
    return digest.hexdigest()


def _check(folder: Path, manifest: dict[str, Any], archive: Path) -> None:
    """Whether this sidecar can work with it."""
    if not (folder / FILE).exists():
        raise _not_ours(archive, "it holds no database")
    try:
        with closing(sqlite3.connect(f"{(folder / FILE).absolute().as_uri()}?mode=ro", uri=True)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            problem = quick_check(connection)
            bodies = [str(row[0]) for row in connection.execute("SELECT name FROM body_files")] if not problem else []
    except sqlite3.Error as error:
        raise _not_ours(archive, f"its database cannot be read: {error}") from None
    if version > VERSION:
        raise NotNow(
            f"{archive} was made by a newer sidecar ({manifest.get('sidecar')}, store format {version}; this one knows "
            f"up to {VERSION})",
            "restore it with that release",
        )
    known = {*manifest["parts"], *(f"{BODIES}/{name}" for name in manifest["missing"])}
    missing = [name for name in bodies if f"{BODIES}/{name}" not in known]
    if problem is not None or missing:
        raise _not_ours(archive, problem or f"the body {missing[0]} is not in it")


def _not_ours(archive: Path, why: str) -> Damaged:
    return Damaged(f"{archive} is not a whole backup: {why}", "take another one; nothing was changed")


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def _why(error: OSError | sqlite3.Error) -> str:
    return getattr(error, "strerror", None) or str(error)

"""Sealing: AES-256-GCM, bound to what the bytes are, the host they were meant for, and the entry they belong to.

Law: a sealed value opens only under the key that sealed it and in the place it was made for; moved to another entry
or another destination it is as good as damaged. The newest key seals, older ones only open. Keys are never written
anywhere but into `state_dir/keys/`, and a store whose keys are not at hand is refused at the start, not at the
first replay.

Hashes of secrets (urls, keys, credentials) are keyed as well, with a key that is never rotated, so that equal
values stay recognisable and nobody can try values against a stolen file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.durable.disk import Disk, private_directory, tightened
from sidecar.durable.trouble import CannotUse, Damaged, NotNow, Trouble

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ENVIRONMENT = "SIDECAR_SEAL_KEY"
FOLDER = "keys"
CHUNK = 65536
TAG = 16
_KEY_BYTES = 32
_FORMAT = b"\x01"
_STREAM_FORMAT = b"SCB1"
STREAM_HEADER = len(_STREAM_FORMAT) + 4 + 7
_KEY_FILE = re.compile(r"seal-([0-9]{4,})-([0-9a-f]{8})\.key")
_HASH_KEY_FILE = "hash.key"
_PROOF = b"this key is the right one"


@cache
def _cipher_class() -> type[AESGCM]:
    # Loaded on first use: a sidecar that keeps nothing never pays for the library.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM


def key_id_of(key: bytes) -> str:
    return hashlib.sha256(b"sidecar seal key" + key).digest()[:4].hex()


def _joined(parts: Sequence[bytes]) -> bytes:
    """Unambiguous: no two lists of parts give the same bytes."""
    return repr(list(map(len, parts))).encode() + b"".join(parts)


def _bound_to(purpose: str, host: str, ident: str) -> bytes:
    return _joined((purpose.encode(), host.lower().encode(), ident.encode()))


class Keyring:
    """Every key at hand; the first seals."""

    def __init__(
        self,
        keys: list[bytes],
        hash_key: bytes,
        folder: Path,
        *,
        from_environment: bool = False,
        files: Mapping[Path, bytes] | None = None,
    ) -> None:
        self._ciphers = {key_id_of(key): _cipher_class()(key) for key in keys}
        self._hash_key = hash_key
        self.folder = folder
        self.from_environment = from_environment
        self.active = key_id_of(keys[0])
        self._files = dict(files or {})
        """What is in them, so that they can be written again."""
        self._seen: dict[Path, tuple[int, ...] | None] = {path: _look(path) for path in self._files}
        self.needed = set(self._ciphers)
        """Ids of the keys that the store cannot do without."""

    @property
    def key_ids(self) -> list[str]:
        return list(self._ciphers)

    def add(self, key: bytes, file: Path) -> str:
        key_id = key_id_of(key)
        self._ciphers[key_id] = _cipher_class()(key)
        self._seen = {**self._seen, file: _look(file)}  # anew: the writer's thread may be looking through them
        self._files = {**self._files, file: key}
        self.needed = {*self.needed, key_id}
        return key_id

    # ---- the files, while we run -----------------------------------------------------------------------------

    def missing(self) -> str | None:
        """A key that exists in memory only is gone with the process, and with it all that it sealed."""
        for path in self._wanted():
            if self._seen[path] is None or _look(path) != self._seen[path]:
                if not _holds(path, self._files[path]):
                    return (
                        f"{path} was removed or changed while the sidecar runs: it is written again if that is "
                        "possible; else put it back, or what is sealed with it can never be opened after a restart"
                    )
                self._seen[path] = _look(path)
        return None

    def mend(self) -> str | None:
        """The key is still in memory: its file is written again."""
        written = []
        for path in self._wanted():
            if not _holds(path, self._files[path]):
                try:
                    private_directory(path.parent)
                    Disk().write_whole(path, _encoded(self._files[path]))
                except OSError:
                    return None
                self._seen[path] = _look(path)
                written.append(str(path))
        names = " and ".join(written)
        return f"{names} was removed or changed while the sidecar runs; it was written again, from memory"

    def _wanted(self) -> list[Path]:
        """Not those of keys that a rotation has replaced: they may be deleted."""
        hash_file = self.folder / _HASH_KEY_FILE
        return [path for path, key in self._files.items() if path == hash_file or key_id_of(key) in self.needed]

    # ---- sealing ---------------------------------------------------------------------------------------------

    def seal(self, purpose: str, host: str, ident: str, data: bytes) -> bytes:
        nonce = os.urandom(12)
        sealed = self._ciphers[self.active].encrypt(nonce, data, _bound_to(purpose, host, ident))
        return _FORMAT + bytes.fromhex(self.active) + nonce + sealed

    def open(self, purpose: str, host: str, ident: str, sealed: bytes) -> bytes:
        if sealed[:1] != _FORMAT or len(sealed) < 17 + TAG:
            raise Damaged(f"the sealed {purpose} of {ident} is not in a known format")
        return self._decrypt(
            sealed[1:5].hex(), sealed[5:17], sealed[17:], _bound_to(purpose, host, ident), f"{purpose} of {ident}"
        )

    def _decrypt(self, key_id: str, nonce: bytes, sealed: bytes, bound_to: bytes, what: str) -> bytes:
        from cryptography.exceptions import InvalidTag

        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise Damaged(
                f"the sealed {what} needs key {key_id}, which is not at hand",
                f"put it back into {self.folder}, or add it to {ENVIRONMENT}",
            )
        try:
            return cipher.decrypt(nonce, sealed, bound_to)
        except InvalidTag:
            raise Damaged(f"the sealed {what} was changed, or belongs to another entry or host") from None

    def key_of(self, sealed: bytes) -> str:
        """The id of the key that sealed it."""
        return sealed[1:5].hex()

    def stream_sealer(self, purpose: str, host: str, ident: str) -> StreamSealer:
        return StreamSealer(self._ciphers[self.active], bytes.fromhex(self.active), _bound_to(purpose, host, ident))

    def stream_opener(self, header: bytes, purpose: str, host: str, ident: str) -> Callable[[int, bytes, bool], bytes]:
        """A function (number, sealed chunk, last) → chunk. `header` is the first STREAM_HEADER bytes."""
        if header[:4] != _STREAM_FORMAT or len(header) != STREAM_HEADER:
            raise Damaged(f"the sealed {purpose} of {ident} is not in a known format")
        bound_to, what = _bound_to(purpose, host, ident), f"{purpose} of {ident}"

        def opened(number: int, sealed: bytes, last: bool) -> bytes:
            return self._decrypt(header[4:8].hex(), header[8:] + _place(number, last), sealed, bound_to, what)

        return opened

    # ---- keyed hashes ----------------------------------------------------------------------------------------

    def digest(self, *parts: str | bytes) -> bytes:
        encoded = [part.encode() if isinstance(part, str) else part for part in parts]
        return hashlib.blake2b(_joined(encoded), digest_size=32, key=self._hash_key).digest()

    # ---- the store's own check -------------------------------------------------------------------------------

    def prove(self, connection: sqlite3.Connection) -> None:
        """Run on every opening of the store: each key it was sealed with is here, and so is the key of its hashes."""
        proofs = connection.execute("SELECT key_id, proof FROM seal_keys").fetchall()
        self.needed = {self.active, *(key_id for key_id, _ in proofs)}
        for key_id, proof in proofs:
            if key_id not in self._ciphers:
                raise CannotUse(
                    f"the dead letters in {self.folder.parent} were sealed with key {key_id}, "
                    f"which is not at hand (there is: {', '.join(self._ciphers)})",
                    f"put its file back into {self.folder}, or set {ENVIRONMENT} to the right key "
                    "(`new,old` keeps what the old one sealed readable), or set another `state_dir`",
                )
            if self.open("proof", "", key_id, proof) != _PROOF:
                raise Damaged(f"the proof of key {key_id} says something else")
        known = connection.execute("SELECT value FROM meta WHERE name = 'hash_proof'").fetchone()
        if known is not None and not hmac.compare_digest(known[0], self.digest(_PROOF)):
            raise CannotUse(
                f"{self.folder / _HASH_KEY_FILE} is not the one that the store in {self.folder.parent} was made with",
                "put the right file back, or set another `state_dir`",
            )
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('hash_proof', ?)", (self.digest(_PROOF),))
        self.enroll(connection, self.active)

    def enroll(self, connection: sqlite3.Connection, key_id: str) -> None:
        """Before anything is sealed with a key, the store remembers that it needs it."""
        cipher, nonce = self._ciphers[key_id], os.urandom(12)
        proof = _FORMAT + bytes.fromhex(key_id) + nonce + cipher.encrypt(nonce, _PROOF, _bound_to("proof", "", key_id))
        connection.execute("INSERT OR IGNORE INTO seal_keys VALUES (?, ?)", (key_id, proof))


class StreamSealer:
    """Seals a body in chunks, so that its size never has to fit into memory. Order, number and end are bound in."""

    def __init__(self, cipher: AESGCM, key_id: bytes, bound_to: bytes) -> None:
        self._cipher = cipher
        self._bound_to = bound_to
        self._prefix = os.urandom(7)
        self._number = 0
        self.header = _STREAM_FORMAT + key_id + self._prefix

    def chunk(self, data: bytes, *, last: bool) -> bytes:
        """`data` is CHUNK bytes long, the last one as long as it happens to be."""
        sealed = self._cipher.encrypt(self._prefix + _place(self._number, last), data, self._bound_to)
        self._number += 1
        return sealed


def _place(number: int, last: bool) -> bytes:
    return number.to_bytes(4, "big") + (b"\1" if last else b"\0")


# ---- where keys come from ------------------------------------------------------------------------------------


def load_keyring(state_dir: Path, environment: str | None, disk: Disk | None = None) -> Keyring:
    """Keys of SIDECAR_SEAL_KEY, then those in `state_dir/keys/`; a first one is made when there is none."""
    disk, folder = disk or Disk(), state_dir / FOLDER
    try:
        private_directory(folder)
        given = _keys_of_environment(environment) if environment else []
        kept = _key_files(folder)
        if not given and not kept:
            kept = [(1, *new_key_file(folder, 1, disk))]
        hash_file = folder / _HASH_KEY_FILE
        if not hash_file.exists():
            disk.write_whole(hash_file, _encoded(os.urandom(_KEY_BYTES)))
        tightened(hash_file)
        newest_first = [key for _, key, _ in sorted(kept, reverse=True)]
        hash_key = _read_key(hash_file)
        files = {hash_file: hash_key, **{path: key for _, key, path in kept}}
        return Keyring([*given, *newest_first], hash_key, folder, from_environment=bool(given), files=files)
    except OSError as error:
        raise CannotUse(f"the keys in {folder} cannot be used: {error}", "make it readable and writable") from error


def _keys_of_environment(text: str) -> list[bytes]:
    keys = []
    for number, part in enumerate(text.split(","), 1):
        key = _decoded(part.strip())
        if key is None:
            raise CannotUse(
                f"key {number} in {ENVIRONMENT} is not 32 bytes in base64 or hex",
                "make one with `openssl rand -base64 32`",
            )
        keys.append(key)
    return keys


def _look(path: Path) -> tuple[int, ...] | None:
    """Another result: another file, or another content."""
    try:
        found = os.stat(path)  # per commit: a Path would cost more than the call
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _holds(path: Path, key: bytes) -> bool:
    try:
        return _decoded(path.read_text(encoding="ascii", errors="replace").strip()) == key
    except OSError:
        return False


def _key_files(folder: Path) -> list[tuple[int, bytes, Path]]:
    found = []
    for path in sorted(folder.iterdir()):
        match = _KEY_FILE.fullmatch(path.name)
        if match is None:
            continue
        tightened(path)
        key = _read_key(path)
        if key_id_of(key) != match[2]:
            raise CannotUse(f"{path} is damaged: its key does not have the id in its name", "restore it from a backup")
        found.append((int(match[1]), key, path))
    return found


def new_key_file(folder: Path, number: int, disk: Disk) -> tuple[bytes, Path]:
    key = os.urandom(_KEY_BYTES)
    path = folder / f"seal-{number:04d}-{key_id_of(key)}.key"
    disk.write_whole(path, _encoded(key))
    return key, path


def next_key(keyring: Keyring, disk: Disk) -> tuple[bytes, Path]:
    """A new key, durably in its file, not yet in use."""
    if keyring.from_environment:
        raise NotNow(
            f"the key comes from {ENVIRONMENT}, so it cannot be changed here",
            f"set {ENVIRONMENT} to `new,old`, restart and rotate again: what the old key sealed is then sealed anew",
        )
    try:
        numbers = [number for number, _, _ in _key_files(keyring.folder)]
        return new_key_file(keyring.folder, max(numbers, default=0) + 1, disk)
    except OSError as error:
        raise Trouble(f"a new key cannot be written to {keyring.folder}: {error}", "look at the disk") from error


def _read_key(path: Path) -> bytes:
    key = _decoded(path.read_text(encoding="ascii", errors="replace").strip())
    if key is None:
        raise CannotUse(f"{path} is damaged: it does not hold a key of 32 bytes", "restore it from a backup")
    return key


def _encoded(key: bytes) -> bytes:
    return base64.b64encode(key) + b"\n"


def _decoded(text: str) -> bytes | None:
    for decode in (bytes.fromhex, lambda value: base64.b64decode(value, validate=True)):
        try:
            key = decode(text)
        except (ValueError, binascii.Error):
            continue
        if len(key) == _KEY_BYTES:
            return key
    return None

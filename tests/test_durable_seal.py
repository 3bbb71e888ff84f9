"""Sealing: what opens where, which key does what, and what a wrong or missing key is told."""

from __future__ import annotations

import base64
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.durable.seal import Keyring, key_id_of, load_keyring, next_key
from sidecar.durable.store import Store
from sidecar.durable.trouble import CannotUse, Damaged, NotNow, Trouble
from tests.durability.faults import FaultyDisk
from tests.durability.rigs import opened


def test_what_was_sealed_opens_again_and_does_not_show(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    sealed = keys.seal("body", "api.test:443", "dlq_1", b"the secret")
    assert b"secret" not in sealed
    assert b"the secret" == keys.open("body", "api.test:443", "dlq_1", sealed)
    assert b"the secret" == keys.open("body", "API.test:443", "dlq_1", sealed), "hosts have no case"
    assert sealed != keys.seal("body", "api.test:443", "dlq_1", b"the secret"), "every sealing is a new one"


@pytest.mark.parametrize(
    ("purpose", "host", "ident"),
    [("head", "api.test", "dlq_1"), ("body", "evil.test", "dlq_1"), ("body", "api.test", "dlq_2")],
)
def test_it_opens_nowhere_else(tmp_path: Path, purpose: str, host: str, ident: str) -> None:
    keys = load_keyring(tmp_path, None)
    sealed = keys.seal("body", "api.test", "dlq_1", b"x")
    with pytest.raises(Damaged, match="changed, or belongs to another entry or host"):
        keys.open(purpose, host, ident, sealed)


def test_every_changed_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    sealed = keys.seal("body", "h", "i", b"some content")
    for place in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[place] ^= 1
        for wrong in (bytes(flipped), sealed[:place]):
            with pytest.raises(Damaged):
                keys.open("body", "h", "i", wrong)


def test_equal_values_have_equal_hashes_and_parts_do_not_run_together(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    assert keys.digest("a", b"b") == load_keyring(tmp_path, None).digest("a", "b")
    assert keys.digest("ab", "c") != keys.digest("a", "bc")
    assert keys.digest("a") != load_keyring(tmp_path / "other", None).digest("a"), "nobody else can compute them"


# ---- where keys come from --------------------------------------------------------------------------------------


def test_a_first_key_is_made_private_and_found_again(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    sealed = keys.seal("body", "h", "i", b"x")
    assert 0o700 == stat.S_IMODE((tmp_path / "keys").stat().st_mode)
    files = sorted((tmp_path / "keys").iterdir())
    assert ["hash.key", f"seal-0001-{keys.active}.key"] == [path.name for path in files]
    assert [0o600, 0o600] == [stat.S_IMODE(path.stat().st_mode) for path in files]
    files[1].chmod(0o644)
    assert b"x" == load_keyring(tmp_path, None).open("body", "h", "i", sealed)
    assert 0o600 == stat.S_IMODE(files[1].stat().st_mode)


@pytest.mark.parametrize("form", [bytes.hex, lambda key: base64.b64encode(key).decode()])
def test_a_key_may_come_from_the_environment(tmp_path: Path, form: object) -> None:
    key = os.urandom(32)
    keys = load_keyring(tmp_path, form(key))  # type: ignore[operator]  # both take bytes
    assert key_id_of(key) == keys.active
    assert ["hash.key"] == [path.name for path in (tmp_path / "keys").iterdir()]


def test_the_first_key_of_the_environment_seals_and_all_open(tmp_path: Path) -> None:
    old, new = os.urandom(32).hex(), os.urandom(32).hex()
    on_file = load_keyring(tmp_path, None)
    sealed = [on_file.seal("b", "h", "i", b"file"), load_keyring(tmp_path, old).seal("b", "h", "i", b"old")]
    keys = load_keyring(tmp_path, f"{new}, {old}")
    assert [b"file", b"old"] == [keys.open("b", "h", "i", one) for one in sealed]
    assert key_id_of(bytes.fromhex(new)) == keys.active == keys.key_of(keys.seal("b", "h", "i", b""))
    assert 3 == len(keys.key_ids)


@pytest.mark.parametrize("given", ["short", "00" * 31, "%%%", ""])
def test_a_key_that_is_none_is_refused_with_how_to_make_one(tmp_path: Path, given: str) -> None:
    with pytest.raises(CannotUse, match=r"key 2 in SIDECAR_SEAL_KEY .*openssl rand -base64 32"):
        load_keyring(tmp_path, "ab" * 32 + "," + given)


@pytest.mark.parametrize("content", ["", "not a key", base64.b64encode(b"1" * 32).decode(), "ab" * 40])
def test_a_damaged_key_file_is_named(tmp_path: Path, content: str) -> None:
    keys = load_keyring(tmp_path, None)
    file = tmp_path / "keys" / f"seal-0001-{keys.active}.key"
    file.write_text(content)
    with pytest.raises(CannotUse, match=f"{file.name} is damaged.*restore it from a backup"):
        load_keyring(tmp_path, None)


def test_a_folder_of_keys_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a file where the folder should be")
    with pytest.raises(CannotUse, match="keys cannot be used"):
        load_keyring(tmp_path, None)


def test_a_key_that_was_not_synced_is_not_used(tmp_path: Path) -> None:
    for failing in range(1, 10):
        with pytest.raises(CannotUse):
            load_keyring(tmp_path / str(failing), None, FaultyDisk(failing))
        load_keyring(tmp_path / str(failing), None)


# ---- the store and its keys ------------------------------------------------------------------------------------


async def seal_one(state_dir: Path, keys: Keyring) -> None:
    async with opened(state_dir, hooks=[keys.prove]) as store:
        await store.write(lambda connection: None)


async def test_a_store_opens_with_the_keys_it_was_sealed_with(tmp_path: Path) -> None:
    await seal_one(tmp_path, load_keyring(tmp_path, None))
    await seal_one(tmp_path, load_keyring(tmp_path, None))


async def test_a_missing_key_is_refused_at_the_start_with_what_to_do(tmp_path: Path) -> None:
    first, second = os.urandom(32).hex(), os.urandom(32).hex()
    await seal_one(tmp_path, load_keyring(tmp_path, first))
    with pytest.raises(CannotUse, match=f"sealed with key {key_id_of(bytes.fromhex(first))}.*`new,old` keeps"):
        await Store.open(tmp_path, hooks=[load_keyring(tmp_path, second).prove])
    await seal_one(tmp_path, load_keyring(tmp_path, f"{second},{first}"))
    with pytest.raises(CannotUse, match="not at hand"):
        await Store.open(tmp_path, hooks=[load_keyring(tmp_path, first).prove])


async def test_another_key_of_the_hashes_is_refused(tmp_path: Path) -> None:
    await seal_one(tmp_path, load_keyring(tmp_path, None))
    (tmp_path / "keys" / "hash.key").unlink()
    with pytest.raises(CannotUse, match=r"hash\.key is not the one"):
        await Store.open(tmp_path, hooks=[load_keyring(tmp_path, None).prove])


async def test_a_proof_that_was_tampered_with_is_noticed(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    await seal_one(tmp_path, keys)
    for proof in (b"", keys.seal("proof", "", keys.active, b"something else")):
        connection = sqlite3.connect(tmp_path / "store.db")
        with connection:
            connection.execute("UPDATE seal_keys SET proof = ?", (proof,))
        connection.close()
        with pytest.raises(Damaged):
            await Store.open(tmp_path, hooks=[keys.prove])


# ---- new keys --------------------------------------------------------------------------------------------------


def test_a_new_key_seals_after_the_next_start_and_the_old_one_still_opens(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    sealed = keys.seal("b", "h", "i", b"x")
    key, _ = next_key(keys, FaultyDisk())
    again = load_keyring(tmp_path, None)
    assert key_id_of(key) == again.active
    assert b"x" == again.open("b", "h", "i", sealed)
    (tmp_path / "keys" / f"seal-0001-{keys.active}.key").unlink()
    with pytest.raises(Damaged, match=f"needs key {keys.active}, which is not at hand; put it back"):
        load_keyring(tmp_path, None).open("b", "h", "i", sealed)


def test_a_key_of_the_environment_cannot_be_changed_here(tmp_path: Path) -> None:
    with pytest.raises(NotNow, match="set SIDECAR_SEAL_KEY to `new,old`"):
        next_key(load_keyring(tmp_path, "ab" * 32), FaultyDisk())


def test_a_new_key_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    keys = load_keyring(tmp_path, None)
    with pytest.raises(Trouble, match="look at the disk"):
        next_key(keys, FaultyDisk(2))
    assert keys.active == load_keyring(tmp_path, None).active


def test_the_library_is_loaded_on_first_use_only() -> None:
    code = "import sidecar.durable.seal, sys; sys.exit('cryptography' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode

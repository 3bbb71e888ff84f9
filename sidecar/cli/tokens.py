"""`sidecar tokens`: who may ask the admin port.

Law: the file is replaced as a whole, so that a running sidecar never reads half of it. A token is printed once, alone
on standard output, or written to a file that only its owner can read; what there is to say about it goes to standard
error.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path

from config.loader import ConfigError, load
from config.tokens import Token, WrongTokens, digest_of, new_token, parse_tokens, wrong_name
from sidecar.cli.admin import Failed, telling_failures
from sidecar.cli.table import Cell, Column, Table
from sidecar.cli.terminal import Terminal

_HEADER = "# NAME ROLE sha256:DIGEST, one token per line; made by `sidecar tokens new`"


@telling_failures
def tokens(chosen: argparse.Namespace) -> int:
    path = _file(chosen)
    lines = _lines(path, may_be_new=chosen.action == "new")
    try:
        known = parse_tokens(lines)
    except WrongTokens as wrong:
        raise Failed(f"{path}: {wrong}", 2) from None
    if chosen.action == "list":
        return _list(known, as_json=chosen.json)
    return _new(chosen, path, lines, known) if chosen.action == "new" else _revoke(chosen, path, lines, known)


def _new(chosen: argparse.Namespace, path: Path, lines: list[str], known: tuple[Token, ...]) -> int:
    refused = wrong_name(chosen.name)
    if refused is not None:
        raise Failed(f"{refused}; this is {chosen.name[:60]!r}", 2)
    if any(chosen.name == token.name for token in known):
        raise Failed(f"{chosen.name} has a token in {path}; `sidecar tokens revoke {chosen.name}` takes it away", 1)
    made = new_token()
    if chosen.save is not None:
        _save(chosen.save, made)
    try:
        _replace(path, [*(lines or [_HEADER]), str(Token(chosen.name, chosen.role, digest_of(made)))])
    except BaseException:
        if chosen.save is not None:
            chosen.save.unlink(missing_ok=True)  # it opens nothing, and would be in the way of the next try
        raise
    shown = {"name": chosen.name, "role": chosen.role, "file": str(path)}
    told = f"The token of {chosen.name} ({chosen.role}) is in {path} as a digest; it is not shown again."
    if chosen.save is not None:
        print(json.dumps(shown | {"saved": str(chosen.save)}) if chosen.json else chosen.save)
        print(f"{told} It was written to {chosen.save}, for --token-file; only you can read that.", file=sys.stderr)
        return 0
    print(json.dumps(shown | {"token": made}) if chosen.json else made)
    print(f"{told} Use it with SIDECAR_ADMIN_TOKEN, or in a file with --token-file.", file=sys.stderr)
    if _others_may_read_what_is_printed():
        print(
            "Warning: the file that standard output goes to can be read by others: `chmod 600` it, "
            "or let --save FILE write one that only you can read.",
            file=sys.stderr,
        )
    return 0


def _save(path: Path, token: str) -> None:
    """Before the digest is kept: a token that nobody has opens nothing."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Failed(f"{path} exists; --save writes a new file, so name another or remove it", 1) from None
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{token}\n")


def _others_may_read_what_is_printed() -> bool:
    try:
        seen = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_mode & 0o077 != 0


def _revoke(chosen: argparse.Namespace, path: Path, lines: list[str], known: tuple[Token, ...]) -> int:
    if all(chosen.name != token.name for token in known):
        names = ", ".join(token.name for token in known) or "nobody"
        raise Failed(f"{chosen.name[:60]!r} has no token in {path}; there is one of {names}", 1)
    _replace(path, [line for line in lines if line.split()[:1] != [chosen.name]])
    last = " It was the last one: the sidecar goes on with it until there is another." if len(known) == 1 else ""
    if chosen.json:
        print(json.dumps({"revoked": chosen.name, "file": str(path)}))
    print(f"The token of {chosen.name} is out of {path}.{last}", file=sys.stderr)
    return 0


def _list(known: tuple[Token, ...], *, as_json: bool) -> int:
    terminal = Terminal()
    if as_json:
        items = [{"name": token.name, "role": token.role} for token in known]
        terminal.line(json.dumps({"items": items, "next_cursor": None}, indent=2))
        return 0
    rows = [(Cell(token.name), Cell(token.role)) for token in known]
    table = Table(terminal, (Column("NAME"), Column("ROLE")), rows)
    table.head()
    table.show(rows)
    return 0


def _file(chosen: argparse.Namespace) -> Path:
    if chosen.file is not None:
        return Path(chosen.file)
    try:
        named = load(chosen.config, os.environ).settings.admin.token_file
    except ConfigError as wrong:
        raise Failed(f"the configuration that names the file cannot be used; use --file FILE\n{wrong}", 2) from None
    if named is None:
        raise Failed("no file of tokens is configured (admin.token_file); say which one with --file FILE", 2)
    return named


def _lines(path: Path, *, may_be_new: bool) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        if may_be_new:
            return []
        raise Failed(f"{path} does not exist; `sidecar tokens new NAME --file {path}` makes it") from None
    except UnicodeDecodeError:
        raise Failed(f"{path} is not a file of tokens: it is not text", 2) from None
    except OSError as error:
        raise Failed(f"{path} cannot be read: {error.strerror}") from None


def _replace(path: Path, lines: list[str]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            seen = path.stat()
            os.chmod(beside, seen.st_mode & 0o755)
            os.chown(beside, seen.st_uid, seen.st_gid)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise Failed(f"{path} cannot be written: {error.strerror}") from None

"""`sidecar dlq export` and `import`: dead letters as files, `{operation}/{dlq_id}.json` with large bodies beside them.

Law: through the admin port, so that it works while the sidecar runs and wherever that is. Nothing is opened here:
what is sealed stays sealed. A name from outside is written to only if it is one that an export has. An export that
broke off is never taken for whole.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidecar.cli.admin import Admin, Failed
from sidecar.cli.dlq import which
from sidecar.cli.progress import Progress
from sidecar.cli.terminal import Terminal, printable

_TAR = "application/x-tar"
_SUMMARY = "sidecar-export.json"
_FILE = re.compile(r"[A-Za-z0-9_-]{1,80}/dlq_[0-9]{8}_[0-9]{6}_[A-Za-z0-9]{4,40}(?:\.json|(?:\.original)?\.body)")
_BESIDE = {"body_file": ".body", "original_body_file": ".original.body"}
_MOST_FILES, _MOST_BYTES, _LARGEST = 100, 4_000_000, 22_000_000
_PATIENCE = 60.0
_MOST_TOLD = 20


# ---- out ---------------------------------------------------------------------------------------------------------


def export(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    entries, summary = 0, None
    try:
        with admin.stream("/dlq/export", _TAR, _PATIENCE, **which(chosen)) as response:
            progress = Progress(int(response.headers.get("x-sidecar-entries") or 0))
            try:
                for name, content in _members(response):
                    if name == _SUMMARY:
                        summary = json.loads(content)
                    else:
                        _write(chosen.folder, name, content)
                        entries += name.endswith(".json")
                        progress.show(entries)
            finally:
                progress.end()
    except (http.client.HTTPException, tarfile.TarError, ValueError) as error:
        raise Failed(_broken(entries, str(error) or type(error).__name__)) from None
    except OSError as error:
        raise Failed(f"{error.filename or chosen.folder}: {error.strerror or error}") from None
    if summary is None or summary["entries"] != entries:
        raise Failed(_broken(entries, "its end is missing"))
    if chosen.json:
        terminal.line(json.dumps({"folder": str(chosen.folder), **summary}, indent=2))
    else:
        terminal.line(f"{entries} dead letters in {chosen.folder}; secrets are sealed with the keys of this sidecar.")
        for dlq_id in summary["damaged"]:
            print(f"sidecar dlq: {dlq_id} is damaged on disk and was left out", file=sys.stderr)
    return 1 if summary["damaged"] else 0


def _broken(entries: int, why: str) -> str:
    return f"the export broke off after {entries} dead letters ({why}); what was written is whole, run it again"


def _members(response: http.client.HTTPResponse) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=response, mode="r|") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None or (member.name != _SUMMARY and not _FILE.fullmatch(member.name)):
                raise tarfile.TarError(f"{member.name[:100]!r} is not a file of an export")
            yield member.name, file.read()


def _write(folder: Path, name: str, content: bytes) -> None:
    """Whole or not at all, for nobody else to read."""
    place = folder / name
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    part.rename(place)


# ---- in ----------------------------------------------------------------------------------------------------------


def bring_in(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    paths = sorted(chosen.folder.glob("*/*.json"))
    if not paths:
        raise Failed(f"{chosen.folder} has no files {{operation}}/{{dlq_id}}.json, as `sidecar dlq export` writes", 2)
    counts = {"added": 0, "known": 0}
    refused: list[str] = []
    progress, done = Progress(len(paths)), 0
    try:
        for batch in _batches(paths, refused):
            for item in admin.post("/dlq/import", {"files": batch}, patience=_PATIENCE)["items"]:
                if item["result"] == "refused":
                    refused.append(item["why"])
                else:
                    counts[item["result"]] += 1
            done += len(batch)
            progress.show(done)
    except Failed as failed:
        told = f"{failed}\n{counts['added']} dead letters were added before that; run it again to go on"
        raise Failed(told, failed.code) from None
    finally:
        progress.end()
    if chosen.json:
        terminal.line(json.dumps({**counts, "refused": refused}, indent=2))
    else:
        terminal.line(f"{counts['added']} dead letters added, {counts['known']} were there already.")
        for why in refused[:_MOST_TOLD]:
            print(f"sidecar dlq: refused: {printable(why)}", file=sys.stderr)
        if len(refused) > _MOST_TOLD:
            more = f"refused: {len(refused) - _MOST_TOLD} more; --json tells of each"
            print(f"sidecar dlq: {more}", file=sys.stderr)
    return 1 if refused else 0


def _batches(paths: list[Path], refused: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Some files at a time; those that cannot be read are told."""
    batch: list[dict[str, Any]] = []
    size = 0
    for path in paths:
        try:
            found = {"document": path.read_bytes()}
            for name, suffix in _BESIDE.items():
                beside = path.with_suffix(suffix)
                if beside.exists():
                    found[name] = beside.read_bytes()
        except OSError as error:
            refused.append(f"{error.filename or path}: cannot be read: {error.strerror}")
            continue
        length = sum(map(len, found.values()))
        if length > _LARGEST:
            refused.append(f"{path}: is too large for the admin port ({length} bytes with its body, {_LARGEST} go in)")
            continue
        if batch and (len(batch) == _MOST_FILES or size + length > _MOST_BYTES):
            yield batch
            batch, size = [], 0
        encoded = {name: base64.b64encode(content).decode() for name, content in found.items()}
        batch.append({"name": str(path), **encoded})
        size += length
    if batch:
        yield batch

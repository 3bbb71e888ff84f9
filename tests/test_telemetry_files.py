"""What is written to disk: files that rotate, S0's error records, and disks that refuse."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from config.errors import registry
from telemetry.error_records import ErrorRecords, error_record
from telemetry.record import Trace
from telemetry.redact import Redactor
from telemetry.rotating import RotatingFile
from tests.doubles.records import attempt, exhausted, recovered, session, wall

R = Redactor()


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- rotation ----------------------------------------------------------------------------------------------------


def rotating(path: Path, clock: Clock | None = None, **options: Any) -> RotatingFile:
    given = {"max_bytes": 50, "keep": 3, "ttl": None, "told": None, **options}
    return RotatingFile(path, given["max_bytes"], given["keep"], given["ttl"], clock or Clock(), given["told"])


def aside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".gz")


def test_a_full_file_is_compressed_and_put_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "deep" / "events.jsonl"
    file = rotating(path, clock, keep=100)
    for number in range(40):
        clock.now += 1
        file.append(b'{"n":%d}' % number)
    file.close()
    packed = aside(path.parent)
    lines = b"".join(gzip.decompress(each.read_bytes()) for each in packed) + path.read_bytes()
    assert list(range(40)) == [json.loads(line)["n"] for line in lines.splitlines()]
    assert len(packed) > 3
    assert [0o600] * (len(packed) + 1) == [mode(each) for each in (*packed, path)]
    assert 0o700 == mode(path.parent)
    assert {".gz", ".jsonl"} == {each.suffix for each in path.parent.iterdir()}


def test_only_so_many_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    clock = Clock()
    file = rotating(tmp_path / "e.jsonl", clock, keep=2)
    for number in range(60):
        clock.now += 1
        file.append(b"%020d" % number)
    file.close()
    kept = aside(tmp_path)
    assert 2 == len(kept)
    assert b"%020d" % 59 in gzip.decompress(kept[-1].read_bytes())


def test_a_clock_that_stands_still_or_goes_back_overwrites_nothing(tmp_path: Path) -> None:
    clock = Clock()
    file = rotating(tmp_path / "e.jsonl", clock, keep=100)
    for number in range(9):
        file.append(b"%020d" % number)
        clock.now -= number == 4
    file.close()
    assert 3 == len(aside(tmp_path))
    assert 9 == sum(gzip.decompress(each.read_bytes()).count(b"\n") for each in aside(tmp_path))


def test_what_was_put_aside_too_long_ago_goes(tmp_path: Path) -> None:
    clock = Clock()
    file = rotating(tmp_path / "e.jsonl", clock, ttl=100.0)
    file.append(b"x" * 60)
    (packed,) = aside(tmp_path)
    os.utime(packed, (clock.now, clock.now))
    clock.now += 99
    file.expire()
    assert [packed] == aside(tmp_path)
    clock.now += 2
    file.expire()
    assert [] == aside(tmp_path)


def test_a_restart_goes_on_where_the_file_was_and_tidies_up_what_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    first = rotating(path)
    first.append(b"one")
    first.close()
    (tmp_path / "e-20230101T000000000000-000.jsonl.part").write_bytes(b"half")
    second = rotating(path, max_bytes=9)
    second.append(b"second")
    second.close()
    (packed,) = aside(tmp_path)
    assert b"one\nsecond\n" == gzip.decompress(packed.read_bytes())
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "name",
    [
        "e-2019.jsonl",
        "e-backup.jsonl",
        "e-backup.jsonl.gz",
        "e-20230101T000000000000-000.jsonl.gz.bak",
        "e-20230101T000000000000-000.jsonl.gpg",
        "e-other-20230101T000000000000-000.jsonl.gz",
        "e-20230101T000000000000-000-mine.jsonl",
        "e-notes.jsonl.part",
    ],
)
def test_files_of_others_in_the_same_folder_are_left_alone_however_similar_their_names(
    tmp_path: Path, name: str
) -> None:
    foreign = tmp_path / name
    foreign.write_bytes(b"of somebody else")
    os.utime(foreign, (0, 0))
    file = rotating(tmp_path / "e.jsonl", keep=1, ttl=100.0)
    for _ in range(9):
        file.append(b"x" * 60)
    file.expire()
    file.close()
    assert b"of somebody else" == foreign.read_bytes()
    assert 1 == len([path for path in aside(tmp_path) if path != foreign]), "ours still go by number"


def test_a_folder_that_is_not_there_any_more_has_nothing_to_expire(tmp_path: Path) -> None:
    file = rotating(tmp_path / "gone" / "e.jsonl")
    file.expire()
    assert 0 == file.lost


def test_lines_are_buffered_until_flushed(tmp_path: Path) -> None:
    file = rotating(tmp_path / "e.jsonl", max_bytes=1_000_000)
    file.append(b"x")
    assert b"" == (tmp_path / "e.jsonl").read_bytes()
    file.flush()
    assert b"x\n" == (tmp_path / "e.jsonl").read_bytes()
    file.close()


def test_a_place_that_cannot_be_written_costs_lines_is_told_once_and_recovers(tmp_path: Path) -> None:
    told: list[str] = []
    blocker = tmp_path / "folder"
    blocker.write_text("a file where a folder should be")
    file = rotating(blocker / "e.jsonl", told=told.append)
    for _ in range(5):
        file.append(b"lost")
    assert (5, 1) == (file.lost, len(told))
    assert str(blocker) in told[0]
    assert "make room or change its place" in told[0]
    blocker.unlink()
    file.append(b"kept")
    file.flush()
    assert b"kept\n" == (blocker / "e.jsonl").read_bytes()
    file.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_a_full_disk_raises_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    file = rotating(Path("/dev/full"), max_bytes=10_000_000, told=told.append)
    file.append(b"x")
    file.flush()
    file.append(b"y" * 300_000)
    file.close()
    assert (True, 1) == (file.lost > 0, len(told))
    nobody = rotating(Path("/dev/full"), max_bytes=10_000_000)
    nobody.append(b"x")
    nobody.close()


# ---- S0's error records ------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_failed_attempt_is_a_record_of_recovered_sessions_too(tmp_path: Path) -> None:
    records = ErrorRecords(tmp_path / "logs", registry(), wall, Clock(), R)
    made = recovered(operation="create_charge", stage="fetch", workflow="wf", trace=Trace(0xAB, 1, 0, True))
    records.write(made)
    records.flush()
    severity = {"low": "info", "medium": "warning", "high": "error", "critical": "critical"}[
        registry()["TEMPORARY_UNAVAILABLE"].severity
    ]
    (record,) = lines(tmp_path / "logs" / severity / "errors.jsonl")
    assert {
        "timestamp": "2023-11-14T22:30:00.100Z",
        "severity": severity.upper(),
        "category": "TRANSIENT",
        "message": registry()["TEMPORARY_UNAVAILABLE"].description,
        "error_type": "TEMPORARY_UNAVAILABLE",
        "stack_trace": None,
        "context": {
            "request_id": "5e55107100000001",
            "operation": "create_charge",
            "upstream": "payments",
            "endpoint": "a.test:443",
            "attempt": 1,
            "kind": "first",
            "policy_id": "default",
            "send_phase": "sent",
            "outcome": "recovered",
            "stage": "fetch",
            "workflow": "wf",
            "correlation_id": f"{0xAB:032x}",
            "trace_id": f"{0xAB:032x}",
        },
        "http_status": 503,
        "retry_count": 0,
    } == record
    records.close()


def test_the_folder_is_the_severity_and_the_count_grows_with_each_retry(tmp_path: Path) -> None:
    records = ErrorRecords(tmp_path, registry(), wall, Clock(), R)
    records.write(exhausted())
    records.write(session("rejected", attempt(status=401, code="INVALID_API_KEY", message="token=abc")))
    records.close()
    refused = registry()["CONNECTION_REFUSED"]
    folder = {"low": "info", "medium": "warning", "high": "error", "critical": "critical"}[refused.severity]
    assert [0, 1] == [
        record["retry_count"] for record in lines(tmp_path / folder / "errors.jsonl") if record["http_status"] is None
    ]
    critical = {"low": "info", "medium": "warning", "high": "error", "critical": "critical"}[
        registry()["INVALID_API_KEY"].severity
    ]
    assert ("CRITICAL", "token=REDACTED") == tuple(
        lines(tmp_path / critical / "errors.jsonl")[-1][name] for name in ("category", "message")
    )
    assert [0o600, 0o700] == [mode(tmp_path / folder / "errors.jsonl"), mode(tmp_path / folder)]


def test_a_code_nobody_knows_is_recorded_as_an_error() -> None:
    made = session("exhausted", attempt(code="MADE_UP"))
    record = error_record(made, 1, made.attempts[0], registry(), wall, R)
    assert ("ERROR", "TRANSIENT", "MADE_UP", None) == tuple(
        record[name] for name in ("severity", "category", "message", "stack_trace")
    )


def test_records_rotate_like_any_other_file(tmp_path: Path) -> None:
    records = ErrorRecords(tmp_path, registry(), wall, Clock(), R, max_bytes=1_000)
    for _ in range(3):
        records.write(exhausted())
    records.expire()
    records.close()
    assert list(tmp_path.rglob("*.gz"))

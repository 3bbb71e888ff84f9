"""What may be said about logs, events and kept sessions."""

from pathlib import Path

import pytest

from config.loader import ConfigError, load
from config.model import Settings


def test_telemetry_has_the_defaults_it_promises() -> None:
    assert {
        "slow_threshold": 1.0,
        "sessions": 10_000,
        "sessions_ttl": 86_400,
        "healthy_sample": 100,
        "redact_query": (),
        "redact_paths": (),
        "own_otlp": False,
        "log": {"format": "json", "level": "info", "access": False},
        "events": {"file": None, "max_bytes": 104_857_600, "keep": 5, "ttl": None},
    } == Settings().telemetry.model_dump()


def test_it_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.yaml"
    path.write_text("telemetry: {redact_query: [email], log: {format: text, access: true}, events: {file: e.jsonl}}")
    telemetry = load(path, {"SIDECAR__TELEMETRY__LOG__LEVEL": "debug"}).settings.telemetry
    assert (("email",), "text", True, "debug", Path("e.jsonl")) == (
        telemetry.redact_query,
        telemetry.log.format,
        telemetry.log.access,
        telemetry.log.level,
        telemetry.events.file,
    )


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ("slow_threshold: 0", "slow_threshold", "must be greater than 0"),
        ("sessions: 0", "sessions", "must be at least 1"),
        ("redact_query: email", "redact_query", "must be a list"),
        ("log: {level: warning}", "log.level", "must be one of debug, info, warn, error"),
        ("log: {format: xml}", "log.format", "must be one of json, ecs, text"),
        ("events: {max_bytes: 10}", "events.max_bytes", "must be at least 4096"),
        ("events: {file: ''}", "events.file", "may not be empty"),
        ("access: true", "access", "it belongs in `telemetry.log.access`"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, content: str, key: str, words: str) -> None:
    path = tmp_path / "sidecar.yaml"
    path.write_text(f"telemetry: {{{content}}}")
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    (problem,) = caught.value.problems
    assert f"telemetry.{key}" == problem.key
    assert words in problem.message

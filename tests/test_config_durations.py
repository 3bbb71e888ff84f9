"""Durations in the file: with a unit or as a number of seconds, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, BeforeValidator

from config.durations import setting
from config.loader import ConfigError, load
from config.model import Settings
from config.schema import json_schema

COMPLETE = Path(__file__).resolve().parent.parent / "config" / "examples" / "complete.yaml"
IN_SECONDS_BUT_NO_DURATION = {"min_per_second", "rate"}


def is_duration(model: type[BaseModel], name: str) -> bool:
    def inside(metadata: Any) -> bool:
        return any(isinstance(one, BeforeValidator) and one.func is setting for one in metadata)

    field = model.model_fields[name]
    alternatives = getattr(field.annotation, "__args__", ())
    return inside(field.metadata) or any(inside(getattr(one, "__metadata__", ())) for one in alternatives)


def with_units(given: Any, found: list[str]) -> Any:
    """What a person would have written with a unit behind every duration."""
    if isinstance(given, BaseModel):
        written = {}
        for name in given.model_fields_set:
            value = getattr(given, name)
            if is_duration(type(given), name) and value is not None:
                found.append(name)
                written[name] = f"{value:.3f}s"
            else:
                written[name] = with_units(value, found)
        return written
    if isinstance(given, dict):
        return {key: with_units(value, found) for key, value in given.items()}
    return [with_units(value, found) for value in given] if isinstance(given, tuple) else given


def test_every_duration_of_the_complete_example_may_have_a_unit() -> None:
    settings = load(COMPLETE, {}).settings
    found: list[str] = []
    assert settings == Settings.model_validate(with_units(settings, found))
    assert {"connect", "open_for", "window", "attempt_timeout", "ttl", "shutdown_grace", "lease"} <= set(found)
    assert len(found) > 30


def sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for section in [schema, *schema["$defs"].values()]:
        yield from section.get("properties", {}).items()


def test_the_schema_says_which_they_are_and_no_other_number_is_told_in_seconds() -> None:
    for name, field in sections(json_schema()):
        numbers = [one for one in (field, *field.get("anyOf", ())) if one.get("type") == "number"]
        texts = [one for one in field.get("anyOf", ()) if one.get("pattern", "").endswith("(ms|s|m|h|d)$")]
        if numbers and "econds" in field.get("description", "") and name not in IN_SECONDS_BUT_NO_DURATION:
            assert texts, name


@pytest.mark.parametrize(
    ("written", "seconds"), [("500ms", 0.5), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800), ("7", 7)]
)
def test_a_duration_is_what_it_says(tmp_path: Path, written: str, seconds: float) -> None:
    (tmp_path / "s.yaml").write_text(f"shutdown_grace: {written}\n")
    assert seconds == load(tmp_path / "s.yaml", {}).settings.shutdown_grace
    assert seconds == load(None, {"SIDECAR__SHUTDOWN_GRACE": written}).settings.shutdown_grace


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("ten minutes", "must be a number of seconds, or a duration with its unit"),
        ("10 min", "as in 500ms, 90s, 10m, 1h or 2d"),
        ("'10'", "written without quotes, or with its unit"),
        ("0s", "must be greater than 0"),
        ("-5s", "must be a number of seconds, or a duration with its unit"),
        ("[1]", "must be a number"),
    ],
)
def test_what_is_no_duration_is_told_how_to_write_one(tmp_path: Path, written: str, told: str) -> None:
    (tmp_path / "s.yaml").write_text(f"shutdown_grace: {written}\n")
    with pytest.raises(ConfigError) as wrong:
        load(tmp_path / "s.yaml", {})
    assert told in str(wrong.value)

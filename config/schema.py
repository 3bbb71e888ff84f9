"""The JSON Schema of the configuration file, for editors and for `sidecar schema`."""

from __future__ import annotations

from typing import Any

from config.model import Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Draft 2020-12, made from the models, so that it can never say anything else than they do."""
    return {"$schema": DIALECT, **Settings.model_json_schema(mode="validation")}

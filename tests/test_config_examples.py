"""The shipped examples load everywhere, and the complete one really is; the JSON Schema accepts them all."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.document import parse
from config.keys import CHOSEN_NAME, LIST_ITEM, every_key
from config.loader import load
from config.model import Settings
from config.schema import DIALECT, json_schema

EXAMPLES = Path(__file__).resolve().parent.parent / "config" / "examples"
COMPLETE = EXAMPLES / "complete.yaml"
MINIMAL = EXAMPLES / "minimal.yaml"


def data_of(path: Path) -> Any:
    return parse(path.read_text(encoding="utf-8")).data


def schema_faults(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "$") -> Iterator[str]:
    """As much of JSON Schema as ours uses; a keyword that is not known here fails rather than passes."""
    known = {"$ref", "$schema", "$defs", "title", "description", "default", "type", "properties", "required"}
    known |= {"additionalProperties", "patternProperties", "items", "enum", "anyOf", "pattern"}
    known |= {"minimum", "maximum", "exclusiveMinimum", "propertyNames"}
    assert set() == schema.keys() - known
    if "$ref" in schema:
        yield from schema_faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    if "anyOf" in schema and all(list(schema_faults(value, one, root, path)) for one in schema["anyOf"]):
        yield f"{path}: none of the alternatives"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: not one of {schema['enum']}"
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path}: not of type {kind}"
        return
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path}: does not match {schema['pattern']}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        in_range = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        if not in_range or not value > schema.get("exclusiveMinimum", value - 1):
            yield f"{path}: out of range"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from schema_faults(item, schema.get("items", {}), root, f"{path}[{index}]")
    if isinstance(value, dict):
        yield from _faults_of_members(value, schema, root, path)


def _faults_of_members(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], path: str) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{path}.{key}: missing" for key in schema.get("required", ()) if key not in value)
    for key, inner in value.items():
        fitting = [entry for pattern, entry in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
        if key in properties or fitting:
            for entry in (*fitting, *([properties[key]] if key in properties else [])):
                yield from schema_faults(inner, entry, root, f"{path}.{key}")
        elif others is False:
            yield f"{path}.{key}: not allowed"
        elif others is not True:
            yield from schema_faults(inner, others, root, f"{path}.{key}")


def values_at(data: Any, path: tuple[str, ...]) -> list[Any]:
    """What stands at a key, for every chosen name and every item on the way."""
    if not path:
        return [data]
    if path[0] == LIST_ITEM and isinstance(data, list):
        return [value for inner in data for value in values_at(inner, path[1:])]
    if not isinstance(data, dict):
        return []
    if path[0] == CHOSEN_NAME:
        return [value for inner in data.values() for value in values_at(inner, path[1:])]
    return values_at(data[path[0]], path[1:]) if path[0] in data else []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # on a machine that has none of our files
    assert load(path, {}).settings.upstreams


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_schema_accepts_every_example(path: Path) -> None:
    schema = json_schema()
    assert [] == list(schema_faults(data_of(path), schema, schema))


def test_the_complete_example_names_every_key_there_is() -> None:
    data, text = data_of(COMPLETE), COMPLETE.read_text(encoding="utf-8")
    missing = []
    for key in every_key():
        if key[0] == "global_defaults" and len(key) > 1:
            continue  # the keys of a policy once more, and the comment there says so
        if values_at(data, key):
            continue
        # Where a section is left out (null), because no file can be named that exists everywhere, a comment shows it.
        shown = rf"^\s*# {key[-2]}:.*\b{key[-1]}:"
        if values_at(data, key[:-1]) != [None] or not re.search(shown, text, re.MULTILINE):
            missing.append(".".join(key))
    assert [] == missing


def test_the_walk_over_the_keys_reaches_every_corner() -> None:
    keys = {".".join(key) for key in every_key()}
    assert {
        "version",
        "probes.port",
        "egress.connect_ports",
        "policies.<name>.attempt_timeout",
        "upstreams.<name>.timeouts.connect",
        "upstreams.<name>.client_cert.key",
        "upstreams.<name>.breaker.open_for",
        "upstreams.<name>.operations.[].path",
        "upstreams.<name>.rules.[].when.json",
        "rules.[].code",
        "error_codes.<name>.retry",
        "global_defaults.max_attempts",
    } <= keys


def test_the_complete_example_shows_the_defaults_where_it_says_so() -> None:
    settings, defaults = load(COMPLETE, {}).settings, Settings()
    chosen = {"upstreams", "policies", "probes", "global_defaults", "subsystem_mappings"}
    chosen |= {"error_codes", "rules", "stages"}
    assert {key: getattr(defaults, key) for key in Settings.model_fields if key not in chosen} == {
        key: getattr(settings, key) for key in Settings.model_fields if key not in chosen
    }


def test_every_key_of_the_complete_example_is_explained() -> None:
    """By a comment on its line, or above it with no empty line in between."""
    unexplained = []
    explained = False
    for number, line in enumerate(COMPLETE.read_text(encoding="utf-8").splitlines(), 1):
        explained = line.strip() != "" and (explained or "# " in line)
        if line.strip() and not explained:
            unexplained.append(f"{number}: {line}")
    assert [] == unexplained


def test_the_minimal_example_is_minimal() -> None:
    lines = [line for line in MINIMAL.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 6


def test_the_schema_is_a_schema_of_the_named_dialect() -> None:
    schema = json_schema()
    assert DIALECT == schema["$schema"]
    assert set(Settings.model_fields) == set(schema["properties"])


def test_the_schema_explains_every_key() -> None:
    schema = json_schema()
    sections = {"Settings": schema, **schema["$defs"]}
    silent = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, entry in section["properties"].items()
        if "description" not in entry and "description" not in sections[entry.get("$ref", "/").rpartition("/")[2]]
    ]
    assert [] == silent


@pytest.mark.parametrize(
    "data",
    [
        {"limts": {}},
        {"listen": {"port": 70000}},
        {"listen": {"port": "4140"}},
        {"version": "2.0.0"},
        {"egress": {"mode": "shut"}},
        {"probes": {"port": 1}},
        {"upstreams": {"_a": {}}},
        {"upstreams": {"a": {"timeouts": {"connect": 0}}}},
        {"upstreams": {"a": {"client_cert": {"cert": "x"}}}},
        {"policies": {"a": {"max_attempts": 11}}},
        {"policies": {"a": {"jitter_amount": 2}}},
        {"policies": {"a": {"retry_status_codes": [404]}}},
        {"policies": {"a": {"retryable_errors": ["timeout"]}}},
        {"global_defaults": {"backoff_type": "quadratic"}},
        {"upstreams": {"a": {"rules": [{"when": {"status": 99}, "code": "CONFLICT"}]}}},
        {"upstreams": {"a": {"rules": [{"when": {"json": {"a": {}}}, "code": "CONFLICT"}]}}},
        {"upstreams": {"a": {"rules": [{"when": {"exception": "BAD_GATEWAY"}, "code": "CONFLICT"}]}}},
        {"upstreams": {"a": {"rules": [{"when": {"header": {"a": True}}, "code": "CONFLICT"}]}}},
        {"upstreams": {"a": {"operations": [{"path": "/x"}]}}},
        {"upstreams": {"a": {"egress_proxy": "https://a.test:1"}}},
        {"upstreams": {"a": {"breaker": {"failure_ratio": 0}}}},
        {"subsystem_mappings": {"a": {"b": {"c": 5}}}},
        {"subsystem_mappings": {"a": {"b c": {}}}},
        {"error_codes": {"lower": {}}},
        {"error_codes": {"CONFLICT": {"status": 200}}},
        {"stages": {"fetch": 0}},
        {"telemetry": {"log": {"level": "loud"}}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(data: dict[str, Any]) -> None:
    schema = json_schema()
    assert [] != list(schema_faults(data, schema, schema))


@pytest.mark.parametrize("client_cert", [None, "both.pem", {"cert": "a.pem", "key": "b.pem"}])
def test_the_schema_accepts_every_form_of_a_client_certificate(client_cert: object) -> None:
    schema = json_schema()
    data = {"upstreams": {"a": {"client_cert": client_cert}}}
    assert [] == list(schema_faults(data, schema, schema))


@pytest.mark.parametrize(
    "settings",
    [
        {"egress_proxy": None},
        {"egress_proxy": "http://user:pw@corp.test:3128"},
        {"egress_proxy": ["http://a.test:1", "http://b.test:2"]},
        {"rules": [{"when": {"status": "5xx"}, "code": "CONFLICT"}]},
        {
            "rules": [
                {"when": {"status": [429, "5xx"], "header": {"x": "*"}, "json": {"a.b": [1, None, "x"]}}, "code": "A"}
            ]
        },
        {"rules": [{"when": {"exception": ["CONNECTION_RESET"]}, "code": "CONFLICT"}]},
        {"breaker": {"slow_after": None}},
    ],
)
def test_the_schema_accepts_every_form_of_a_value(settings: dict[str, Any]) -> None:
    schema = json_schema()
    assert [] == list(schema_faults({"upstreams": {"a": settings}}, schema, schema))

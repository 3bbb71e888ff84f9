"""The shape of the tree, kept by machine: which way imports point, what stays pure, how files are named.

It reads source with `ast` and never imports the product, so a broken module cannot hide a broken rule.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each package may import itself and those to its right: sidecar → telemetry → config.
ARROW = ("sidecar", "telemetry", "config")
OURS = frozenset({*ARROW, "tests", "benchmarks"})

# What a package may take from elsewhere, beside the standard library. `sidecar` may take anything locked.
FOREIGN = {
    "telemetry": {"grpc", "opentelemetry", "orjson", "prometheus_client", "requests"},
    "config": {"annotated_types", "idna", "pydantic", "pydantic_core", "typing_extensions", "yaml"},
}

# A decision is made by code that is told the time and cannot do anything.
IMPURE = {
    *("asyncio", "aiohttp", "httptools", "uvloop", "socket", "ssl", "selectors"),
    *("concurrent", "multiprocessing", "subprocess", "threading", "os", "logging"),
    *("time", "random", "secrets"),
}

VAGUE_NAMES = {"util", "utils", "manager", "managers", "helper", "helpers", "base", "common"}
LONGEST_FILE = 660  # a guideline: an object is never sliced to stay below it

# Written so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.\-])/(?:wo" + r"rk|ro" + r"ot|tmp/d" + r"ev)/")
INDEX = re.compile(
    r"py" + r"pi\.org|python" + r"hosted|npm" + r"js\.org|--(?:extra-)?in" + r"dex-url|--find" + r"-links"
)


def product_files() -> list[Path]:
    """Python files of the three packages; the examples are programs to read, not part of the product."""
    files = [path for package in ARROW for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in files if path.relative_to(ROOT).parts[:2] != ("config", "examples"))


def all_python_files() -> list[Path]:
    extra = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return product_files() + sorted(extra)


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, wherever in it, as (line, dotted name)."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # relative: spelled out from the file's own place
                parent = path.relative_to(ROOT).parts[: -node.level]
                yield node.lineno, ".".join((*parent, *filter(None, [node.module])))
            else:
                yield node.lineno, node.module or ""


def test_the_walk_finds_the_product() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in product_files()}
    assert set(ARROW) == found, "a walk that finds nothing would make every other test here pass"


def test_imports_point_from_sidecar_to_telemetry_to_config_and_never_back() -> None:
    offenders = []
    for path in product_files():
        package = path.relative_to(ROOT).parts[0]
        allowed = ARROW[ARROW.index(package) :]
        offenders += [
            f"{shown(path)}:{line} imports {name}"
            for line, name in imports(path)
            if name.split(".")[0] in OURS and name.split(".")[0] not in allowed
        ]
    assert [] == offenders


def test_telemetry_and_config_know_only_the_libraries_they_are_for() -> None:
    offenders = []
    for path in product_files():
        package = path.relative_to(ROOT).parts[0]
        if package not in FOREIGN:
            continue
        allowed = FOREIGN[package] | OURS | sys.stdlib_module_names
        offenders += [
            f"{shown(path)}:{line} imports {name}" for line, name in imports(path) if name.split(".")[0] not in allowed
        ]
    assert [] == offenders


def test_policies_import_nothing_that_can_wait_look_or_roll_dice() -> None:
    offenders = [
        f"{shown(path)}:{line} imports {name}"
        for path in product_files()
        if path.relative_to(ROOT).parts[:2] == ("sidecar", "policy")
        for line, name in imports(path)
        if name.split(".")[0] in IMPURE
    ]
    assert [] == offenders


def test_the_record_needs_nothing_but_the_standard_library() -> None:
    record = ROOT / "telemetry" / "record.py"
    assert [] == [
        f"{shown(record)}:{line} imports {name}"
        for line, name in imports(record)
        if name.split(".")[0] not in sys.stdlib_module_names
    ]


def test_no_module_has_a_name_that_says_nothing() -> None:
    offenders = set()
    for path in all_python_files():
        for part in path.relative_to(ROOT).with_suffix("").parts:
            if VAGUE_NAMES & set(part.lower().strip("_").split("_")):
                offenders.add(shown(path))
    assert set() == offenders, "name the file after the noun it owns"


def test_every_module_opens_with_its_law() -> None:
    missing = [shown(path) for path in product_files() if not (ast.get_docstring(parsed(path)) or "").strip()]
    assert [] == missing


def test_no_file_of_the_product_is_too_long_to_read_at_once() -> None:
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in product_files()}
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}
    assert {} == too_long, "split by noun"


def test_the_three_packages_lie_side_by_side() -> None:
    assert [] == [package for package in ARROW if not (ROOT / package / "__init__.py").is_file()]


@pytest.mark.parametrize("package", ["telemetry", "config"])
def test_no_folder_of_the_tests_shadows_a_package(package: str) -> None:
    assert [] == [shown(path) for path in (ROOT / "tests").rglob(f"{package}/__init__.py")]


def kept_files() -> list[Path]:
    """Files under version control and those about to be: everything that is not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so there is no telling which files are kept")
    paths = (ROOT / name for name in listing.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize(
    "pattern", [pytest.param(MACHINE_PATH, id="machine path"), pytest.param(INDEX, id="package index")]
)
def test_no_kept_file_names_a_place_that_exists_only_somewhere(pattern: re.Pattern[str]) -> None:
    offenders = []
    for path in kept_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or a recording
        offenders += [
            f"{shown(path)}:{number} {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert [] == offenders

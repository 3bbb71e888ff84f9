"""What is shipped is what is in the tree: package list, wheel, command, locks, image."""

import configparser
import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sidecar", "telemetry", "config")
LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-build.lock")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str) -> dict[str, tuple[str, list[str]]]:
    """A lock file as name → (version, its hashes)."""
    text = (ROOT / lock).read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
            assert pin, f"{lock}: not an exact version: {line[:80]}"
            found[normal(pin[1])] = (pin[2], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line))
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the tree with the setuptools that is installed, fetching nothing."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    return zipfile.ZipFile(next((tree / "dist").glob("*.whl")))


def test_the_package_list_is_what_is_on_disk() -> None:
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert on_disk == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_module_on_disk_is_in_a_listed_package() -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    stray = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if ".".join(path.parent.relative_to(ROOT).parts) not in listed | {"config.examples"}
    ]
    assert [] == stray, "a folder without __init__.py would be missing from the wheel"


def test_the_wheel_carries_the_files_that_are_not_code(wheel: zipfile.ZipFile) -> None:
    examples = {path.relative_to(ROOT).as_posix() for path in (ROOT / "config" / "examples").glob("*.yaml")}
    markers = {f"{package}/py.typed" for package in PACKAGES}
    wanted = examples | markers | {"config/errors.yaml"}
    assert set() == wanted - set(wheel.namelist())


def test_the_wheel_carries_nothing_but_the_three_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert set(PACKAGES) == tops


def test_the_wheel_installs_the_sidecar_command(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points.read_string(wheel.read(name).decode())
    assert {"sidecar": "sidecar.__main__:main"} == dict(entry_points["console_scripts"])


def test_the_wheel_states_its_licence(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert "Apache-2.0" == email.message_from_bytes(wheel.read(name))["License-Expression"]


def test_the_console_script_names_something_that_can_be_called() -> None:
    module, _, function = PYPROJECT["project"]["scripts"]["sidecar"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_program_and_the_package_agree_on_the_version() -> None:
    assert PYPROJECT["project"]["version"] == importlib.import_module("sidecar").__version__


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_requirement_has_a_hash(lock: str) -> None:
    requirements = locked(lock)
    assert requirements
    assert [] == [name for name, (_, hashes) in requirements.items() if not hashes]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_place_to_fetch_from(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    assert [] == re.findall(r"^.*(?:://|--(?:extra-)?index|--find|file:|(?<!\w)@ ).*$", text, re.MULTILINE)


def test_the_lock_answers_every_dependency_of_the_project() -> None:
    wanted = {normal(re.split(r"[\s=<>~!;\[]", line)[0]) for line in PYPROJECT["project"]["dependencies"]}
    assert set() == wanted - locked("requirements.lock").keys()


def test_the_development_lock_answers_every_tool() -> None:
    groups = PYPROJECT["dependency-groups"]
    lines = [line for group in groups.values() for line in group if isinstance(line, str)]
    wanted = {normal(re.split(r"[\s=<>~!;\[]", line)[0]) for line in lines}
    assert set() == wanted - locked("requirements-dev.lock").keys()


def test_tests_run_with_the_very_versions_that_are_shipped() -> None:
    shipped, tested = locked("requirements.lock"), locked("requirements-dev.lock")
    assert shipped == {name: tested.get(name) for name in shipped}


def test_aiohttp_is_pinned_exactly_because_its_private_parts_are_used() -> None:
    pins = [line for line in PYPROJECT["project"]["dependencies"] if line.startswith("aiohttp")]
    assert [f"aiohttp=={locked('requirements.lock')['aiohttp'][0]}"] == pins


def test_ci_is_what_a_person_types() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert "set -euo pipefail" == commands[0]
    assert "make test" == commands[-1]


@pytest.mark.parametrize("script", ["run", "python", "system-packages"])
def test_the_scripts_can_be_executed(script: str) -> None:
    assert os.access(ROOT / ".ci" / script, os.X_OK)


@pytest.mark.parametrize("target", ["run", "test", "lint", "bench", "demo", "lock", "clean", "help"])
def test_make_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("command", ["make run", "make test"])
def test_the_readme_tells_a_newcomer_the_command(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


def instructions(keyword: str) -> list[str]:
    """The arguments of every instruction of one kind in the Dockerfile, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(None, 1)[1].strip() for line in text.splitlines() if line.startswith(f"{keyword} ")]


def test_the_image_is_built_in_stages() -> None:
    assert 2 == len(instructions("FROM"))


def test_the_image_does_not_run_as_root() -> None:
    assert ["10001:10001"] == instructions("USER")


def test_the_image_says_whether_it_is_ready() -> None:
    [check] = instructions("HEALTHCHECK")
    assert ["sidecar", "health"] == json.loads(check.split("CMD", 1)[1])


def test_the_image_starts_the_sidecar_command() -> None:
    assert (["sidecar"], ["run"]) == (
        json.loads(instructions("ENTRYPOINT")[0]),
        json.loads(instructions("CMD")[0]),
    )


def test_the_image_keeps_its_state_in_its_one_volume() -> None:
    assert ["/var/lib/sidecar"] == instructions("VOLUME")
    assert "SIDECAR__STATE_DIR=/var/lib/sidecar" in " ".join(instructions("ENV"))


def test_the_image_installs_only_what_matches_a_hash() -> None:
    fetching = re.findall(r"pip (?:--python \S+ )?install (.*?)(?:&&|$)", " && ".join(instructions("RUN")))
    assert fetching
    assert [] == [step for step in fetching if "--require-hashes" not in step and "--no-index" not in step]


def test_everything_the_image_copies_is_in_the_build_context() -> None:
    admitted = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in instructions("COPY"):
        if line.startswith("--from"):
            continue
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in admitted

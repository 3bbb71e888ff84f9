"""The work done on what others send grows with its length and not faster: counted in steps, with texts that are made to
be slow, for every regular expression of the source and every function that judges a path, a header or a text."""

from __future__ import annotations

import importlib
import pkgutil
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import config
import sidecar
import telemetry
from config.credentials import credential_shapes, credentials_of_query, is_credential_name
from config.operations import Operation, path_regex
from config.rules import Rule
from sidecar.durable.filters import match_of
from sidecar.failures import Malformed
from sidecar.policy.caller import identity
from sidecar.policy.choice import Operations
from sidecar.policy.classify import Classifier
from sidecar.policy.verdict import retry_after, server_verdict
from sidecar.routing import parse_authority
from telemetry.redact import Redactor
from tests.doubles.steps import Backtracking, steps_of

STEPS_FOR_A_CHARACTER = 150
"""Twice the most that any expression takes; one that is quadratic takes thousands on texts of this length."""
LENGTH = 1_000
_SEARCHING = "search|finditer|findall|sub|subn|split"
_OF_OUR_OWN_WORDS = {"config.loader._WITH_ADDRESSES"}
"""For a file that its owner writes, once when the sidecar starts."""


def expressions() -> Iterator[tuple[str, re.Pattern[str] | re.Pattern[bytes], bool]]:
    """Every compiled one that a module holds, and whether it is looked for or has to be the whole text."""
    for package in (config, telemetry, sidecar):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            module = importlib.import_module(found.name)
            source = module.__loader__.get_source(found.name)  # type: ignore[union-attr]
            for name, value in vars(module).items():
                for number, one in enumerate(value if isinstance(value, tuple) else (value,)):
                    if isinstance(one, re.Pattern) and re.search(rf"^{name}\b", source, re.MULTILINE):
                        looked_for = re.search(rf"\b{name}\.(?:{_SEARCHING})\(", source) is not None
                        yield f"{found.name}.{name}{number or ''}", one, looked_for


EXPRESSIONS = list(expressions())


def traps(source: str) -> Iterator[str]:
    """Texts of the characters that the expression itself speaks of, repeated, with something wrong at the end."""
    letters = sorted(set(re.sub(r"\\[AbBdDsSwWZ]|\(\?P<\w+>|[\\^$()?*+{}|]", "", source))) or ["a"]
    alphabet = [*letters, "a", "A", "0", " ", "-", ".", ":", "=", '"', "'", "/", "@", "\t", "é"]
    pieces = [*re.findall(r"[A-Za-z]{2,}|:/+|[-_.:;=]", source), *alphabet]
    dice = random.Random(source)
    for piece in pieces:
        yield piece * (LENGTH // len(piece))
    for _ in range(15):
        begin, pump, end = ("".join(dice.choices(pieces, k=dice.randint(1, 3))) for _ in range(3))
        yield begin + pump * (LENGTH // len(pump)) + end


@pytest.mark.parametrize(
    ("expression", "looked_for"),
    [pytest.param(one, looked_for, id=name) for name, one, looked_for in EXPRESSIONS if name not in _OF_OUR_OWN_WORDS],
)
def test_no_expression_of_the_source_goes_back_and_forth(
    expression: re.Pattern[str] | re.Pattern[bytes], looked_for: bool
) -> None:
    of_bytes = isinstance(expression.pattern, bytes)
    source = expression.pattern.decode("latin-1") if isinstance(expression.pattern, bytes) else expression.pattern
    counted = Backtracking(source, expression.flags & ~re.UNICODE | (re.ASCII if of_bytes else 0))
    for text in traps(source):
        steps = counted.searching(text) if looked_for else counted.matching(text)
        assert steps < STEPS_FOR_A_CHARACTER * len(text), f"{steps} steps on {text[:40]!r}"


def test_most_expressions_are_found() -> None:
    assert len(EXPRESSIONS) > 60


# ---- patterns of paths -----------------------------------------------------------------------------------------------

_SEGMENT = st.lists(st.sampled_from(["{a}", "a", "b", ".", "..."]), min_size=1, max_size=7).map("".join)
_PATTERN = st.lists(_SEGMENT.filter(lambda it: "}{" not in it), min_size=1, max_size=4).map(
    lambda it: "/" + "/".join(it)
)
_PATH = st.lists(st.sampled_from(["a", "b", ".", "/", "a.b", "..."]), max_size=24).map(lambda it: "/" + "".join(it))


@given(_PATTERN, _PATH)
def test_a_pattern_matches_as_if_every_way_had_been_tried(pattern: str, path: str) -> None:
    every_way = "/".join(re.escape(part).replace(r"\{a\}", "[^/]+") for part in pattern.split("/"))
    assert (re.fullmatch(every_way, path) is not None) == (path_regex(pattern).fullmatch(path) is not None)


@given(_PATTERN, st.sampled_from(["a", "b", ".", "a.", "..", "...", "a/", "/"]), st.sampled_from(["", "/", "b", "/**"]))
def test_a_pattern_takes_steps_for_each_character_and_not_for_each_pair(pattern: str, piece: str, end: str) -> None:
    counted = Backtracking(path_regex(pattern + end * (end == "/**")).pattern, re.DOTALL)
    text = "/" + piece * (2_000 // len(piece)) + end
    assert counted.matching(text) < (len(pattern) + 10) * len(text)


def test_counting_tells_an_expression_that_backtracks() -> None:
    counted = Backtracking(r"/[^/]+\.\.\.[^/]+\.\.\.[^/]+x")
    assert 10 * counted.matching("/" + "." * 30) < counted.matching("/" + "." * 90)
    assert counted.matches("/a...b...cx") and not counted.matches("/a...b..cx")


# ---- functions -------------------------------------------------------------------------------------------------------

REDACTOR = Redactor(["mine"], ["/{**}", "/hooks/{id}", "/a/{b}.{c}/d/{e}", "/*/*/{x}"])
OPERATIONS = Operations(
    [
        Operation(name="compare", path="/repos/{owner}/{repo}/compare/{base}...{head}"),
        Operation(name="three", path="/{a}.{b}.{c}"),
        Operation(name="rest", path="/x/**"),
    ]
)
CLASSIFIER = Classifier(
    {}, [Rule.model_validate({"when": {"json": {"a.0.b": "x"}, "header": {"x-a": "1"}}, "code": "CONFLICT"})]
)


def _fields(text: str) -> list[tuple[bytes, bytes]]:
    value = text.encode()
    return [(b"X-A", value), (b"Retry-After", value), (b"Date", value), (b"X-Should-Retry", value)]


def _authority(text: str) -> None:
    with suppress(Malformed):
        parse_authority(text)


WORK: dict[str, Callable[[str], object]] = {
    "path of a secret": REDACTOR.path,
    "url": REDACTOR.url,
    "query": REDACTOR.query,
    "text": REDACTOR.text,
    "headers": lambda text: REDACTOR.headers({"user-agent": text, text: text}),
    "for a fallback": lambda text: REDACTOR.without_secrets(text.encode()),
    "shape": lambda text: list(credential_shapes(text)),
    "name": is_credential_name,
    "credentials of a query": credentials_of_query,
    "caller": lambda text: identity([(text.encode(), text.encode())], text),
    "operation": lambda text: OPERATIONS.match("GET", text.encode()),
    "classification": lambda text: CLASSIFIER.classify(500, _fields(text), text.encode()),
    "waiting": lambda text: (retry_after(_fields(text), 0.0), server_verdict(_fields(text))),
    "filter": lambda text: match_of(f"a{text}"),
    "authority": _authority,
}
PIECES = ["/", "a/", "//", "/../a", "a;", "a=b&", "eyJ", "eyJaaaaaaaaa.", ".", "%2f", "%25", "token=", "key:", "aB", "a-", "@", "[",
          '{"a":', "sk-", ",", "a:b@", "://", "key-", " "]  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_twice_the_text_is_twice_the_work(name: str) -> None:
    work = WORK[name]
    for piece in PIECES:
        once, twice = (steps_of(partial(work, piece * times)) for times in (250, 500))
        assert twice < 2.2 * once + 500, f"{once} steps, and {twice} for twice as much of {piece!r}"

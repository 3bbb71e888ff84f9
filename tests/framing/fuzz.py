"""Many messages against the model of RFC 9112: `python -m tests.framing.fuzz`, or `make fuzz`.

Half of the examples are conversations of an app, half answers of an upstream; one in ten of the latter goes through a
whole sidecar over sockets. The first difference ends the run, made as small as Hypothesis can, with the seed that finds
it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import uvloop
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.framing.messages import Answer, answers, conversations
from tests.framing.ours import AnswerSide, RequestSide
from tests.framing.property import wrong_with_answers, wrong_with_requests
from tests.framing.through import Through

BUFFER_LIMITS = [0, 8, 65_536]
"""Bodies of answers up to so many bytes are completed before they are passed on: the paths differ."""
_EVERY = 10_000


def fuzz(examples: int, number: int | None = None, *, tell: bool = False) -> None:
    """So many of both kinds. Raises AssertionError with the smallest counterexample found."""
    profile = settings(
        max_examples=examples // 2,
        print_blob=False,
        deadline=None,
        database=None,
        derandomize=number is None,
        suppress_health_check=list(HealthCheck),
    )
    done, began = 0, time.monotonic()

    def count() -> None:
        nonlocal done
        done += 1
        if tell and done % _EVERY == 0:
            print(f"{done:8,} examples, {time.monotonic() - began:5.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder, closing(uvloop.new_event_loop()) as loop:
        side, through = RequestSide(f"{folder}/parser"), Through()
        loop.run_until_complete(through.start(Path(folder) / "whole"))

        @profile
        @given(conversations())
        def of_apps(segments: list[bytes]) -> None:
            count()
            wrong = wrong_with_requests(side, segments)
            assert wrong is None, wrong

        @profile
        @given(answers(), st.sampled_from(BUFFER_LIMITS))
        def of_upstreams(asked: Sequence[tuple[Answer, Sequence[bytes]]], limit: int) -> None:
            count()
            wrong = wrong_with_answers(AnswerSide(limit), asked)
            assert wrong is None, wrong

        @settings(profile, max_examples=examples // 20)
        @given(answers(), st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
        def of_upstreams_through_all(asked: Sequence[tuple[Answer, Sequence[bytes]]], version: bytes) -> None:
            count()
            for one, segments in asked:
                wrong = loop.run_until_complete(through.wrong(one, segments, version))
                assert wrong is None, wrong

        try:
            for run in (of_apps, of_upstreams, of_upstreams_through_all):
                (run if number is None else seed(number)(run))()
        finally:
            side.close()
            loop.run_until_complete(through.stop())
            if tell:
                print(f"{done:,} examples in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.framing.fuzz", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--examples", type=int, default=200_000, help="how many (default: 200000)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="that of an earlier run (default: a new one)"
    )
    chosen = parser.parse_args()
    print(f"{chosen.examples:,} examples, --seed {chosen.seed}", flush=True)
    try:
        fuzz(chosen.examples, chosen.seed, tell=True)
    except AssertionError as difference:
        print("\n".join([str(difference), *getattr(difference, "__notes__", [])]))
        print("make it a file of tests/differential, and mend its cause")
        return 1
    print("no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())

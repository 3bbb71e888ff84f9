"""A parser that tells a wrong word together with the one that was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NoReturn

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (--?[\w-]+)")


class SuggestingParser(argparse.ArgumentParser):
    """`sidecar sesions` → did you mean "sessions"?"""

    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches  # only needed once something is wrong

        chosen, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
        near: list[str] = []
        if chosen is not None:
            near = get_close_matches(chosen[1], re.findall(r"[\w-]+", chosen[2]), n=1)
        elif unknown is not None:
            near = get_close_matches(unknown[1], sorted(set(_flags(self))), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        if unknown is not None and near == [unknown[1]]:
            hint = "; other commands have that, this one does not: see its --help"
        super().error(f"{message}{hint}")


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _flags(below)

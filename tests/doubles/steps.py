"""How much work something is, counted: a second would say more about the machine.

`steps_of` counts the bytecode that a function runs. A regular expression runs in C and is out of its sight, so
`Backtracking` executes it here: the same tree, the same order of choices, one step for each instruction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from re import _compiler as compiler  # type: ignore[attr-defined]  # there is no public form of the tree
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as tree  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

MOST_STEPS = 1_500_000


def steps_of(work: Callable[[], object], package: str = "/") -> int:
    """Instructions of the interpreter in code whose file has `package` in its name."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if package not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class Backtracking:
    """A regular expression as a program with a stack of choices that are still open."""

    def __init__(self, source: str, flags: int = 0) -> None:
        parsed = tree.parse(source, flags)
        self._flags = parsed.state.flags
        self._program: list[tuple[Any, ...]] = []
        self._emit(parsed)
        self._program.append(("match",))

    def searching(self, text: str) -> int:
        """Steps to look for all places where it matches."""
        at = total = 0
        while at <= len(text):
            end, steps = self._run(text, at, whole=False)
            total += steps
            at = max(at + 1, -1 if end is None else end)
        return total

    def matching(self, text: str) -> int:
        """Steps to see whether it is all of the text."""
        return self._run(text, 0, whole=True)[1]

    def matches(self, text: str) -> bool:
        return self._run(text, 0, whole=True)[0] is not None

    # ---- the tree as a program -----------------------------------------------------------------------------------

    def _emit(self, items: Any) -> None:
        for kind, argument in items:
            self._emit_one(kind, argument)

    def _emit_one(self, kind: Any, argument: Any) -> None:
        program = self._program
        if kind in (op.LITERAL, op.NOT_LITERAL, op.IN, op.ANY):
            program.append(("one", _judge(kind, argument, self._flags)))
        elif kind is op.SUBPATTERN:
            self._emit(argument[-1])
        elif kind is op.BRANCH:
            self._branch(argument[1])
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            self._repeat(*argument, greedy=kind is op.MAX_REPEAT)
        elif kind is op.POSSESSIVE_REPEAT:
            self._apart("atomic", lambda: self._repeat(*argument, greedy=True))
        elif kind is op.ATOMIC_GROUP:
            self._apart("atomic", lambda: self._emit(argument))
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            word = "ahead" if argument[0] > 0 else "behind"
            self._apart(f"{word}{'' if kind is op.ASSERT else ' not'}", lambda: self._emit(argument[1]))
        elif kind is op.AT:
            program.append(("at", argument))
        else:
            raise NotImplementedError(kind)

    def _apart(self, word: str, emit: Callable[[], None]) -> None:
        place = len(self._program)
        self._program.append(())
        emit()
        self._program.append(("match",))
        self._program[place] = (word, len(self._program))

    def _branch(self, ways: list[Any]) -> None:
        program, jumps = self._program, []
        for number, way in enumerate(ways):
            place = len(program)
            if number < len(ways) - 1:
                program.append(())
            self._emit(way)
            if number < len(ways) - 1:
                jumps.append(len(program))
                program.append(())
                program[place] = ("try", place + 1, len(program))
        for jump in jumps:
            program[jump] = ("go", len(program))

    def _repeat(self, least: int, most: Any, items: Any, *, greedy: bool) -> None:
        program = self._program
        for _ in range(least):
            self._emit(items)
        if most is op.MAXREPEAT:
            place = len(program)
            program.append(())
            self._emit(items)
            program.append(("go", place))
            program[place] = _choice(place + 1, len(program), greedy)
            return
        places = []
        for _ in range(most - least):
            places.append(len(program))
            program.append(())
            self._emit(items)
        for place in places:
            program[place] = _choice(place + 1, len(program), greedy)

    # ---- running it ----------------------------------------------------------------------------------------------

    def _run(self, text: str, start: int, *, whole: bool, entry: int = 0) -> tuple[int | None, int]:
        open_choices, steps = [(entry, start)], 0
        while open_choices:
            place, at = open_choices.pop()
            while True:
                steps += 1
                assert steps < MOST_STEPS, "too many steps to go on counting"
                word, *more = self._program[place]
                if word == "one":
                    if at == len(text) or not more[0](text[at]):
                        break
                    place, at = place + 1, at + 1
                elif word == "try":
                    open_choices.append((more[1], at))
                    place = more[0]
                elif word == "go":
                    place = more[0]
                elif word == "at":
                    if not _stands(more[0], text, at):
                        break
                    place += 1
                elif word == "match":
                    if whole and at != len(text):
                        break
                    return at, steps
                else:
                    back = 1 if word.startswith("behind") else 0
                    end, taken = (None, 0) if at < back else self._run(text, at - back, whole=False, entry=place + 1)
                    steps += taken
                    if (end is None) != word.endswith("not"):
                        break
                    place, at = more[0], at if word != "atomic" or end is None else end
        return None, steps


def _choice(on: int, out: int, greedy: bool) -> tuple[Any, ...]:
    return ("try", on, out) if greedy else ("try", out, on)


def _judge(kind: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    """Whether a single character is the one, or of the set: asked of the real thing."""
    single = tree.SubPattern(tree.State())
    single.state.flags = flags
    single.append((kind, argument))
    pattern = compiler.compile(single, flags)
    return lru_cache(None)(lambda character: pattern.fullmatch(character) is not None)


def _stands(where: Any, text: str, at: int) -> bool:
    before, behind = at > 0 and _is_word(text[at - 1]), at < len(text) and _is_word(text[at])
    if where is op.AT_BOUNDARY:
        return before != behind
    if where is op.AT_END_STRING:
        return at == len(text)
    if where is op.AT_BEGINNING:  # of a line, which is more often than of the text
        return at == 0 or text[at - 1] == "\n"
    if where is op.AT_END:
        return at == len(text) or text[at] == "\n"
    raise NotImplementedError(where)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"

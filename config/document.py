"""YAML text with the position of every key, and without YAML's traps.

A document is parsed once into a node tree, which knows lines, and from that into plain values. Duplicate keys
are faults, keys and dates stay text, nesting is bounded before anything recursive runs (the C parser would
overflow its stack). A fault's message never repeats the document's text: a syntax error may sit in the middle
of a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from config.checks import KeyPath

_DEEPEST = 50
_FAST_OR_PLAIN: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_TEXT = "tag:yaml.org,2002:str"
# A bare `on`, `no` or `1` in the place of a key means its letters, not a truth or a number.
_READ_AS_TEXT_IN_KEYS = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "null", "value")}
_HINTS = {
    "found undefined alias": 'text that begins with `*` must be in quotes, as in "*.example.com"',
    "mapping values are not allowed in this context": (
        "a second `:` on this line, or lines that are not indented alike; quote text that contains `: `"
    ),
    "but found another document": "the file holds a second document after `---`; one is expected",
    "found unhashable key": "a key must be plain text, not a list or a mapping",
    "found unexpected end of stream": "a quote was opened and never closed",
    "did not find expected node content": (
        "a bracket or brace was opened and never closed, or text that begins with `:` or `[` is not in quotes"
    ),
    "did not find expected ',' or ']'": "a list opened with `[` is never closed, or a `,` is missing",
    "did not find expected ',' or '}'": "a mapping opened with `{` is never closed, or a `,` is missing",
    "did not find expected key": "lines that belong together are not indented alike",
    "did not find expected '-' indicator": "the items of this list are not indented alike",
    "could not find expected ':'": "a `:` is missing after a key, or a line is indented differently",
}


class _Loader(_FAST_OR_PLAIN):  # type: ignore[misc]  # the class is chosen at run time
    """The safe loader, except that what looks like a date stays text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # the parent declares it as a plain class attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in _FAST_OR_PLAIN.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with the text itself. Lines and columns count from 1."""

    message: str
    line: int | None = None
    column: int | None = None
    path: KeyPath = ()


class UnreadableDocument(Exception):
    """The text is not YAML, so nothing more can be said about it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values, and where they stand."""

    data: Any = None
    faults: tuple[Fault, ...] = ()
    root: yaml.Node | None = field(default=None, repr=False)

    def position(self, path: KeyPath) -> tuple[int, int, int] | None:
        """(line, column, depth) of the deepest part of the path that the text has; None in an empty one."""
        if self.root is None:
            return None
        node, mark, depth = self.root, self.root.start_mark, 0
        for part in path:
            entry = _entry(node, part)
            if entry is None:
                break
            mark, node = entry
            depth += 1
        return mark.line + 1, mark.column + 1, depth


def parse(text: str, *, aliases: bool = True) -> Document:
    """Read one YAML document; raises UnreadableDocument when it is not one."""
    _refuse_control_characters(text)
    try:
        _refuse_dangerous_shapes(text, aliases)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Document()
            faults = tuple(_keys_as_text(root))  # before construction, which resolves merge keys in place
            return Document(loader.construct_document(root), faults, root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise UnreadableDocument(_syntax_fault(text, error)) from None
    except yaml.YAMLError:
        raise UnreadableDocument(Fault("this is not valid YAML")) from None
    except ValueError:
        raise UnreadableDocument(Fault("a number in this text cannot be read; if it is text, quote it")) from None


def _refuse_control_characters(text: str) -> None:
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match is not None:
        line = text.count("\n", 0, match.start()) + 1
        column = match.start() - text.rfind("\n", 0, match.start())
        message = f"YAML does not allow the control character U+{ord(match[0]):04X}; remove it"
        raise UnreadableDocument(Fault(message, line, column))


def _refuse_dangerous_shapes(text: str, aliases: bool) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                message = f"nested more than {_DEEPEST} levels deep; no setting is"
                line = event.start_mark.line + 1 if event.start_mark is not None else None
                raise UnreadableDocument(Fault(message, line))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent) and not aliases:
            raise UnreadableDocument(Fault(f"{_HINTS['found undefined alias']}; aliases only work in a file"))


def _keys_as_text(root: yaml.Node) -> list[Fault]:
    """Make every key text, and find those that are given twice."""
    faults: list[Fault] = []
    seen_nodes: set[int] = set()
    waiting: list[tuple[KeyPath, yaml.Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen_nodes:
            continue  # an alias of something already looked at, perhaps of itself
        seen_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(((*path, index), item) for index, item in enumerate(node.value))
        elif isinstance(node, yaml.MappingNode):
            first_lines: dict[str, int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.tag in _READ_AS_TEXT_IN_KEYS:
                    key.tag = _TEXT
                waiting.append(((*path, key.value), value))
                line = key.start_mark.line + 1
                first = first_lines.get(key.value)
                if first is None:
                    first_lines[key.value] = line
                else:
                    message = f"this key is given twice, first on line {first}; keep one"
                    faults.append(Fault(message, line, key.start_mark.column + 1, (*path, key.value)))
    return faults


def _entry(node: yaml.Node, part: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode):
        if isinstance(part, int) and part < len(node.value):
            item = node.value[part]
            return item.start_mark, item
    elif isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # the last of two duplicates is the one that counts
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark, value
    return None


def _syntax_fault(text: str, error: yaml.MarkedYAMLError) -> Fault:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
    problem = error.problem or error.context or ""
    if "scanning an alias" in (error.context or ""):
        hint = _HINTS["found undefined alias"]
    elif "cannot start any token" in problem:
        hint = _hint_for_character(text, line, column)
    elif "tag" in problem:
        hint = "tags are not supported; text that begins with `!` must be in quotes"
    else:
        hint = next((hint for known, hint in _HINTS.items() if known in problem), problem)
    return Fault(f"this is not valid YAML: {hint}", line, column)


def _hint_for_character(text: str, line: int | None, column: int | None) -> str:
    lines = text.split("\n")
    at = lines[line - 1][column - 1 : column] if line and column and line <= len(lines) else ""
    if at == "\t":
        return "a tab is used for indentation; use spaces"
    return f"text may not begin with `{at}` unless it is in quotes"

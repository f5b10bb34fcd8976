# SPDX-License-Identifier: Apache-2.0
"""Pure: environment variables that travel to other hosts, and the file `.deepspeed_env`.

A value is a list of pieces, text or a reference to a variable. What must hold: only references of the form `$NAME` and
`${NAME}` in the file are ever replaced, by the value that the variable has on the target host; everything else in a
value is taken literally (`\\$` stands for a plain `$`), and no shell sees it unquoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed.errors import LauncherError

__all__ = ["EnvFileError", "EnvValue", "Reference", "literal", "parse_env_file", "resolve", "travelling"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PIECE = re.compile(r"\\\$|\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)


class EnvFileError(LauncherError, ValueError):
    """A line of `.deepspeed_env` cannot be read. The message names the line, never the value."""


@dataclass(frozen=True)
class Reference:
    """Stands for the value of a variable on the target host (empty where it is unset)."""

    name: str


EnvValue = tuple[str | Reference, ...]
"""Pieces of one value, in order."""


def literal(value: str) -> EnvValue:
    """A value without references."""
    return (value,)


def parse_env_file(lines: Iterable[str], source: str = ".deepspeed_env") -> dict[str, EnvValue]:
    """Read `NAME=VALUE` lines, split at the first `=` and stripped; blank lines and `#` lines are skipped.

    Raises:
        EnvFileError: a line without `=`, or a name that no shell could export; names the line.
    """
    values: dict[str, EnvValue] = {}
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise EnvFileError(f"{source}, line {number}: expected 'NAME=VALUE' with a name of letters, digits and '_'")
        if "\0" in value:
            raise EnvFileError(f"{source}, line {number}: a NUL character in the value")
        values[name] = _split(value)
    return values


def _split(value: str) -> EnvValue:
    pieces: list[str | Reference] = []
    text = ""
    end = 0
    for match in _PIECE.finditer(value):
        text += value[end : match.start()]
        end = match.end()
        name = match[1] or match[2]
        if name is None:
            text += "$"
            continue
        if text:
            pieces.append(text)
        pieces.append(Reference(name))
        text = ""
    text += value[end:]
    if text or not pieces:
        pieces.append(text)
    return tuple(pieces)


def resolve(value: EnvValue, environ: Mapping[str, str]) -> str:
    """The text of a value, with references looked up in `environ`."""
    return "".join(environ.get(piece.name, "") if isinstance(piece, Reference) else piece for piece in value)


def travelling(environ: Mapping[str, str], prefixes: Sequence[str]) -> dict[str, EnvValue]:
    """The variables of `environ` whose name begins with one of `prefixes` and that a shell can export, by name."""
    return {
        name: literal(value)
        for name, value in sorted(environ.items())
        if name.startswith(tuple(prefixes)) and _NAME.fullmatch(name)
    }

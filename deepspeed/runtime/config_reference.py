# SPDX-License-Identifier: Apache-2.0
"""The reference of all configuration keys, written from the declarations of the fields.

`python -m deepspeed.runtime.config_reference > docs/configuration.md` renews the page; a test compares the two.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from deepspeed.runtime.config import FEATURES, REMOVED, SECTION_SPELLINGS, SECTIONS, UNSUPPORTED
from deepspeed.runtime.config_sections import ScalarConfig
from deepspeed.runtime.config_utils import ConfigSection, to_plain

_HEAD = """\
# Configuration keys

Written by `python -m deepspeed.runtime.config_reference`; change the declarations, not this page.

A configuration is a dict, a JSON or HJSON file, or urlsafe base64 of JSON. `"auto"` inside a section means that the key
is not given; integrations fill such values in before. An unknown key is an error inside a section (a warning inside
`aio`, `activation_checkpointing`, `compile`, `flops_profiler` and `tensor_parallel`, where callers are known to write
some), and part of one warning at the top level. Where a key has two spellings, either is taken, but not both at once.

*No effect* marks keys that are accepted for the sake of existing files, with the reason. What cannot be done is refused
by name; the list is at the end.
"""


def render() -> str:
    """The page, as Markdown."""
    lines = [_HEAD, "## Top level", "", *_table(ScalarConfig)]
    spellings = {section: other for other, section in SECTION_SPELLINGS.items()}
    for key, cls in SECTIONS.items():
        title = f"## `{key}`" + (f" (also `{spellings[key]}`)" if key in spellings else "")
        lines += ["", title, "", *_table(cls)]
        for name, part in _nested(cls):
            lines += ["", f"### `{key}.{name}`", "", *_table(part)]
    lines += ["", "## Refused", "", "| key | what to do |", "| --- | --- |"]
    lines += [f"| `{key}` | {remedy} |" for key, _, remedy in sorted(UNSUPPORTED)]
    lines += [f"| `{key}` | where switched on: {remedy} |" for key, remedy in sorted(FEATURES.items())]
    lines += [f"| `{key}` | removed; an error where switched on, a warning where off |" for key in sorted(REMOVED)]
    return "\n".join(lines) + "\n"


def _table(cls: type[ConfigSection]) -> list[str]:
    other = {field: key for key, field in reversed(list(cls.other_spellings.items()))}
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for name, field in cls.model_fields.items():
        key = f"`{name}`" + (f", `{other[name]}`" if name in other else "")
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        text = f"*no effect*: {extra['inert']}" if "inert" in extra else f"{field.description} ({extra['acted_by']})"
        default = "required" if field.is_required() else _default(field.get_default())
        rows.append(f"| {key} | {default} | {text} |")
    return rows


def _default(value: Any) -> str:
    if isinstance(value, ConfigSection):
        return "see below"
    if isinstance(value, Enum) or not isinstance(value, (list, tuple)):
        return f"`{to_plain(value)}`".replace("None", "null").replace("True", "true").replace("False", "false")
    return "<br>".join(f"`{item}`" for item in value) or "`[]`"


def _nested(cls: type[ConfigSection]) -> Iterator[tuple[str, type[ConfigSection]]]:
    for name, field in cls.model_fields.items():
        choices = [field.annotation]
        if typing.get_origin(field.annotation) in (types.UnionType, typing.Union):
            choices = list(typing.get_args(field.annotation))
        for part in choices:
            if isinstance(part, type) and issubclass(part, ConfigSection):
                yield name, part


if __name__ == "__main__":
    print(render(), end="")

# SPDX-License-Identifier: Apache-2.0
"""How a configuration is read: sources, sections, error messages.

What must hold:
- A section is frozen and complete after `parse_section`; inner code reads attributes and never asks for defaults.
- "auto" inside a section means "key not given" (integrations fill these in before; what is left gets the default).
- Every error is a `ConfigError` whose message starts with the dotted path of the key as the user wrote it.
- Every field is declared through `acted` or `inert`: it says who acts on it, or why nothing does. A test walks them.
"""

from __future__ import annotations

import base64
import binascii
import copy
import difflib
import functools
import inspect
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deepspeed.errors import ConfigError
from deepspeed.utils.logging import log_dist

AUTO = "auto"


# ---------------------------------------------------------------------------------------------------------------
# Field declarations
# ---------------------------------------------------------------------------------------------------------------
def acted(default: Any, by: str, doc: str) -> Any:
    """Declare a field that changes behaviour; `by` names the part that acts on it."""
    return Field(default=default, description=doc, json_schema_extra={"acted_by": by})


def inert(default: Any, why: str) -> Any:
    """Declare a field that is accepted and has no effect, and say why that is right."""
    return Field(default=default, description=why, json_schema_extra={"inert": why})


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"a number is expected, got {value}")
    return value


NonNegativeInt = Annotated[int, BeforeValidator(_not_bool), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(_not_bool), Field(gt=0)]
Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, BeforeValidator(_not_bool), Field(ge=0, allow_inf_nan=False)]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def _to_dtype(value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = _DTYPES.get(str(value).lower().removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"must be one of fp32, fp16, bf16 or null, got {value!r}")
    return dtype


Dtype = Annotated[torch.dtype | None, BeforeValidator(_to_dtype)]


def _to_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_to_names)]


# ---------------------------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------------------------
class _KeyProblems(ValueError):
    """Problems with keys of one section: (key, what is wrong) pairs."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {text}" for key, text in problems))
        self.problems = problems


class ConfigSection(BaseModel):
    """Base of every section: frozen, unknown keys refused, "auto" dropped, other spellings accepted."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True, protected_namespaces=()
    )

    other_spellings: ClassVar[Mapping[str, str]] = {}
    """Further accepted keys -> field name."""
    tolerates_unknown: ClassVar[bool] = False
    """True: unknown keys are dropped and reported, since known callers emit such keys here."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """Every key that the section accepts, in all spellings."""
        return [*cls.model_fields, *cls.other_spellings]

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        problems: list[tuple[str, str]] = []
        result: dict[str, Any] = {}
        written: dict[str, str] = {}
        for key, value in data.items():
            field = cls.other_spellings.get(key, key)
            if field not in cls.model_fields:
                problems.append((str(key), f"unknown key (value {value!r}). {nearest(str(key), cls.known_keys())}"))
            elif field in written:
                problems.append((str(key), f"given twice, also as {written[field]!r}; keep one of the two spellings"))
            else:
                written[field] = key
                if not (isinstance(value, str) and value == AUTO):
                    result[field] = value
        if problems:
            raise _KeyProblems(problems)
        return result


SectionT = TypeVar("SectionT", bound=ConfigSection)


def parse_section(cls: type[SectionT], value: Any, path: str, unknown: list[str] | None = None) -> SectionT:
    """Build one frozen section from the user's value.

    Args:
        cls: the section's class.
        value: the user's value; None gives the defaults.
        path: dotted path of the section, "" for the top level.
        unknown: where tolerated unknown keys are reported to, as texts.

    Raises:
        ConfigError: the value is not an object, holds an unknown key, or a value of it is wrong.
    """
    if value is None:
        value = {}
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: an object (dict) is expected, got {value!r}")
    if cls.tolerates_unknown:
        known = set(cls.known_keys())
        for key in value:
            if key not in known and unknown is not None:
                unknown.append(f"{path}.{key} ({nearest(str(key), cls.known_keys())})")
        value = {key: item for key, item in value.items() if key in known}
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        written = {cls.other_spellings[key]: key for key in value if key in cls.other_spellings}
        raise ConfigError(_explain(error, path, written)) from None


def nearest(key: str, valid: Iterable[str]) -> str:
    """A sentence with the valid name that is nearest to `key`, or all valid names if none is near."""
    by_lower = {name.lower(): name for name in valid}
    match = difflib.get_close_matches(key.lower(), by_lower, n=1, cutoff=0.6)
    if match:
        return f"Did you mean {by_lower[match[0]]!r}?"
    return f"Valid: {', '.join(sorted(by_lower.values()))}."


def _explain(error: ValidationError, path: str, written: Mapping[str, str]) -> str:
    """One line per problem; `written` gives the user's spelling of a field where it differs."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        location[:1] = [written.get(part, part) for part in location[:1]]
        where = ".".join(part for part in (path, *location) if part)
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, _KeyProblems):
            lines += [f"{f'{where}.{key}' if where else key}: {text}" for key, text in cause.problems]
        elif item["type"] == "missing":
            lines.append(f"{where}: this key is required and missing (or left at {AUTO!r})")
        elif cause is not None:
            lines.append(f"{where}: {cause}")
        else:
            lines.append(f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}")
    return "\n".join(dict.fromkeys(lines))


def check_params(path: str, cls: type[Any], params: dict[str, Any]) -> None:
    """Check names of constructor arguments against a class whose first argument is given by the caller.

    Raises:
        ConfigError: a name is unknown, a required one is missing, or a value is still "auto".
    """
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    names = [parameter.name for parameter in accepted]
    for name, value in params.items():
        if name not in names:
            raise ConfigError(f"{path}.{name}: unknown parameter of {cls.__name__}. {nearest(name, names)}")
        if isinstance(value, str) and value == AUTO:
            raise ConfigError(f'{path}.{name}: "auto" was not resolved; give a number, or remove the key')
    for parameter in accepted:
        if parameter.default is parameter.empty and parameter.name not in params:
            raise ConfigError(f"{path}.{parameter.name}: {cls.__name__} requires it; add it")


# ---------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------
def load_source(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration from a dict, a JSON or HJSON file, or urlsafe base64 of JSON. The result is a copy.

    Raises:
        ConfigError: the source is none of these, cannot be parsed, or repeats a key.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"config: a dict, a path or base64 text is expected, got {type(source).__name__}")
    name = os.fspath(source)
    if os.path.isfile(name):
        loaded = _parse_text(Path(name).read_text(encoding="utf-8"), name)
    else:
        try:
            loaded = _parse_text(base64.b64decode(name, altchars=b"-_", validate=True).decode("utf-8"), "base64 text")
        except (binascii.Error, ValueError) as error:
            if isinstance(error, ConfigError) and "given twice" in str(error):
                raise
            raise ConfigError(
                f"config: {name!r} is neither an existing file nor urlsafe base64 of a JSON object; check the path"
            ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config: {name!r} holds a {type(loaded).__name__}, an object is expected at the top")
    return loaded


def _parse_text(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        try:
            import hjson
        except ImportError:
            raise ConfigError(
                f"config: {name!r} is not valid JSON ({error}); if it is HJSON, install the hjson package"
            ) from None
        try:
            return hjson.loads(text, object_pairs_hook=_unique_keys)
        except hjson.HjsonDecodeError as second:
            raise ConfigError(f"config: {name!r} is neither JSON ({error}) nor HJSON ({second})") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"{key}: given twice in the same object ({result[key]!r} and {value!r}); remove one")
        result[key] = value
    return result


# ---------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------
def to_plain(value: Any) -> Any:
    """Turn sections, enums, dtypes and non-finite floats into values that `json.dumps` writes as strict JSON."""
    if isinstance(value, BaseModel):
        return {name: to_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return repr(value)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning on rank 0, once per process and text."""
    log_dist(message, ranks=[0], level=logging.WARNING)

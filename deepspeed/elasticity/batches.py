# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of elastic batch sizes.

A train batch size B runs on n ranks when some allowed micro-batch m divides it n times over: B = m * n * accumulation.
A B with many divisors therefore runs on many n. Candidates are the products of a micro-batch, or of the least common
multiple of all, with the largest highly composite number that the limit allows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from packaging.version import InvalidVersion, Version
from pydantic import Field

from deepspeed.errors import ConfigError, DeepSpeedError
from deepspeed.runtime.config_utils import ConfigSection, NonNegativeInt, PositiveInt, acted, inert, parse_section

FIRST_VERSION = Version("0.3.8")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


class ElasticityError(DeepSpeedError):
    """No batch size can be computed."""


class ElasticityConfigError(ElasticityError, ConfigError):
    """The section ``elasticity`` is missing, switched off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The section gives no batch size for this number of ranks."""


class ElasticityConfig(ConfigSection):
    """The section ``elasticity``."""

    enabled: bool = acted(False, by="compute_elastic_config", doc="false is refused: there is nothing to compute")
    max_train_batch_size: PositiveInt = acted(2000, by="compute_elastic_config", doc="largest train batch size")
    micro_batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = acted(
        (2, 4, 6), by="compute_elastic_config", doc="allowed micro-batch sizes per rank"
    )
    min_gpus: PositiveInt = acted(1, by="compute_elastic_config", doc="fewest ranks that the batch size must run on")
    max_gpus: PositiveInt = acted(10000, by="compute_elastic_config", doc="most ranks")
    num_gpus_per_node: PositiveInt = acted(1, by="compute_elastic_config", doc="ranks that come and go together")
    model_parallel_size: PositiveInt = acted(1, by="refused above 1", doc="ranks that share a micro-batch")
    prefer_larger_batch: bool = acted(True, by="compute_elastic_config", doc="of equally good sizes the larger")
    version: float = acted(0.2, by="compute_elastic_config", doc="0.2 also finds sizes for one world size, 0.1 not")
    min_time: NonNegativeInt = inert(0, why="a hint for schedulers")
    ignore_non_elastic_batch_info: bool = inert(False, why="the other batch keys are not read here")


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """A train batch size within the limits of ``ds_config["elasticity"]``, and where it runs.

    Args:
        ds_config: a configuration with a section ``elasticity``.
        target_deepspeed_version: the version it is computed for, 0.3.8 or later.
        world_size: ranks, the environment's WORLD_SIZE where 0; version 0.2 needs one, 0.1 does not.
        return_microbatch: return the micro-batch although no ``world_size`` was given.

    Returns:
        (train batch size in samples, numbers of ranks that it runs on), and third, with a world size or
        ``return_microbatch``, the largest micro-batch per rank that fits.

    Raises:
        ElasticityConfigError: the section is missing, off, or a value is wrong.
        ElasticityIncompatibleWorldSize: no batch size runs on ``world_size`` ranks.
    """
    if not isinstance(ds_config, Mapping):
        raise ElasticityConfigError(f"compute_elastic_config: ds_config must be a dict, got {type(ds_config).__name__}")
    settings = _section(ds_config)
    try:
        too_old = Version(target_deepspeed_version) < FIRST_VERSION
    except InvalidVersion as error:
        raise ElasticityError(f"target_deepspeed_version: {error}") from error
    if too_old:
        raise ElasticityError(
            f"target_deepspeed_version {target_deepspeed_version} has no elasticity: {FIRST_VERSION} or later has"
        )
    if settings.version == 0.1:
        batch, valid = _best(settings, settings.max_train_batch_size, settings.min_gpus, settings.max_gpus)
        if not world_size:
            return (batch, valid, _largest_micro(settings, batch, 1)) if return_microbatch else (batch, valid)
        if world_size not in valid:
            raise _incompatible(world_size, valid)
        return batch, valid, _largest_micro(settings, batch, world_size)
    world_size = world_size or _world_size_of_environment()
    return _for_world(settings, world_size)


def _section(ds_config: Mapping[str, Any]) -> ElasticityConfig:
    if "elasticity" not in ds_config:
        raise ElasticityConfigError("elasticity: the section is missing from the configuration; add it")
    given = ds_config["elasticity"]
    try:
        settings = parse_section(ElasticityConfig, given, "elasticity")
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error
    if not settings.enabled:
        raise ElasticityConfigError("elasticity.enabled: false; set it to true to compute batch sizes")
    missing = {"max_train_batch_size", "micro_batch_sizes"} - settings.model_fields_set
    if missing:
        raise ElasticityConfigError(f"elasticity.{min(missing)}: missing; give it")
    if settings.min_gpus > settings.max_gpus:
        raise ElasticityConfigError(
            f"elasticity.min_gpus: {settings.min_gpus} is more than elasticity.max_gpus, {settings.max_gpus}"
        )
    if settings.version not in (0.1, 0.2):
        raise ElasticityConfigError(f"elasticity.version: must be 0.1 or 0.2, got {settings.version}")
    if max(settings.micro_batch_sizes) > settings.max_train_batch_size:
        raise ElasticityConfigError(
            f"elasticity.micro_batch_sizes: {max(settings.micro_batch_sizes)} is more than "
            f"elasticity.max_train_batch_size, {settings.max_train_batch_size}"
        )
    if settings.model_parallel_size > 1:
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size: {settings.model_parallel_size}; tensor parallelism is not part of this "
            "package; leave it out"
        )
    return settings


def _world_size_of_environment() -> int:
    value = os.environ.get("WORLD_SIZE", "")
    if not value.isdecimal() or not int(value):
        raise ElasticityConfigError(
            "elasticity.version: 0.2 computes for a number of ranks; give world_size= or set WORLD_SIZE "
            f"(now {value!r}), or take version 0.1"
        )
    return int(value)


def _for_world(settings: ElasticityConfig, world_size: int) -> tuple[int, list[int], int]:
    """The size that runs on most numbers of nodes, if on ``world_size`` ranks too; else the best for these alone."""
    a_node, limit = settings.num_gpus_per_node, settings.max_train_batch_size
    batch, nodes = _best(settings, limit // a_node, -(-settings.min_gpus // a_node), settings.max_gpus // a_node)
    batch, valid = batch * a_node, [count * a_node for count in nodes]
    if world_size not in valid:
        steps = [micro * world_size for micro in settings.micro_batch_sizes if micro * world_size <= limit]
        if not steps:
            raise _incompatible(world_size, valid)
        choose = max if settings.prefer_larger_batch else min
        batch, valid = choose(limit // step * step for step in steps), [world_size]
    return batch, valid, _largest_micro(settings, batch, world_size)


def _best(settings: ElasticityConfig, limit: int, fewest: int, most: int) -> tuple[int, list[int]]:
    """The candidate of at most ``limit`` that runs on most counts between ``fewest`` and ``most``, and these counts."""
    bases = {*settings.micro_batch_sizes, math.lcm(*settings.micro_batch_sizes)}
    candidates = {base * max(_highly_composite(limit // base)) for base in bases if base <= limit}
    found = [(batch, _counts(settings, batch, fewest, most)) for batch in candidates]
    sign = 1 if settings.prefer_larger_batch else -1
    batch, valid = max(found, key=lambda entry: (len(entry[1]), sign * entry[0]), default=(0, []))
    return (batch, valid) if valid else (0, [])


def _counts(settings: ElasticityConfig, batch: int, fewest: int, most: int) -> list[int]:
    found: set[int] = set()
    for micro in settings.micro_batch_sizes:
        if batch % micro == 0:
            most_here = batch // micro
            found.update(n for n in range(fewest, min(most, most_here) + 1) if most_here % n == 0)
    return sorted(found)


def _largest_micro(settings: ElasticityConfig, batch: int, world_size: int) -> int:
    return max(micro for micro in settings.micro_batch_sizes if batch // world_size % micro == 0)


def _highly_composite(limit: int) -> Iterator[int]:
    """The numbers up to ``limit`` that have more divisors than every smaller one (OEIS A002182), in order."""
    powers = sorted(_products(limit, len(_PRIMES), 64))
    most = 0
    for number, divisors in powers:
        if divisors > most:
            most = divisors
            yield number


def _products(limit: int, primes: int, exponent: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """(number, its divisors) of all products of consecutive primes with exponents that do not grow."""
    yield 1, 1
    if first == primes:
        return
    power = 1
    for count in range(1, exponent + 1):
        power *= _PRIMES[first]
        if power > limit:
            return
        for number, divisors in _products(limit // power, primes, count, first + 1):
            yield power * number, (count + 1) * divisors


def _incompatible(world_size: int, valid: list[int]) -> ElasticityIncompatibleWorldSize:
    return ElasticityIncompatibleWorldSize(
        f"elasticity: no train batch size runs on {world_size} ranks; numbers that work: {valid or 'none'}"
    )

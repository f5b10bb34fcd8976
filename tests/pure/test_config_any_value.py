# SPDX-License-Identifier: Apache-2.0
"""Promise: whatever value any key gets, the configuration is either built or refused with that key's path in front."""

from __future__ import annotations

import json

import pytest

from deepspeed.errors import ConfigError
from deepspeed.runtime.config import SECTIONS, DeepSpeedConfig
from deepspeed.runtime.config_sections import ScalarConfig

VALUES = [None, True, False, 0, 1, -1, 1.5, 10**30, float("nan"), float("inf"), "x", "", "auto", [], [1], {}, {"x": 1}]
KEYS = [(None, key) for key in ScalarConfig.known_keys()]
KEYS += [(section, key) for section, cls in SECTIONS.items() for key in cls.known_keys()]


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_any_value_is_taken_or_refused_by_path(section, key):
    for value in VALUES:
        config: dict = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
        if section in ("optimizer", "scheduler"):
            config[section] = {"type": "x"}
        (config.setdefault(section, {}) if section else config)[key] = value
        try:
            built = DeepSpeedConfig(config, world_size=4)
        except ConfigError as error:
            path = f"{section}.{key}" if section else key
            # A batch size that is fine by itself may not fit the others: the message is then about the total.
            about = (path, "train_batch_size") if section is None else path
            assert str(error).startswith(about), (value, str(error))
        else:
            json.dumps(built.to_dict(), allow_nan=False)

# SPDX-License-Identifier: Apache-2.0
"""Promise: the page of configuration keys says what the code does."""

from __future__ import annotations

from pathlib import Path

from deepspeed.runtime.config_reference import render

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "renew it: python -m deepspeed.runtime.config_reference > docs/configuration.md"
    )

# SPDX-License-Identifier: Apache-2.0
"""The logger has its name, speaks once where asked to, and lets clients capture it."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from deepspeed.utils import logging as ds_logging
from tests.harness import run_ranks


def test_logger_is_named_and_capturable(capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.utils import logger

    assert logger is logging.getLogger("DeepSpeed") and logger is ds_logging.logger
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.info("DeepSpeed info")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "DeepSpeed info\n"
    assert "DeepSpeed info" in capsys.readouterr().out


def test_factory_adds_one_handler() -> None:
    first = ds_logging.LoggerFactory.create_logger("ds-test")
    again = ds_logging.LoggerFactory.create_logger("ds-test", logging.ERROR)
    assert first is again and len(again.handlers) == 1 and again.level == logging.ERROR
    with pytest.raises(ValueError):
        ds_logging.LoggerFactory.create_logger("")


def test_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        ds_logging.warning_once("said a single time")
    assert capsys.readouterr().out.count("said a single time") == 1


def test_levels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ds-levels")
    ds_logging.set_log_level_from_string("error", logger)
    assert logger.level == logging.ERROR
    with pytest.raises(ValueError, match="loud"):
        ds_logging.set_log_level_from_string("loud")
    before = ds_logging.logger.level
    ds_logging.set_log_level_from_string("info")
    assert ds_logging.should_log_le("info") and not ds_logging.should_log_le("debug")
    ds_logging.logger.setLevel(before)


def speak() -> dict[str, str]:
    import contextlib

    from deepspeed.utils import log_dist, logger, print_dist

    logger.setLevel(logging.INFO)  # clients that ran in this process before may have changed it
    heard: dict[str, str] = {}
    calls: dict[str, Any] = {"none": None, "one": [1], "all": [-1], "empty": []}
    for fn in (log_dist, print_dist):
        for name, ranks in calls.items():
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                fn("hello", ranks=ranks)
            heard[f"{fn.__name__}-{name}"] = out.getvalue().strip()
    return heard


def test_speaks_on_the_chosen_ranks() -> None:
    for rank, heard in enumerate(run_ranks(speak, 2)):
        for key, text in heard.items():
            if key.endswith("-one") and rank != 1:
                assert text == ""
            else:
                assert text.endswith(f"[Rank {rank}] hello"), key

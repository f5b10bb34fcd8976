# SPDX-License-Identifier: Apache-2.0
"""The logger named "DeepSpeed" and the helpers that speak on chosen ranks only.

Standard library only: torch is asked for the rank if somebody else has imported it already, else the RANK variable is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _StdoutHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks sys.stdout up at each line, so that redirection after import is honoured."""

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, _: Any) -> None:
        pass


class LoggerFactory:
    """Makes loggers in the format of the package."""

    @staticmethod
    def create_logger(name: str = "DeepSpeed", level: int = logging.INFO) -> logging.Logger:
        """Return the logger `name` with exactly one handler of ours. Raises ValueError for an empty name."""
        if not name:
            raise ValueError("a logger needs a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not any(isinstance(handler, _StdoutHandler) for handler in made.handlers):
            handler = _StdoutHandler()
            handler.setFormatter(
                logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
            )
            made.addHandler(handler)
        return made


logger = LoggerFactory.create_logger(
    level=log_levels.get(os.environ.get("DEEPSPEED_LOG_LEVEL", "info").lower(), logging.INFO)
)


def _rank() -> int | None:
    """The rank of this process, None where there is no process group and no RANK variable."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def _speaks(ranks: Iterable[int] | None) -> bool:
    rank, chosen = _rank(), set(ranks or ())
    return rank is None or not chosen or -1 in chosen or rank in chosen


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; on all of them if `ranks` is empty or holds -1, or if there is no process group."""
    if _speaks(ranks) and logger.isEnabledFor(level):
        rank = _rank()
        logger.log(level, message if rank is None else f"[Rank {rank}] {message}", stacklevel=2)


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    """Like log_dist, but print whatever the log level is."""
    if _speaks(ranks):
        rank = _rank()
        print(message if rank is None else f"[Rank {rank}] {message}", flush=True)


_said: set[str] = set()


def warning_once(message: str) -> None:
    """Warn the first time this process sees this text."""
    if message not in _said:
        _said.add(message)
        logger.warning(message, stacklevel=2)


def set_log_level_from_string(log_level: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by name. Raises ValueError for a name that is not in `log_levels`."""
    if log_level.lower() not in log_levels:
        raise ValueError(f"{log_level!r} is not a log level; known ones: {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(log_levels[log_level.lower()])


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's effective level is at most the named one. Raises ValueError for an unknown name."""
    if max_log_level_str.lower() not in log_levels:
        raise ValueError(f"{max_log_level_str!r} is not a log level; known ones: {', '.join(log_levels)}")
    return logger.getEffectiveLevel() <= log_levels[max_log_level_str.lower()]

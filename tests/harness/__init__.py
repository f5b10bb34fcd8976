# SPDX-License-Identifier: Apache-2.0
"""What tests share: a warm pool of ranks, fault seams, tiny models and the plain-torch reference trainer."""

from __future__ import annotations

from tests.harness.pool import FreshResult, RankError, run_fresh, run_ranks

__all__ = ["FreshResult", "RankError", "run_fresh", "run_ranks"]

# SPDX-License-Identifier: Apache-2.0
"""What of communication is hidden, from made-up kernels; and the table that shows it."""

from __future__ import annotations

from benchmarks import overlap, report_md
from tests.perf.test_report import file, row

KERNELS = [
    ("ncclDevKernel_AllGather", 0.0, 10.0),  # 0 to 4 exposed: compute begins at 4
    ("gemm", 4.0, 12.0),
    ("gemm", 11.0, 14.0),  # overlaps the one before
    ("ncclDevKernel_ReduceScatter", 13.0, 20.0),  # exposed from 14 to 18
    ("ncclDevKernel_AllReduce", 15.0, 17.0),  # at the same time as the one before
    ("Memcpy DtoH", 18.0, 19.0),
    ("step", 25.0, 30.0),  # after 5 in which nothing ran
]


def test_what_is_exposed_and_what_is_idle() -> None:
    assert overlap.overlap(KERNELS) == {
        "window": 30.0,
        "compute": 16.0,
        "comm": 17.0,
        "exposed": 9.0,
        "idle": 5.0,
        "hidden": 1 - 9 / 17,
    }


def test_nothing_to_hide() -> None:
    assert overlap.overlap([])["hidden"] == 1.0
    assert overlap.overlap([("gemm", 1.0, 2.0)])["exposed"] == 0.0


def test_the_table_shows_only_what_was_traced() -> None:
    traced = {**row(90.0, 1 << 30), "trace": overlap.overlap(KERNELS)}
    text = report_md.section(file(rows={"ours": traced, "fsdp2": row(100.0, 1 << 30)}))
    assert "| 2r-4x2048 | ours | 30.0 | 16.0 | 17.0 | 9.0 | 5.0 | 47% |" in text
    assert "exposed" not in report_md.section(file())

# SPDX-License-Identifier: Apache-2.0
"""Promise: operations, multiply-accumulates and parameters of a model are counted as by hand."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import NotSupportedError, UsageError
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(7, 15), torch.nn.ReLU(), torch.nn.Linear(15, 3, bias=False))


MACS = 4 * (7 * 15 + 15 * 3)
PARAMS = 7 * 15 + 15 + 15 * 3


def test_counts(capsys, tmp_path):
    made = model()
    out = tmp_path / "profile.txt"
    counts = get_model_profile(made, (4, 7), as_string=False, print_profile=True, output_file=str(out))
    assert counts == (2 * MACS, MACS, PARAMS) and made.training
    text = out.read_text()
    assert "Sequential.0" in text and "Sequential.2" in text and capsys.readouterr().out == ""
    assert get_model_profile(made, (4, 7), print_profile=False) == ("1.20 KFLOPS", "600 MACs", "165")
    assert get_model_profile(made, kwargs={"input": torch.ones(4, 7)}, print_profile=False, as_string=False) == counts
    get_model_profile(made, args=[torch.ones(4, 7)], detailed=False, top_modules=1, module_depth=1)
    printed = capsys.readouterr().out
    assert "Sequential.0" in printed and "Sequential.2" not in printed


def test_sharded_parameters_count_in_full():
    made = model()
    for param in made.parameters():
        param.ds_numel = 1000
    assert FlopsProfiler(made).get_total_params() == 3000


def test_start_and_stop():
    made = model()
    profiler = FlopsProfiler(made)
    profiler.start_profile()
    with pytest.raises(UsageError, match="already"):
        profiler.start_profile()
    made(torch.ones(4, 7))
    profiler.stop_profile()
    made(torch.ones(4, 7))
    assert profiler.get_total_macs() == MACS and profiler.get_total_duration() > 0
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_errors():
    with pytest.raises(UsageError, match="input_shape"):
        get_model_profile(model())
    with pytest.raises(UsageError, match="mode"):
        get_model_profile(model(), (4, 7), mode="backward")
    with pytest.raises(NotSupportedError, match="ignore_list"):
        get_model_profile(model(), (4, 7), ignore_modules=[torch.nn.ReLU])

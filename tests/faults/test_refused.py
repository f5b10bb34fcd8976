# SPDX-License-Identifier: Apache-2.0
"""G2, G3: contradictions raise with the numbers; what is not built is refused by name, on every rank, at once."""

from __future__ import annotations

from tests.faults import refused
from tests.faults.ranks import values


def test_g2_g3_every_rank_refuses_and_can_go_on() -> None:
    for result in values(refused.attempts, 4):
        for name, (_, kind, said) in refused.CONTRADICTIONS.items():
            error, bases, text = result[name]
            assert error == kind and "ValueError" in bases, (name, error, text)
            assert all(part in text for part in said), (name, text)
        for key in refused.UNSUPPORTED:
            error, bases, text = result[key]
            assert "NotSupportedError" in bases and "ConfigError" in bases, (key, error, text)
            assert key in text, (key, text)


def test_g3_init_refuses_what_is_not_built() -> None:
    for quantised, nvme in values(refused.init_attempts, 2):
        assert "zero_quantized" in quantised and 'remote_device="cpu"' in nvme


def test_complex_parameters_are_not_trained_as_real_ones() -> None:
    for said, loss in values(refused.complex_parameters, 2):
        assert "turn is complex" in said
        assert abs(loss - 3 * 5**0.5) < 1e-5

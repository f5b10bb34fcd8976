# SPDX-License-Identifier: Apache-2.0
"""`ds_report` says what is missing and why, and never fails because something is."""

from __future__ import annotations

import json

import pytest

import deepspeed
from deepspeed import env_report, git_version_info
from deepspeed.accelerator import real_accelerator


def test_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    env_report.main(["--json"])
    sections = json.loads(capsys.readouterr().out)
    assert list(sections) == ["Versions", "Devices", "Communication", "Launcher", "Native ops"]
    versions = {row["name"]: row["value"] for row in sections["Versions"]}
    assert versions["deepspeed"].startswith(deepspeed.__version__)
    assert any(row["name"] == "gloo" and row["ok"] for row in sections["Communication"])
    ops = {row["name"]: row for row in sections["Native ops"]}
    assert ops["async_io"]["ok"] is False and ops["async_io"]["value"].startswith("not built: ")
    assert ops["fused_adam"]["ok"] is True


def test_a_wrong_environment_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    monkeypatch.setenv("DEEPSPEED_LAUNCHER_GRACE", "soon")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(real_accelerator, "_current", None)
    env_report.main([])
    text = capsys.readouterr().out
    assert "DS_ACCELERATOR='xpu'" in text
    assert "DEEPSPEED_LAUNCHER_GRACE='soon'" in text
    assert "not on PATH" in text


def test_version_facts() -> None:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    version = Version(git_version_info.version)
    assert version >= Version("0.18.9") and version.local
    assert git_version_info.version >= "0.18.9"  # one client compares texts
    assert version in SpecifierSet(">=0.18.6,<0.19")
    assert set(git_version_info.installed_ops) == set(git_version_info.compatible_ops)
    assert git_version_info.torch_info["version"].count(".") == 1
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = git_version_info.absent  # type: ignore[attr-defined]

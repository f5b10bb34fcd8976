# SPDX-License-Identifier: Apache-2.0
"""No shell interprets user text: a real `sh` gives back byte for byte what was meant (L8, L9, L10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.errors import LauncherError
from deepspeed.launcher import command, envfile

ECHO = "import json,os,sys; print(json.dumps([sys.argv[1:], dict(os.environb and os.environ), os.getcwd()]))"

TORTURE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "& touch pwned",
    "| touch pwned",
    "*",
    "?",
    "~",
    "!!",
    "#not-a-comment",
    "'",
    '"',
    "'\"'\"'",
    "a b  c",
    "line\nbreak",
    "tab\there",
    "\u00fcn\u00ef\u00e7\u00f6d\u00e9 \u2603",
    "",
    "-",
    "--",
    "-rf",
    '{"a": [1, "$HOME"], "b": "\\\\"}',
    "\\",
    "\\n",
    "%h %n %u %%",
    "$HOME ${HOME} $1 $$",
    "a=b",
    ">out",
    "<in",
    "(x)",
    "{a,b}",
    "\udcff\udcfe",
]


def through_sh(text: str, cwd: Path, env: dict[str, str] | None = None) -> list[object]:
    result = subprocess.run(
        ["sh", "-c", text], cwd=cwd, env={"PATH": os.environ["PATH"], **(env or {})}, capture_output=True, check=True
    )
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def test_arguments_environment_and_folder_survive_a_real_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's a $(touch pwned) dir; *"
    folder.mkdir()
    values = {f"NCCL_{index}": text for index, text in enumerate(TORTURE)}
    text = command.remote_command(
        [sys.executable, "-c", ECHO, *TORTURE],
        env={name: envfile.literal(value) for name, value in values.items()},
        cwd=str(folder),
    )
    argv, environ, cwd = through_sh(text, tmp_path)
    assert argv == TORTURE
    assert isinstance(environ, dict)
    assert {name: environ[name] for name in values} == values
    assert cwd == str(folder)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("name", ["with space", "-dash", "$(touch pwned)", "a'b"])
def test_venv_script_with_a_difficult_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    script = tmp_path / name / "activate"
    script.write_text("FROM_VENV=yes; export FROM_VENV\n")
    text = command.remote_command(
        [sys.executable, "-c", ECHO], env={}, cwd=str(tmp_path), venv_script=f"{name}/activate"
    )
    _, environ, _ = through_sh(text, tmp_path)
    assert isinstance(environ, dict) and environ["FROM_VENV"] == "yes"
    assert not (tmp_path / "pwned").exists()


def test_a_missing_folder_ends_the_remote_command(tmp_path: Path) -> None:
    text = command.remote_command([sys.executable, "-c", ECHO], env={}, cwd=str(tmp_path / "absent"))
    assert subprocess.run(["sh", "-c", text], capture_output=True).returncode != 0


def test_env_file_expands_names_and_nothing_else(tmp_path: Path) -> None:
    lines = [
        "# comment\n",
        "\n",
        "LIBS=/opt/a:$HERE/lib:${HERE}:$UNSET_NAME:end\n",
        "RUN=$(touch pwned) `touch pwned` ; touch pwned\n",
        "PRICE=\\$HERE and $5 and $\n",
        "EQUALS=a=b=c\n",
        "  SPACED  =  x y  \n",
        "EMPTY=\n",
        'JSON={"k": "v"}\n',
    ]
    values = envfile.parse_env_file(lines)
    want = {
        "LIBS": "/opt/a:/x y/$(touch pwned)/lib:/x y/$(touch pwned)::end",
        "RUN": "$(touch pwned) `touch pwned` ; touch pwned",
        "PRICE": "$HERE and $5 and $",
        "EQUALS": "a=b=c",
        "SPACED": "x y",
        "EMPTY": "",
        "JSON": '{"k": "v"}',
    }
    here = {"HERE": "/x y/$(touch pwned)"}
    text = command.remote_command([sys.executable, "-c", ECHO], env=values, cwd=str(tmp_path))
    _, environ, _ = through_sh(text, tmp_path, here)
    assert isinstance(environ, dict)
    assert {name: environ[name] for name in want} == want
    assert {name: envfile.resolve(value, here) for name, value in values.items()} == want
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "line", ["NO_EQUALS", "=value", "A B=c", "A-B=c", "9A=c", "A;B=c", "\u00c4=c", "A$(x)=c", "A=\0"]
)
def test_a_malformed_env_line_is_named_without_its_value(line: str) -> None:
    with pytest.raises(ValueError, match=r"\.deepspeed_env, line 2: ") as caught:
        envfile.parse_env_file(["OK=1\n", line + "SECRET\n"])
    assert "SECRET" not in str(caught.value)


def test_travelling_variables_go_by_prefix() -> None:
    environ = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a b", "HOME": "/root", "NCCL_(x)": "no shell exports this"}
    assert envfile.travelling(environ, ["NCCL", "PYTHON"]) == {"NCCL_DEBUG": ("INFO",), "PYTHONPATH": ("/a b",)}


def test_a_host_is_never_an_option() -> None:
    assert command.ssh_command("node-1", "true", port=2222) == ["ssh", "-p", "2222", "--", "node-1", "true"]
    with pytest.raises(ValueError):
        command.ssh_command("-oProxyCommand=id", "true")


def test_launcher_args_are_split_without_a_shell() -> None:
    assert command.split_launcher_args("--mca x 'a b' $(id) ;") == ["--mca", "x", "a b", "$(id)", ";"]
    with pytest.raises(LauncherError, match="--launcher_args"):
        command.split_launcher_args("'open")


def test_a_nul_character_is_refused() -> None:
    with pytest.raises(LauncherError, match="NUL"):
        command.remote_command(["a\0b"], env={}, cwd="/")

# SPDX-License-Identifier: Apache-2.0
"""The storage seam: what was written is what is on disk, its hash is right, links are not followed, locks hold."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from deepspeed.checkpoint import store
from deepspeed.checkpoint.store import Storage
from deepspeed.errors import CheckpointError
from tests.harness.skips import needs

MB = 1 << 20


class Refusing(Storage):
    """A file system that takes the flag for direct writing and then refuses the write."""

    def open_new(self, path: Path) -> BinaryIO:
        return _Refusing(super().open_new(path))  # type: ignore[return-value]


class _Refusing:
    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw

    def write(self, view: memoryview) -> int:
        import fcntl

        if fcntl.fcntl(self.raw.fileno(), fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return self.raw.write(view[: max(1, len(view) // 2)])  # short writes as well

    def fileno(self) -> int:
        return self.raw.fileno()

    def __enter__(self) -> _Refusing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.raw.close()


@pytest.mark.parametrize("kind", ["ordinary", "refusing", "no flag"])
@pytest.mark.parametrize("size", [0, 1, 4095, MB, 4 * MB - 1, 4 * MB, 4 * MB + 1, 9 * MB + 17])
def test_bytes_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, kind: str) -> None:
    """Any mixture of small and large pieces, aligned or not, past the page cache or not."""
    if kind == "no flag":
        monkeypatch.setattr(store, "_set_direct", lambda raw, on: False)
    storage = Refusing() if kind == "refusing" else Storage()
    data = random.Random(size).randbytes(size)
    cuts = sorted({0, size, *(random.Random(7).randrange(size + 1) for _ in range(6)), min(size, 3 * MB)})

    def fill(sink: Any) -> None:
        for start, end in zip(cuts, cuts[1:], strict=False):
            assert sink.write(memoryview(data)[start:end]) == end - start
        sink.flush()

    record = storage.write_file(tmp_path / "f", fill)
    assert (tmp_path / "f").read_bytes() == data
    assert (record.name, record.size, record.sha256) == ("f", size, hashlib.sha256(data).hexdigest())


def test_a_failing_writer_leaves_no_thread_or_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def fill(sink: Any) -> None:
        sink.write(bytes(2 * MB))
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        Storage().write_file(tmp_path / "f", fill)
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_new_files_never_follow_links(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("link", "target"):
        with pytest.raises(FileExistsError):
            Storage().open_new(tmp_path / name)
    assert (tmp_path / "target").read_text() == "precious"


def test_exchange(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    try:
        Storage().exchange(tmp_path / "a", tmp_path / "b")
    except OSError as error:
        assert error.errno in (errno.EINVAL, errno.ENOSYS)
        pytest.skip(needs("an exchange of folders", "TMPDIR on another file system"))
    assert (tmp_path / "a" / "who").read_text() == "b" and (tmp_path / "b" / "who").read_text() == "a"
    with pytest.raises(FileNotFoundError):
        Storage().exchange(tmp_path / "a", tmp_path / "nowhere")


def test_lock_is_exclusive_and_bounded(tmp_path: Path) -> None:
    storage = Storage()
    with storage.locked(tmp_path, 1):
        with pytest.raises(CheckpointError, match="another job"), storage.locked(tmp_path, 0.1):
            pass
    with storage.locked(tmp_path, 0.1):
        pass


def test_lists_are_sorted_and_absent_folders_empty(tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / name).touch()
    assert Storage().list_dir(tmp_path) == ["a", "b", "c"]
    assert Storage().list_dir(tmp_path / "nowhere") == []
    Storage().remove(tmp_path / "nowhere")
    Storage().remove_tree(tmp_path / "nowhere")

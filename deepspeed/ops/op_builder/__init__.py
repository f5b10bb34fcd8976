# SPDX-License-Identifier: Apache-2.0
"""Names of native ops, for callers that ask what is available before they use a feature."""

from __future__ import annotations

from typing import Any

from deepspeed.errors import NotSupportedError

__all__ = ["ALL_BUILDERS", "AsyncIOBuilder", "OpBuilder"]


class OpBuilder:
    """One native op. None is built: every optimizer runs on kernels that torch ships."""

    NAME = ""
    REMEDY = "there is no native op of this name"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be used here."""
        return False

    def load(self, verbose: bool = False) -> Any:
        """Load the op.

        Raises:
            NotSupportedError: always; no op is built.
        """
        raise NotSupportedError(f"op {self.NAME!r} is not built: {self.REMEDY}")


class AsyncIOBuilder(OpBuilder):
    """Asynchronous file I/O, which NVMe offload would need."""

    NAME = "async_io"
    REMEDY = 'NVMe offload is not part of this package; offload to "cpu"'


ALL_BUILDERS: tuple[type[OpBuilder], ...] = (AsyncIOBuilder,)
"""Every op that is reported on."""

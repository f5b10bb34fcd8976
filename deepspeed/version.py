# SPDX-License-Identifier: Apache-2.0
"""The version of the package, in the one place that everything else reads it from.

What must hold: it is a PEP 440 version that clients' gates accept (at least 0.18.9, below 0.19; docs/versions.md lists
them), with a local label of our own, so that it can never be mistaken for a release of another project.
"""

from __future__ import annotations

__all__ = ["__version__", "version"]

__version__ = "0.18.9+z3.0"
version = __version__

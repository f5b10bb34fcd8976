# SPDX-License-Identifier: Apache-2.0
"""Speed and memory beside upstream and FSDP2: ``python -m benchmarks.compare`` and ``python -m benchmarks.fake``."""

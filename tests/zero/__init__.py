# SPDX-License-Identifier: Apache-2.0
"""Promises of the public surface of ZeRO-3: names, contexts, fragments, leaf modules, offload."""

# SPDX-License-Identifier: Apache-2.0
"""Promises that only real devices and NCCL can prove. `bash tests/gpu/session.sh` runs all of them."""

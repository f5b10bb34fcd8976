# SPDX-License-Identifier: Apache-2.0
"""The test suite. It is a package so that worker processes can import test functions by name."""

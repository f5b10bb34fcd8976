# SPDX-License-Identifier: Apache-2.0
"""Writers of training metrics, one file each; `deepspeed.monitor.monitor.MonitorMaster` drives them."""

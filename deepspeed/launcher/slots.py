# SPDX-License-Identifier: Apache-2.0
"""What this host has: accelerators, visible devices, free ports, own addresses.

What must hold: nothing here imports torch or initialises a device, and a question is answered without a change.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from deepspeed.launcher.hosts import Slot, parse_slots

__all__ = ["cpu_only", "device_count", "free_port", "is_local", "port_is_free", "visible_devices"]


def device_count() -> int:
    """Number of NVIDIA GPUs that the driver shows to this process, whatever `CUDA_VISIBLE_DEVICES` says."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            count = ctypes.c_uint(0)
            failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
            if not failed:
                return count.value
    gpus = Path("/proc/driver/nvidia/gpus")
    return len(list(gpus.iterdir())) if gpus.is_dir() else 0


def visible_devices(environ: Mapping[str, str]) -> list[Slot] | None:
    """The devices that `CUDA_VISIBLE_DEVICES` names, in its order; `None` where it is unset.

    An empty value and `-1` hide every device.

    Raises:
        HostListError: the value cannot be read.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    if text.strip() in ("", "-1"):
        return []
    return parse_slots(text, "CUDA_VISIBLE_DEVICES")


def cpu_only(environ: Mapping[str, str]) -> bool:
    """Whether ranks on this host run on the CPU: `DS_ACCELERATOR=cpu`, or no GPU that they could see."""
    kind = environ.get("DS_ACCELERATOR", "")
    if kind:
        return kind == "cpu"
    return visible_devices(environ) == [] or device_count() == 0


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port` of every address of this host, IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no such address family here
            continue
        with sock:
            # As a listener would: a port in TIME_WAIT counts as free, one that somebody listens on does not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address, port))
            except OSError:
                if family == socket.AF_INET6 and not _has_ipv6():
                    continue
                return False
    return True


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        sock.bind(("::", 0))
        return True
    return False


def free_port() -> int:
    """A port that nobody listens on now, chosen by the kernel."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def is_local(host: str) -> bool:
    """Whether `host` is this machine: by name, or because its address can be bound here."""
    if host in ("localhost", "127.0.0.1", socket.gethostname(), os.uname().nodename):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, proto, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, proto) as sock:
            sock.bind(address)
            return True
    return False

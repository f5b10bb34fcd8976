# SPDX-License-Identifier: Apache-2.0
"""What a sharding scheme costs on a cluster: ``python -m deepspeed.utils.plan --params 8e9 --nodes 2``.

A cost model as pure functions; torch is not loaded. It counts what a rank must receive over its links in one optimizer
step, the time of that on links of given speed, and the model state that stays in memory. It knows nothing of compute,
latency, activations or the units that are gathered at a moment: times are of communication alone, most of which a run
hides behind compute.

Symbols: k micro-batches, N ranks on n nodes, P ranks in a group (hpZ partition; the GPUs of a node by default), M bytes
of the 16-bit model, G GPUs of a node, ``f(x) = (x - 1) / x``. One collective over all ranks makes a rank receive
``f(n) M / G`` from other nodes and ``f(G) M`` from its own; one inside a group only ``f(P) M`` from its own.
Sources: ZeRO, arXiv 1910.02054; hpZ, qwZ and qgZ, arXiv 2306.10209.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from deepspeed.errors import ConfigError

QUANT_GROUP = 2048
"""Elements that share one fp32 scale in quantised messages."""


@dataclass(frozen=True)
class Cluster:
    """Model and machines.

    Attributes:
        params: parameters of the model.
        nodes, gpus_per_node: one rank per GPU.
        partition: ranks of a group (hpZ, HSDP); 0: ``gpus_per_node``.
        micro_batches: micro-batches per optimizer step.
        inter_gbps, intra_gbps: gigabits per second that one GPU receives from other nodes, and from its own node.
        reuse: fraction of the weights that stay gathered from forward to backward, 0 to 1.
        master_bytes: bytes per parameter of fp32 masters beside the 16-bit shard: 4, or 2 where they are split.
        grad_bytes: bytes per parameter of the sharded gradient: 2 (bf16) or 4 (fp32).

    Raises:
        ConfigError: a value is out of range, or ``partition`` does not divide the ranks.
    """

    params: float
    nodes: int
    gpus_per_node: int = 8
    partition: int = 0
    micro_batches: int = 1
    inter_gbps: float = 400.0
    intra_gbps: float = 3600.0
    reuse: float = 0.0
    master_bytes: int = 4
    grad_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("params", "nodes", "gpus_per_node", "micro_batches", "inter_gbps", "intra_gbps"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be positive and finite, not {value:g}")
        if not 0 <= self.reuse <= 1:
            raise ConfigError(f"reuse must be between 0 and 1, not {self.reuse:g}")
        if self.master_bytes not in (2, 4):
            raise ConfigError(f"master_bytes must be 2 (split) or 4, not {self.master_bytes}")
        if self.grad_bytes not in (2, 4):
            raise ConfigError(f"grad_bytes must be 2 or 4, not {self.grad_bytes}")
        if self.partition < 0 or self.ranks % self.group:
            allowed = ", ".join(str(p) for p in range(1, self.ranks + 1) if self.ranks % p == 0)
            raise ConfigError(f"partition {self.partition} does not divide the {self.ranks} ranks; allowed: {allowed}")
        if self.gpus_per_node % self.group and self.group != self.ranks:
            raise ConfigError(
                f"partition {self.partition} does not divide the {self.gpus_per_node} GPUs of a node, so that a group "
                f"would lie across nodes; the model knows groups inside a node (or of all ranks)"
            )

    @property
    def ranks(self) -> int:
        """N."""
        return self.nodes * self.gpus_per_node

    @property
    def group(self) -> int:
        """P."""
        return self.partition or self.gpus_per_node


@dataclass(frozen=True)
class Phase:
    """``count`` collectives (of the whole model each), and what a rank receives in one: bytes from other nodes and from
    its own."""

    count: float
    inter: float
    intra: float


@dataclass(frozen=True)
class Cost:
    """What one scheme costs a rank per optimizer step.

    Attributes:
        inter, intra: bytes received from other nodes and from the own node.
        seconds: of communication, each collective as slow as the slower of its links.
        memory: bytes of shards, masters, two moments, sharded gradients, and secondary shards or replicas.
        runs_here: whether this package runs it.
        keys: how it is asked for here, or who runs it.
    """

    scheme: str
    inter: float
    intra: float
    seconds: float
    memory: float
    runs_here: bool
    keys: str


SCHEMES = {
    "zero3": (True, "stage 3"),
    "hpz": (True, "stage 3, zero_hpz_partition_size P"),
    "fsdp2-int": (False, "FSDP2: reshard_after_forward=P"),
    "hpz+qwz": (False, "upstream: zero_quantized_weights"),
    "zero++": (False, "upstream: zero_quantized_weights and _gradients"),
    "hsdp": (False, "FSDP2: 2-D mesh (replicate, shard)"),
    "hfsdp": (False, "Megatron-FSDP: optimizer over all ranks"),
}
"""Every scheme: whether this package runs it, and how it is asked for."""


def fraction(size: float) -> float:
    """f(x) = (x - 1) / x: the part of a tensor that a member of a group of ``size`` receives."""
    return (size - 1) / size


def quantised(bits: int, group: int = QUANT_GROUP) -> float:
    """Bytes of a message with 8 or 4 ``bits`` an element and one scale per ``group`` elements, relative to 16 bits."""
    return {8: 0.5 * (1 + 4 / group), 4: 0.25 * (1 + 8 / group)}[bits]


def phases(scheme: str, c: Cluster) -> list[Phase]:
    """The collectives of one optimizer step.

    Raises:
        ConfigError: the scheme is none of ``SCHEMES``.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme {scheme!r} is none of {', '.join(SCHEMES)}")
    model, k, gpus, group = 2.0 * c.params, c.micro_batches, c.gpus_per_node, c.group
    far, near = fraction(c.nodes) * model / gpus, fraction(gpus) * model  # of a collective over all ranks
    group_far, group_near = (far, near) if group == c.ranks else (0.0, fraction(group) * model)
    forward, backward = k, k * (1.0 - c.reuse)
    q8, q4 = quantised(8), quantised(4)
    if scheme == "zero3":
        return [Phase(forward + backward + k, far, near)]
    if scheme == "fsdp2-int":
        return [Phase(forward + k, far, near), Phase(backward, group_far, group_near)]
    if scheme in (
        "hsdp",
        "hfsdp",
    ):  # then an all-reduce between groups, or a reduce-scatter and a gather of new weights
        between = Phase(2, far, fraction(gpus / group) * model / group) if group < c.ranks else Phase(0, 0.0, 0.0)
        return [Phase(forward + backward + k, group_far, group_near), between]
    inside = forward - 1 + backward
    gather = 1.0 if scheme == "hpz" else q8
    reduce = q4 if scheme == "zero++" else 1.0
    return [
        Phase(1, gather * far, gather * near),
        Phase(inside, gather * group_far, gather * group_near),
        Phase(k, reduce * far, reduce * near),
    ]


def memory(scheme: str, c: Cluster, int8_secondary: bool = False) -> float:
    """Bytes of model state that stay on a rank: shards, masters, moments, gradients, secondaries or replicas.

    Args:
        int8_secondary: keep secondary shards as the received 8-bit message.

    Raises:
        ConfigError: the scheme is none of ``SCHEMES``.
    """
    ranks, group = c.ranks, c.group
    state = (2 + c.master_bytes + 8 + c.grad_bytes) * c.params
    if scheme == "zero3":
        return state / ranks
    if scheme in ("hpz", "fsdp2-int", "hpz+qwz", "zero++"):
        secondary = 0.0 if group == ranks else (1 if int8_secondary else 2) * c.params / group
        messages = c.params / ranks if scheme in ("hpz+qwz", "zero++") and not int8_secondary else 0.0
        return state / ranks + secondary + messages
    if scheme == "hsdp":
        return state / group
    if scheme == "hfsdp":
        return (8 + c.master_bytes) * c.params / ranks + (2 + c.grad_bytes) * c.params / group
    raise ConfigError(f"scheme {scheme!r} is none of {', '.join(SCHEMES)}")


def cost(scheme: str, c: Cluster) -> Cost:
    """What ``scheme`` costs on ``c``."""
    inter_rate, intra_rate = c.inter_gbps * 1e9 / 8, c.intra_gbps * 1e9 / 8
    parts = phases(scheme, c)
    seconds = sum(part.count * max(part.inter / inter_rate, part.intra / intra_rate) for part in parts)
    here, keys = SCHEMES[scheme]
    return Cost(
        scheme,
        sum(part.count * part.inter for part in parts),
        sum(part.count * part.intra for part in parts),
        seconds,
        memory(scheme, c),
        here,
        keys.replace(" P", f" {c.group}").replace("=P", f"={c.group}"),
    )


def costs(c: Cluster) -> list[Cost]:
    """Every scheme on ``c``."""
    return [cost(scheme, c) for scheme in SCHEMES]


def _show(c: Cluster, found: list[Cost]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{c.params / 1e9:g} B parameters, {c.nodes} nodes x {c.gpus_per_node} GPUs, groups of {c.group}, "
        f"{c.micro_batches} micro-batches a step",
        caption="per rank and optimizer step; seconds of communication alone (most of it is hidden behind compute); "
        f"links {c.inter_gbps:g} Gbit/s between nodes, {c.intra_gbps:g} Gbit/s inside; memory without activations "
        "and the units that are gathered at a moment",
    )
    for name in ("scheme", "between nodes", "inside", "seconds", "memory", "here", "asked for by"):
        table.add_column(name, justify="right" if name in ("between nodes", "inside", "seconds", "memory") else "left")
    for row in found:
        table.add_row(
            row.scheme,
            f"{row.inter / 1e9:.1f} GB",
            f"{row.intra / 1e9:.0f} GB",
            f"{row.seconds:.3f}",
            f"{row.memory / 1e9:.1f} GB",
            "yes" if row.runs_here else "no",
            row.keys,
            style=None if row.runs_here else "dim",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or JSON; 2 where the input makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.utils.plan", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--params", type=float, required=True, help="parameters of the model, such as 8e9")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--hpz", type=int, default=0, help="ranks of a group (default: the GPUs of a node)")
    parser.add_argument("--micro-batches", type=int, default=1, help="per optimizer step")
    parser.add_argument("--inter-gbps", type=float, default=400.0, help="Gbit/s a GPU receives from other nodes")
    parser.add_argument("--intra-gbps", type=float, default=3600.0, help="Gbit/s a GPU receives from its node")
    parser.add_argument("--reuse", type=float, default=0.0, help="part of the weights kept from forward to backward")
    parser.add_argument("--split-masters", action="store_true", help="masters as the shard and 16 low bits")
    parser.add_argument("--fp32-grads", action="store_true", help="sharded gradients in fp32")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and seconds")
    options = parser.parse_args(arguments)
    try:
        cluster = Cluster(
            params=options.params,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            partition=options.hpz,
            micro_batches=options.micro_batches,
            inter_gbps=options.inter_gbps,
            intra_gbps=options.intra_gbps,
            reuse=options.reuse,
            master_bytes=2 if options.split_masters else 4,
            grad_bytes=4 if options.fp32_grads else 2,
        )
        found = costs(cluster)
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"cluster": asdict(cluster), "costs": [asdict(row) for row in found]}, indent=1))
    else:
        _show(cluster, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

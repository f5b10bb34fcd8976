#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whole weights out of a ZeRO-3 checkpoint, without GPUs and without a training job.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--max_shard_size 5GB] [-t TAG]

A save puts a copy of this file beside its tags; it needs the `deepspeed` package and nothing else of the job.

What must hold: shards are mapped and a parameter is assembled when it is written, so memory stays bounded by one
parameter (and one output shard's page cache), whatever the size of the model.  Nothing from the files is executed.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.export import Entry, format_size, write_shards
from deepspeed.checkpoint.folder import open_tag, resolve_tag
from deepspeed.checkpoint.loading import whole
from deepspeed.checkpoint.reader import ZeroSource, check_optim, parse_layout
from deepspeed.checkpoint.serialization import load_file
from deepspeed.errors import CheckpointError, DeepSpeedError, NotSupportedError

__all__ = [
    "GatheredTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "parse_model_states",
    "parse_optim_states",
    "to_torch_tensor",
]

PathLike = str | os.PathLike[str]


# -- files of a tag folder -----------------------------------------------------------------------------------------


def _by_number(path: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def get_checkpoint_files(checkpoint_dir: PathLike, glob_pattern: str) -> list[str]:
    """Paths in a tag folder that match, in numerical order; `FileNotFoundError` if there are none."""
    found = sorted((str(path) for path in Path(checkpoint_dir).glob(glob_pattern)), key=_by_number)
    if not found:
        raise FileNotFoundError(f"no {glob_pattern} in {os.fspath(checkpoint_dir)}")
    return found


def get_optim_files(checkpoint_dir: PathLike) -> list[str]:
    """The optim_states files of a tag folder, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: PathLike) -> list[str]:
    """The model_states files of a tag folder, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: PathLike, zero_stage: int) -> str:
    """The first model_states file of a tag folder of this ZeRO stage; `FileNotFoundError` if it is missing."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"directory {folder} does not exist")
    name = "mp_rank_00_model_states.pt" if int(zero_stage) <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder / name} does not exist")
    return str(folder / name)


@dataclass
class zero_model_state:  # noqa: N801  the name that callers know
    """What `parse_model_states` finds in one file."""

    buffers: dict[str, torch.Tensor]
    param_shapes: list[Mapping[str, torch.Size]]
    shared_params: list[list[str]]
    ds_version: str | None
    frozen_param_shapes: Mapping[str, torch.Size] | None
    frozen_param_fragments: Mapping[str, torch.Tensor] | None = field(default=None)


def parse_model_states(files: Sequence[PathLike]) -> list[zero_model_state]:
    """Buffers (floats as fp32), shapes, tied names and frozen shards of each model_states file."""
    parsed = []
    for file in files:
        content = load_file(file)
        if not isinstance(content, dict) or "buffer_names" not in content:
            raise ValueError(f"{os.fspath(file)} is not a model state checkpoint")
        parsed.append(
            zero_model_state(
                buffers={name: _fp32(content["module"][name]) for name in content["buffer_names"]},
                param_shapes=content["param_shapes"],
                shared_params=[[alias, owner] for alias, owner in (content.get("shared_params") or {}).items()],
                ds_version=content.get("ds_version"),
                frozen_param_shapes=content.get("frozen_param_shapes"),
                frozen_param_fragments=content.get("frozen_param_fragments"),
            )
        )
    return parsed


def parse_optim_states(
    files: Sequence[PathLike], ds_checkpoint_dir: PathLike
) -> tuple[int, int, list[list[torch.Tensor]], None]:
    """(ZeRO stage, world size, fp32 flat groups by rank, None); `ValueError` when files are missing.

    The fourth value has no meaning for stage 3; callers unpack four.
    """
    model = load_file(get_model_state_file(ds_checkpoint_dir, 3))
    layout = parse_layout(model, len(files), os.fspath(ds_checkpoint_dir))
    groups = [check_optim(load_file(file), layout, os.fspath(file))["fp32_flat_groups"] for file in files]
    return 3, len(files), groups, None


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


# -- state dicts ---------------------------------------------------------------------------------------------------


class GatheredTensor:
    """A parameter that is assembled from its shards when asked for: ``contiguous()`` gives the tensor."""

    def __init__(self, source: ZeroSource, name: str, dtype: torch.dtype) -> None:
        self._source, self._name = source, name
        self.dtype = dtype
        self.shape = source.shapes[name]

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """The full tensor, newly made at every call."""
        return whole(self._source, self._name, self.dtype)

    def into(self, out: torch.Tensor) -> None:
        """Assemble into a contiguous tensor of this shape and any floating dtype."""
        self._source.read_weight(self._name, 1, 0, out.view(-1))


def _tag_folder(checkpoint_dir: PathLike, tag: str | None) -> Path:
    base = Path(checkpoint_dir)
    if tag is None:
        found = resolve_tag(base, None)
        if found is None:
            raise ValueError(f"Unable to find 'latest' file at {base / 'latest'}; give the tag")
        return base / found
    if not (base / tag).is_dir():
        raise FileNotFoundError(f"Directory '{base / tag}' doesn't exist")
    return base / tag


def _source(folder: Path) -> ZeroSource:
    opened = open_tag(folder)
    if len(opened.ranks) != opened.world_size:
        raise CheckpointError(f"{folder} holds the files of {len(opened.ranks)} of {opened.world_size} ranks; copy all")
    source = ZeroSource(opened, 0)
    if source.model(0).get("mp_world_size", 1) != 1:
        raise NotSupportedError(f"{folder}: mp_world_size must be 1; model-parallel checkpoints are not read")
    source.prepare(list(source.shapes), 1, 0)
    return source


def _lazy_state(source: ZeroSource, exclude_frozen: bool) -> OrderedDict[str, torch.Tensor | GatheredTensor]:
    """Buffers as they are, parameters lazily; the names of a tied parameter share one object."""
    entries: OrderedDict[str, torch.Tensor | GatheredTensor] = OrderedDict()
    for name, buffer in source.buffers.items():
        entries[name] = _fp32(buffer)
    fragments = source.model(0).get("frozen_param_fragments") or {}
    for name in source.layout.frozen if not exclude_frozen else ():
        entries[name] = GatheredTensor(source, name, fragments[name].dtype)
    for name in source.layout.locations:
        entries[name] = GatheredTensor(source, name, torch.float32)
    for alias, owner in source.aliases.items():
        if owner in entries:
            entries[alias] = entries[owner]
    return entries


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Any:
    """Full state dict on the CPU: trained parameters in fp32, frozen ones in the dtype they were trained beside.

    ``checkpoint_dir``: the folder that holds the tags.  ``tag``: the tag, else what ``latest`` names; `ValueError`
    when there is neither.  ``lazy_mode``: parameters as `GatheredTensor`, assembled when asked for.
    """
    entries = _lazy_state(_source(_tag_folder(checkpoint_dir, tag)), exclude_frozen_parameters)
    return entries if lazy_mode else to_torch_tensor(entries)


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> OrderedDict[str, torch.Tensor]:
    """Tensors for a lazy state dict; names that share an entry share the tensor.

    ``return_empty_tensor``: tensors without content, for planning.  ``dtype``: cast floating-point entries.
    """
    made: dict[int, torch.Tensor] = {}
    result: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, entry in state_dict.items():
        if id(entry) not in made:
            if return_empty_tensor:
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
            else:
                tensor = entry.contiguous()
            cast = dtype is not None and tensor.is_floating_point()
            made[id(entry)] = tensor.to(dtype) if cast else tensor
        result[name] = made[id(entry)]
    return result


# -- conversion ----------------------------------------------------------------------------------------------------


def _entries(state: Mapping[str, Any], dtype: torch.dtype | None) -> list[Entry]:
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    entries = []
    for known in names.values():
        value = state[known[0]]
        target = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
        fill = value.into if isinstance(value, GatheredTensor) else functools.partial(_copy, value)
        entries.append(Entry(known[0], torch.Size(value.shape), target, fill, tuple(known[1:])))
    return entries


def _copy(tensor: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(tensor)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the full weights of a checkpoint as torch or safetensors files, sharded with an index when large.

    ``dtype``: cast floating-point tensors; None keeps fp32 for trained and the stored dtype for frozen parameters.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    folder = _tag_folder(checkpoint_dir, tag)
    source = _source(folder)
    entries = _entries(_lazy_state(source, exclude_frozen_parameters), dtype)
    total = sum(entry.nbytes for entry in entries)
    print(f"{folder}: {len(entries)} tensors of {source.layout.world_size} ranks, {format_size(total)} to write")
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing") as bar:
        names = write_shards(
            Path(output_dir),
            entries,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
            progress=bar.update,
        )
    print(f"wrote {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} to {output_dir}")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` without a cast."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: PathLike, tag: str | None = None
) -> torch.nn.Module:
    """Move `model` to the CPU and load the full weights into it (names that do not fit are left out); returns it.

    Raises:
        RuntimeError: a shape differs, or the model is partitioned and no `GatheredParameters` block shows its weights.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, lazy_mode=True)
    model = model.cpu()
    with torch.no_grad():
        targets = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        for name in [name for name in targets if name in state]:
            sharded = getattr(targets[name], "_sharded", None)
            if sharded is not None and not sharded.pins:
                raise RuntimeError(
                    f"{name} is partitioned by ZeRO-3 and what is written to it here is lost; load inside "
                    "deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)"
                )
        for name, entry in state.items():
            target = targets.get(name)
            if target is None:
                continue
            if tuple(target.shape) != tuple(entry.shape):
                raise RuntimeError(
                    f"{name} is {tuple(entry.shape)} in the checkpoint, {tuple(target.shape)} in the model"
                )
            target.copy_(entry.contiguous())
    return model


def parser(description: str) -> argparse.ArgumentParser:
    """The options of a command that writes whole weights."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint_dir", help="folder that holds the tags, e.g. output/checkpoint-12")
    parser.add_argument("output_dir", help="folder to write into")
    parser.add_argument("--max_shard_size", default="5GB", help="largest output file, e.g. 5GB or 300MB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of torch files")
    parser.add_argument("-t", "--tag", default=None, help="tag, e.g. global_step1; default: what 'latest' names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="show a traceback on errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 0, or 1 with the reason on stderr."""
    args = parser("Write whole fp32 weights out of a ZeRO-3 checkpoint.").parse_args(argv)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except (DeepSpeedError, OSError, ValueError) as error:
        if args.debug:
            raise
        print(f"zero_to_fp32: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

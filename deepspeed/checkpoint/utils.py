# SPDX-License-Identifier: Apache-2.0
"""Small helpers around `torch.save` that users import."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["clone_tensors_for_torch_save", "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of `item` whose tensors own storages of exactly their size, on `device`.

    A tensor, or dicts, lists and tuples of tensors, nested; other values are passed on.  Use it before `torch.save` of
    tensors that are views of larger buffers, which would be written whole.
    """
    if isinstance(item, torch.Tensor):
        if type(item) is torch.nn.Parameter:
            return torch.nn.Parameter(item.detach().to(device, copy=True).contiguous(), item.requires_grad)
        return item.detach().to(device, copy=True).contiguous()
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(entry, device) for entry in item))
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(entry, device) for entry in item)
    if isinstance(item, dict):
        copied = type(item)() if type(item) is not dict else {}
        copied.update((key, clone_tensors_for_torch_save(entry, device)) for key, entry in item.items())
        return copied
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """``<base_folder>/mp_rank_<mp_rank_str>_model_states.pt``."""
    return f"{base_folder}/mp_rank_{mp_rank_str}_model_states.pt"


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: int, tp_rank: int) -> str:
    """``<base_folder>/layer_<id>-model_<rank>-model_states.pt``, two digits each."""
    return f"{base_folder}/layer_{layer_id:02d}-model_{tp_rank:02d}-model_states.pt"

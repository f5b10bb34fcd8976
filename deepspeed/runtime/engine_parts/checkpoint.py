# SPDX-License-Identifier: Apache-2.0
"""The engine's checkpoint methods.

What must hold:

* save and load are collective and end the same way on every rank;
* a load changes nothing of the engine until every rank has checked everything it will read;
* whatever was loaded, the gathered copies of the weights (hpZ secondaries among them) are those of the new weights:
  `import_state` of the optimizer sees to it (deepspeedai/DeepSpeed#7606).

The methods read the engine's module, optimizer, scheduler and counters, and leave bytes to `deepspeed.checkpoint`.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.control import Control, default_timeout
from deepspeed.checkpoint.export import write_state_dict
from deepspeed.checkpoint.loading import Loaded, find, open_source
from deepspeed.checkpoint.reshard import build_state
from deepspeed.checkpoint.scripts import put_converters
from deepspeed.checkpoint.serialization import unsafe_globals
from deepspeed.checkpoint.state import Zero3State
from deepspeed.checkpoint.store import Storage
from deepspeed.checkpoint.writer import Node, SaveRequest, agree_on_tag, save_tag
from deepspeed.checkpoint.zero3_format import INTERNAL_KEYS, model_file, model_states, optim_file, optim_states
from deepspeed.runtime.engine_parts.consolidate import consolidate, extra_states, state_names
from deepspeed.utils.logging import logger
from deepspeed.version import __version__

__all__ = ["CheckpointMixin"]

ClientState = dict[str, Any]


class CheckpointMixin:
    """Saving, loading and consolidating; a base of the engine.

    Uses of the engine: ``module``, ``optimizer`` (with ``export_state`` and ``import_state``), ``lr_scheduler``,
    ``counter``, ``global_steps``, ``skipped_steps``, ``global_samples``, ``_config``, ``global_rank``, ``local_rank``,
    ``world_size``.
    """

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    counter: Any
    global_steps: int
    skipped_steps: int
    global_samples: int
    global_rank: int
    local_rank: int
    world_size: int
    _config: Any

    checkpoint_storage: Storage = Storage()

    def _control(self, call: str) -> Control:
        timeout = self._config.checkpoint.wait_timeout
        return Control(self.global_rank, self.world_size, call, timeout or default_timeout())

    def _node(self) -> Node:
        local = bool(self._config.checkpoint.use_node_local_storage)
        return Node(self.global_rank, self.global_rank - max(self.local_rank, 0) if local else 0, local)

    # -- saving ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint; all ranks must call it.  Returns True.

        ``tag``: folder name, ``global_step<n>`` by default.  ``client_state``: the caller's own values, returned by
        `load_checkpoint`; plain containers, numbers, text and tensors load without further ado.
        ``save_latest``: point the file ``latest`` at this tag.  ``exclude_frozen_parameters``: without frozen weights.

        Raises `ValueError` for an unsafe tag or reserved client_state keys, `CheckpointError` when any rank fails;
        the previous checkpoint is untouched then.
        """
        folder, name = Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag)
        control = self._control(f"save_checkpoint({str(folder)!r}, tag={name!r})")
        ignore = self._config.checkpoint.tag_validation.value == "Ignore"
        name, nonce, tags = agree_on_tag(control, name, ignore_differences=ignore)
        if len(set(tags)) > 1 and self.global_rank == 0:
            logger.warning(f"save_checkpoint: ranks gave different tags {sorted(set(tags))}; using {name!r} of rank 0")
        state = functools.cache(lambda: self._exported())
        model, optim = model_file(self.global_rank), optim_file(self.global_rank, self._config.bf16.enabled)
        user = dict(client_state or {})
        request = SaveRequest(
            folder=folder,
            tag=name,
            files=[
                (model, lambda: self._model_states(state(), user, exclude_frozen_parameters)),
                (optim, lambda: optim_states(state(), ds_config=self._config.raw, version=__version__)),
            ],
            scripts=self._copy_recovery_script,
            save_latest=save_latest,
            writer=f"deepspeed {__version__}",
        )
        save_tag(control, self.checkpoint_storage, request, self._node(), nonce)
        if user and self.global_rank == 0:
            self._warn_if_unsafe(folder / name / model)
        return True

    def _copy_recovery_script(self, save_path: str | os.PathLike[str]) -> None:
        """Put the converter programs into the folder of the tags; called on one rank as part of a save.

        Clients replace this method to put them elsewhere; an error in it fails the save on every rank.
        """
        put_converters(self.checkpoint_storage, Path(save_path))

    def _change_recovery_script_permissions(self, script: str | os.PathLike[str]) -> None:
        """Make a converter program executable, as far as the umask allows."""
        self.checkpoint_storage.make_executable(Path(script))

    def _exported(self) -> Zero3State:
        state: Zero3State = self.optimizer.export_state()
        return state

    def _model_states(self, state: Zero3State, user: ClientState, exclude_frozen: bool) -> dict[str, Any]:
        scheduler = self.lr_scheduler
        return model_states(
            state,
            order=state_names(self.module),
            counters={
                "skipped_steps": self.skipped_steps,
                "global_steps": self.global_steps,
                "global_samples": self.global_samples,
            },
            lr_scheduler=scheduler.state_dict() if scheduler is not None and hasattr(scheduler, "state_dict") else None,
            ds_config=self._config.raw,
            version=__version__,
            client_state=user,
            exclude_frozen=exclude_frozen,
            extra={key: child.get_extra_state() for key, child in extra_states(self.module)},
        )

    def _warn_if_unsafe(self, path: Path) -> None:
        try:
            wanted = unsafe_globals(path, self._config.checkpoint.allow_globals)
        except ValueError as error:  # the save itself is done
            logger.warning(f"checkpoint.allow_globals: {error}")
            return
        if wanted:
            logger.warning(
                f"{path}: client_state holds {', '.join(wanted)}; loading refuses these unless they are named in "
                "checkpoint.allow_globals. Plain containers, numbers, text and tensors always load"
            )

    # -- loading -----------------------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, ClientState | None]:
        """Restore a checkpoint written at any world size; all ranks must call it.

        Returns (path of the model_states file used, client state), or (None, None) where `load_dir` has no
        ``latest`` file and no tag was given.

        ``load_module_strict``: names must agree; else what fits is loaded.  ``load_optimizer_states``: False restores
        the weights (fp32 masters too) but not the optimizer.  ``load_module_only``: weights and buffers alone, no
        counters or scheduler.  ``custom_load_fn(src=..., dst=module)``: called with a mapping of full weights and the
        module with its parameters gathered; what it writes is kept.

        Raises, on every rank alike and before anything has changed: `CheckpointCorrupt` for damaged or incomplete
        files, `CheckpointMismatch` for another model or optimizer, `CheckpointUnsafe` for objects that are not on the
        allow-list, `ValueError` for an unsafe tag.
        """
        folder, name = Path(load_dir), None if tag is None else str(tag)
        control = self._control(f"load_checkpoint({str(folder)!r}, tag={name!r})")
        options = self._config.checkpoint
        found = find(control, folder, name, self._node(), universal=options.load_universal)
        if found is None:
            if self.global_rank == 0:
                logger.warning(f"{folder} has no 'latest' file and no tag was given: nothing was loaded")
            return None, None
        if not found.verifiable and self.global_rank == 0 and not options.load_universal:
            logger.info(
                f"{found.path} has no ds_manifest.json (another tool wrote it): completeness cannot be verified"
            )
        with_optimizer = load_optimizer_states and not load_module_only
        error: Exception | None = None
        staged: tuple[Loaded, Zero3State] | None = None
        try:
            staged = self._stage(found, load_module_strict, with_optimizer, custom_load_fn is not None)
        except Exception as failure:
            error = failure
        control.agree("reading the checkpoint", error)
        assert staged is not None
        loaded, state = staged
        try:
            self._put_in_place(
                loaded, state, with_optimizer, load_lr_scheduler_states, load_module_only, custom_load_fn
            )
        except Exception as failure:
            error = failure
        control.agree("putting the checkpoint in place", error)
        return loaded.model_path, _client_state(
            loaded.model, load_module_only, load_lr_scheduler_states, load_optimizer_states
        )

    def _stage(self, found: Any, strict: bool, with_optimizer: bool, custom: bool) -> tuple[Loaded, Zero3State]:
        options = self._config.checkpoint
        loaded = open_source(
            found,
            rank=self.global_rank,
            world_size=self.world_size,
            verify=options.verify_on_load,
            allow=options.allow_globals,
        )
        own = self._exported()
        return loaded, build_state(
            own,
            loaded.source,
            strict=strict and not custom,
            load_optimizer_states=with_optimizer,
            shapes_may_differ=custom,
        )

    def _put_in_place(
        self,
        loaded: Loaded,
        state: Zero3State,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        self.optimizer.import_state(state, load_optimizer_states=with_optimizer)
        self.counter.begin_window()
        for key, child in extra_states(self.module):
            if key in loaded.model["module"]:
                child.set_extra_state(loaded.model["module"][key])
        if custom_load_fn is not None:
            self._custom_load(loaded, custom_load_fn)
        if module_only:
            return
        model = loaded.model
        if with_scheduler and self.lr_scheduler is not None and model.get("lr_scheduler") is not None:
            self.lr_scheduler.load_state_dict(model["lr_scheduler"])
        self.global_steps = int(model.get("global_steps", 0))
        self.skipped_steps = int(model.get("skipped_steps", 0))
        if "global_samples" in model:
            self.global_samples = int(model["global_samples"])
        else:
            self.global_samples = self.global_steps * self._config.train_batch_size

    def _custom_load(self, loaded: Loaded, custom_load_fn: Callable[..., Any]) -> None:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        dtypes = {name: param.dtype for name, param in self.module.named_parameters(remove_duplicate=False)}
        with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
            custom_load_fn(src=loaded.full_state_dict(dtypes), dst=self.module)

    # -- whole weights -----------------------------------------------------------------------------------------

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, torch.Tensor] | None:
        """The full state dict in parameter dtype on the CPU of rank 0, None elsewhere; all ranks must call it.

        Raises `ValueError` when the engine is not of ZeRO stage 3.
        """
        if int(self._config.zero_config.stage) != 3:
            raise ValueError("_zero3_consolidated_16bit_state_dict needs zero_optimization.stage 3")
        return consolidate(self.module, rank=self.global_rank, exclude_frozen=exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights in parameter dtype to one file; all ranks must call it.

        Returns True, or False (nothing written) unless
        ``zero_optimization.stage3_gather_16bit_weights_on_model_save`` is set.  A name that ends in ``.safetensors``
        chooses that format.
        """
        if not self._config.zero_config.gather_16bit_weights_on_model_save:
            if self.global_rank == 0:
                logger.warning(
                    f"{save_filename} was not saved: set zero_optimization.stage3_gather_16bit_weights_on_model_save "
                    "to true, or use save_checkpoint and zero_to_fp32.py"
                )
            return False
        folder = Path(save_dir)
        control = self._control(f"save_16bit_model({str(folder)!r}, {save_filename!r})")
        control.agree("starting")
        error: Exception | None = None
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            try:
                write_state_dict(self.checkpoint_storage, folder, save_filename, weights)
            except Exception as failure:
                error = failure
        control.agree("writing the weights", error)
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """The older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state dict, with partitioned parameters as they are (empty), as a plain call would give."""
        options: dict[str, Any] = {} if destination is None else {"destination": destination}
        entries: dict[str, Any] = self.module.state_dict(**options, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    entries.pop(prefix + name, None)
        return entries


def _client_state(model: Mapping[str, Any], module_only: bool, scheduler: bool, optimizer: bool) -> ClientState:
    """What `load_checkpoint` returns: everything in the file that it did not use up itself."""
    if module_only:
        used = {"module"}
    else:
        used = {*INTERNAL_KEYS, *(["lr_scheduler"] if scheduler else []), *(["optimizer"] if optimizer else [])}
    return {key: value for key, value in model.items() if key not in used}

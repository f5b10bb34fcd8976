# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeedZeroOptimizer_Stage3`: the optimizer that an engine hands out, under the names of the field."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.errors import CollectiveMismatch, CollectiveTimeout, NonFiniteGradients, UsageError
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.utils.logging import logger

from . import offloading
from .core.grads import GradReducer, GradShards
from .core.master import MasterWeights
from .core.model import ShardedModel
from .core.param import ShardedParam
from .core.scaling import Verdict, vote
from .offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from .parameter_offload import DeepSpeedZeRoOffload
from .state_exchange import export_training_state, import_own_scalars, import_training_state, own_scalars

if TYPE_CHECKING:
    from deepspeed.checkpoint.state import Zero3State
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedOptimizer):
    """Steps the flat master weights of a sharded model.

    Args:
        clip: largest global gradient norm, 0 for none.
        skip_non_finite: whether a non-finite gradient skips the step; ``max_skipped_steps``: steps in a row after which
            that is an error, 0 for never.
    """

    def __init__(
        self,
        model: ShardedModel,
        master: MasterWeights,
        grads: GradReducer,
        shards: GradShards,
        loss_scaler: LossScaler | DynamicLossScaler,
        dtype: torch.dtype,
        clip: float,
        skip_non_finite: bool,
        max_skipped_steps: int = 0,
    ) -> None:
        self.sharded, self.master, self.grads, self.grad_shards = model, master, grads, shards
        self.loss_scaler = loss_scaler
        grads.loss_scale = lambda: loss_scaler.loss_scale
        self.dtype = dtype
        self.clip_grad = clip
        self.skip_non_finite, self.max_skipped_steps = skip_non_finite, max_skipped_steps
        self.parameter_offload = DeepSpeedZeRoOffload(model)
        self.steps = 0
        self.verdict: Verdict | None = None
        self._pending = False
        self._skipped = False
        self._skips_in_a_row = 0
        self.offloaded: set[OffloadStateTypeEnum] = set()
        self._frozen = [p for p in model.params.values() if p not in master.places and not p.param.requires_grad]
        self.on_skip: Callable[[], None] = lambda: None

    # -- what client code reads

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that steps the flat masters."""
        return self.master.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters per group; ``params`` are the group's flat fp32 master shards."""
        return self.master.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Optimizer state by flat master shard."""
        return self.master.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Default hyper-parameters."""
        return self.master.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite; may wait for the device."""
        self.resolve()
        return self._skipped

    @property
    def cur_scale(self) -> float:
        """Loss scale of the next backward."""
        return self.loss_scaler.loss_scale

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.loss_scaler.dynamic

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's fp32 master shards: one 1-D tensor per sub-group; copies where masters are split."""
        self._before_write()
        return [sub.fp32() for sub in self.master.sub_groups]

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """Parameters per sub-group."""
        return [[p.param for p in sub.params] for sub in self.master.sub_groups]

    @property
    def fp16_partitioned_groups(self) -> list[list[torch.Tensor]]:
        """Primary shards per sub-group."""
        self._before_write()
        return [[p.shard for p in sub.params] for sub in self.master.sub_groups]

    @property
    def fp16_partitioned_groups_flat(self) -> list[torch.Tensor | None]:
        """Primary shards of each sub-group as one 1-D tensor, or None where dtypes differ."""
        self._before_write()
        return [sub.shards for sub in self.master.sub_groups]

    def _before_write(self) -> None:
        """Shards are handed out, and may be written by whoever gets them."""
        for sub in self.master.sub_groups:
            sub.before_write()

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's averaged gradient shards by sub-group; empty without gradients."""
        slices = self.grad_shards.slices
        return {sub.index: [slices[p] for p in sub.params if p in slices] for sub in self.master.sub_groups}

    @property
    def persistent_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that stay gathered."""
        return [p.param for p in self.sharded.params.values() if p.persistent]

    def get_lr(self) -> float:
        """Learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    # -- step

    def step(self, closure: None = None) -> None:
        """Vote, clip, step, write back. Collective.

        Raises:
            UsageError: there are no gradients, or states are offloaded.
            CollectiveMismatch: ranks issued different collectives; nothing was applied.
            CollectiveTimeout: a rank died or stalled.
            NonFiniteGradients: see ``resolve``.
        """
        if closure is not None:
            raise UsageError("step(closure): the loss is not evaluated again inside a step; call step() without it")
        self.resolve()
        if self.offloaded:
            names = ", ".join(sorted(kind.value for kind in self.offloaded))
            raise UsageError(f"step() while {names} are offloaded; call reload_states() first")
        if self.sharded.fetcher.in_backward:
            self.sharded.hooks.end_backward(completed=False)
        if not self.grads.has_gradients:
            raise UsageError(
                "step() without gradients: call engine.backward(loss) (or loss.backward()) on the engine's output first"
            )
        checks = self.sharded.plan.groups.checks
        if checks is not None:
            checks.before_step(list(self.master.places))
        self._notice_unfrozen()
        self.steps += 1
        shards, idle = self.grad_shards.items(), self.grad_shards.idle
        self.verdict = vote(
            [shard for _, shard in shards],
            [p.name for p, _ in shards],
            [position for position, (p, _) in enumerate(shards) if p in idle] if idle else (),
            self.sharded.plan.groups,
            self.sharded.plan.device,
            self.loss_scaler.loss_scale,
            self.clip_grad,
            self.skip_non_finite,
            self.steps,
        )
        self._pending = True
        try:
            on_device = self.master.device_scaled and self.master.master_device.type != "cpu"
            if self.dtype is torch.float16 or not on_device:
                self.resolve()
            if self._pending or not self._skipped:
                self.master.step(self.verdict, [p for p, _ in shards])
                self.sharded.fetcher.weights_changed()
            self.grads.agree_on_order()
        finally:
            self.grads.end_window()

    def resolve(self) -> bool:
        """Learn whether the last step was applied; returns that. Waits for the device only if it has to.

        Raises:
            CollectiveMismatch: ranks issued different collectives; nothing was applied.
            NonFiniteGradients: as many steps in a row were skipped as ``max_skipped_steps`` allows.
        """
        if not self._pending or self.verdict is None:
            return not self._skipped
        self._pending = False
        self._skipped = True
        try:
            self._skipped = not self.verdict.check()
        except CollectiveMismatch:
            self._distrust()
            raise
        if not self._skipped:
            self._skips_in_a_row = 0
            self.loss_scaler.update_scale(False)
            return True
        self._skips_in_a_row += 1
        self.on_skip()
        try:
            self.loss_scaler.update_scale(True)
        finally:
            self._report_skip(self.verdict)
        if self.max_skipped_steps and self._skips_in_a_row >= self.max_skipped_steps:
            raise NonFiniteGradients(
                f"max_skipped_steps: {self._skips_in_a_row} steps in a row were skipped, the last of them because of "
                f"{self._culprit(self.verdict)}. The weights are those of before; lower the learning rate, look at the "
                "data of these steps, or raise the limit"
            )
        return False

    def _distrust(self) -> None:
        """Ranks gathered different units: nothing that was gathered or reduced may be used again."""
        self.sharded.fetcher.release_all(persistent=True)
        self.sharded.fetcher.forget_traces()  # they may differ between ranks, and gathers ahead follow them
        self.sharded.drop_secondaries()
        self.grads.end_window()
        self.grad_shards.free()

    def _culprit(self, verdict: Verdict) -> str:
        found = verdict.non_finite()
        if not found:
            return "a gradient norm beyond what float64 holds"
        checks = self.sharded.plan.groups.checks
        if checks is not None and checks.origins:
            return "; ".join(checks.origins[:8])
        first = found[0]
        ranks = f"in the shards of ranks {[entry.rank for entry in found]}" if len(found) > 1 else "in no other shard"
        return f"{first.kind} in the gradient of {first.param}, shard of rank {first.rank} (not finite: {ranks})"

    def _report_skip(self, verdict: Verdict) -> None:
        """Say it at once, and again after 10, 100, 1000, … skipped steps in a row; every rank knows, rank 0 speaks."""
        count = self._skips_in_a_row
        if self.sharded.plan.groups.primary.rank == 0 and 10 ** (len(str(count)) - 1) == count:
            scale = f"; the loss scale is now {self.loss_scaler.loss_scale:g}" if self.dtype is torch.float16 else ""
            row = f"; {count} in a row" if count > 1 else ""
            logger.warning(f"step {verdict.step} skipped: {self._culprit(verdict)}{row}{scale}")

    def _notice_unfrozen(self) -> None:
        """Say once that a parameter that was frozen when the engine was built is not trained although it is not now."""
        with torch._C.DisableTorchFunctionSubclass():
            unfrozen = [p for p in self._frozen if p.param.requires_grad]
        if unfrozen:
            self._frozen = []
            names = ", ".join(p.name for p in unfrozen[:5]) + (", …" if len(unfrozen) > 5 else "")
            logger.warning(
                f"{names} were frozen when deepspeed.initialize was called and require a gradient now; they have no "
                "master weights and are not trained. Unfreeze before initialize, or build a new engine"
            )

    @property
    def norm(self) -> torch.Tensor | None:
        """Global norm of the last step's averaged gradients before clipping: 0-d double, None before the first step;
        infinite after a skipped step."""
        if self.verdict is None:
            return None
        norm = self.verdict.norm
        return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, float("inf")))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient of the window, reduced ones too."""
        self.grads.drop_local()
        self.grads.end_window()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of the loss times the loss scale."""
        if self.dtype is torch.float16:
            loss = loss.float() * self.loss_scaler.loss_scale
        loss.backward(retain_graph=retain_graph)

    # -- weights and states

    def invalidate_secondary_tensor(self) -> None:
        """Declare every hpZ secondary shard invalid (deepspeedai/DeepSpeed#7606)."""
        self.sharded.drop_secondaries()

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that no context holds."""
        self.parameter_offload.empty_partition_cache()

    def refresh_fp32_params(self) -> None:
        """Set the masters from the shards. Writes through ``GatheredParameters`` do so by themselves."""
        for p in self.master.places:
            self.master.refresh(p)

    def export_state(self) -> Zero3State:
        """Everything of this rank that a checkpoint holds: views, no copies."""
        self.resolve()
        return export_training_state(
            self.sharded, self.master, self.loss_scaler, self.loss_scaler.dynamic, self._skipped
        )

    def import_state(self, state: Zero3State, load_optimizer_states: bool) -> None:
        """Copy ``state`` in, as a new version of every weight; hpZ secondaries are invalid afterwards."""
        if self.offloaded:
            raise UsageError("loading while states are offloaded; call reload_states() first")
        self.resolve()
        import_training_state(self.sharded, self.master, state, load_optimizer_states)
        if load_optimizer_states:
            if state.loss_scaler is not None:
                self.loss_scaler.load_state_dict(vars(state.loss_scaler))
            self._skipped = state.overflow
        self.grads.end_window()
        self.grad_shards.free()
        self.invalidate_secondary_tensor()

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer state: torch state of the flat masters, the masters, the loss scaler."""
        return {
            "zero_stage": 3,
            "optimizer_state_dict": self.master.optimizer.state_dict(),
            "fp32_flat_groups": [sub.fp32() for sub in self.master.sub_groups],
            "own_scalars": [own_scalars(sub) for sub in self.master.sub_groups],
            "loss_scaler": self.loss_scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *_: Any, **__: Any) -> None:
        """Restore what ``state_dict`` of the same rank and world size gave."""
        for sub, flat in zip(self.master.sub_groups, state["fp32_flat_groups"], strict=True):
            sub.write(flat)
        self.master.optimizer.load_state_dict(state["optimizer_state_dict"])
        for sub, own in zip(self.master.sub_groups, state["own_scalars"], strict=True):
            import_own_scalars(sub, own)
        self.loss_scaler.load_state_dict(state["loss_scaler"])
        self.sharded.fetcher.weights_changed()
        self.invalidate_secondary_tensor()

    def checkpoint_event_prologue(self) -> None:
        """Called before a checkpoint is read or written: releases what is gathered."""
        self.sharded.fetcher.release_all()

    def checkpoint_event_epilogue(self) -> None:
        """Called after a checkpoint was read or written."""

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host until ``reload_states``; any torch optimizer."""
        offloading.offload_states(self, include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring offloaded states back to the device."""
        offloading.reload_states(self, non_blocking)

    def sharded_of(self, param: torch.nn.Parameter) -> ShardedParam | None:
        """The trainable sharded parameter behind ``param``, or None."""
        sharded = getattr(param, "_sharded", None)
        return sharded if sharded is not None and sharded in self.master.places else None

    def destroy(self) -> None:
        """Remove hooks and release everything but the weights; the optimizer cannot be used afterwards."""
        try:
            self.grads.drain()
        except CollectiveTimeout:
            pass  # the group is gone, and what was reduced is not used any more
        self.parameter_offload.destroy()
        self.grad_shards.free()
        self.master.free()
        self.verdict = None
        self._pending = False

# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeedEngine`: what users hold. Every method delegates to one collaborator.

The engine wraps a module, shards it (``engine_parts.build``), counts micro-batches (``engine_parts.counter``), steps
(``zero.stage3``), saves and loads (``engine_parts.checkpoint``) and says what it does (``engine_parts.reporting``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import CollectiveMismatch, NonFiniteGradients, NotSupportedError, UsageError
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine_parts.build import OptimizerLike, build_optimizer_and_shards
from deepspeed.runtime.engine_parts.checkpoint import CheckpointMixin
from deepspeed.runtime.engine_parts.counter import StepCounter
from deepspeed.runtime.engine_parts.getters import ConfigGetters
from deepspeed.runtime.engine_parts.reporting import Reporter
from deepspeed.runtime.lr_schedules import build_scheduler
from deepspeed.runtime.zero.checks import Agreement
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.topology import current_device
from deepspeed.utils.logging import set_log_level_from_string

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
COMPILED = (
    "torch.compile was applied to a whole model, or in place by module.compile(): the hooks that gather weights cannot "
    "be part of a graph. Give deepspeed.initialize the plain module and call engine.compile(backend=...), which "
    "compiles the forward of every block"
)


class DeepSpeedEngine(CheckpointMixin, ConfigGetters, nn.Module):
    """A sharded model with its optimizer, schedule, counters and checkpoints.

    Build it with ``deepspeed.initialize``. Call it like the model; then ``backward(loss)`` and ``step()`` per
    micro-batch. Attributes that the engine does not have are looked up on the wrapped module.

    Attributes:
        module: the wrapped model; ``optimizer``: the ZeRO optimizer (or the sharding alone, without one);
            ``lr_scheduler``, ``training_dataloader``: what was given or built, or None; ``config``: the user's dict.
    """

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        optimizer: OptimizerLike = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[..., Any] | None = None,
        config: Any = None,
        config_class: DeepSpeedConfig | None = None,
        dont_change_device: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        super().__init__()
        self._config: DeepSpeedConfig = config_class if config_class is not None else DeepSpeedConfig(config, mpu)
        self.config: dict[str, Any] = self._config.raw
        if self._config.log_level is not None:
            set_log_level_from_string(self._config.log_level)
        self.mpu = mpu
        self.device = current_device()
        self.global_rank = comm.get_rank()
        self.world_size = self.dp_world_size = comm.get_world_size()
        self.local_rank = _local_rank(args)
        self.collate_fn = collate_fn
        self.counter = StepCounter(
            self._config.gradient_accumulation_steps, self._config.train_micro_batch_size_per_gpu, self.world_size
        )
        self.module = model
        _move_buffers(model, self.device)
        with agreement if agreement is not None else Agreement("DeepSpeedEngine") as agreed:
            sharded = build_optimizer_and_shards(model, self._config, optimizer, model_parameters, agreed)
        self.optimizer = cast(Any, sharded)
        self.basic_optimizer = getattr(self.optimizer, "optimizer", None)
        self.lr_scheduler = self._scheduler(lr_scheduler)
        self._stepped_scheduler: Any = None
        self._skipped_steps = 0
        self.is_compiled = False
        self._destroyed = False
        if self._trains:
            self.optimizer.on_skip = _calls(self, "_step_was_skipped")
            counter = self.counter
            self.optimizer.grads.accumulation = lambda: counter.accumulation
            self.optimizer.grads.on_abort = counter.begin_window
        self.reporter = Reporter(self._config, self.optimizer_model.plan.groups.traffic)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None

    # -- what the engine is made of

    @property
    def _trains(self) -> bool:
        return isinstance(self.optimizer, DeepSpeedZeroOptimizer_Stage3)

    @property
    def optimizer_model(self) -> Any:
        """The sharded model behind the optimizer."""
        return self.optimizer.sharded

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name == "module":
                raise
            return getattr(module, name)

    def _scheduler(self, given: Any) -> Any:
        if given is not None:
            return given(self.basic_optimizer) if callable(given) and not hasattr(given, "step") else given
        if self._config.scheduler is None or self.basic_optimizer is None:
            return None
        return build_scheduler(self._config.scheduler, self.basic_optimizer)

    # -- forward, backward, step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward; its output is returned as it is."""
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            inputs, kwargs = _cast((inputs, kwargs), torch.float16)
        with self.reporter.phase("forward"), self._autocast():
            try:
                output = self.module(*inputs, **kwargs)
            except BaseException as error:
                self.optimizer_model.hooks.abort_forward()
                if type(error).__name__ == "InternalTorchDynamoError":  # of a module that is imported with it
                    raise UsageError(COMPILED) from error
                raise
        return output

    def _autocast(self) -> Any:
        autocast = self._config.torch_autocast
        if not autocast.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=autocast.dtype or torch.bfloat16)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of a scalar loss; gradients are reduced as they become ready.

        Args:
            scale_wrt_gas: divide the loss by the accumulation steps; False where the caller did so.

        Returns:
            the loss that was differentiated (before loss scaling).

        Raises:
            AssertionError: the loss is no scalar tensor.
            UsageError: the engine has no optimizer.
        """
        self._needs_optimizer("backward()")
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, (
            f"backward() takes a scalar loss, got {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss)}"
        )
        if scale_wrt_gas and self.counter.accumulation > 1:
            loss = loss / self.counter.accumulation
        hooks = self.optimizer.sharded.hooks
        completed = False
        hooks.managed = True
        with self.reporter.phase("backward"):
            try:
                self.optimizer.backward(loss, retain_graph)
                completed = True
            finally:
                hooks.managed = False
                hooks.end_backward(completed)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a plain ``.backward()`` in fp16."""
        self._needs_optimizer("scale()")
        if self._config.fp16.enabled:
            return loss.float() * self.optimizer.cur_scale
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. At an accumulation boundary: clip, step, schedule.

        Raises:
            UsageError: no gradient was computed since the last step.
            CollectiveMismatch: ranks issued different collectives; nothing was applied.
        """
        self._needs_optimizer("step()")
        boundary = self.counter.at_boundary
        if boundary:
            try:
                with self.reporter.phase("step"):
                    self._optimizer_step(lr_kwargs or {})
            except (CollectiveMismatch, NonFiniteGradients):
                self.counter.begin_window()
                raise
        self.counter.finish_micro_step(boundary)
        if boundary:
            self.reporter.step_done(self)

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        self.optimizer.resolve()
        self._stepped_scheduler = None
        self.optimizer.steps = self.counter.global_steps
        self.optimizer.step()
        scheduler = self.lr_scheduler
        if scheduler is None:
            return
        if hasattr(scheduler, "rewind"):
            if not self.optimizer._pending and self.optimizer.overflow:
                return
            scheduler.step(**lr_kwargs)
            self._stepped_scheduler = scheduler
        elif not self.optimizer.overflow:
            scheduler.step(**lr_kwargs)

    def _step_was_skipped(self) -> None:
        """The last step turned out to be skipped: count it, and take its schedule step back."""
        self._skipped_steps += 1
        scheduler, self._stepped_scheduler = self._stepped_scheduler, None
        if scheduler is not None:
            scheduler.rewind()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were not reduced. Those that were belong to the window, which only ``step`` ends."""
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.module.parameters():
                param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accepted for accumulation loops; gradients are sharded, so each backward reduces, to the same sum."""
        yield

    def _needs_optimizer(self, call: str) -> None:
        if not self._trains:
            raise UsageError(
                f"{call} on an engine without an optimizer: pass optimizer=, or an 'optimizer' section in the config, "
                "to deepspeed.initialize"
            )
        if self.optimizer_model.hooks.superseded:
            raise UsageError(
                f"{call} on an engine whose module was given to another deepspeed.initialize since; use the engine "
                "that it returned"
            )

    # -- accumulation and counters

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the current micro-batch ends its window; None goes back to counting."""
        self.counter.boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends its window."""
        return self.counter.at_boundary

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.counter.accumulation

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.counter.train_batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch through the accumulation steps.

        Raises:
            BatchConfigError: no multiple of micro batch times world size.
        """
        self.counter.set_train_batch(train_batch_size)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Change the accumulation steps, and so the global batch."""
        self.counter.set_train_batch(self.counter.micro_batch * steps * self.world_size)

    @property
    def micro_steps(self) -> int:
        """Finished micro-batches."""
        return self.counter.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.counter.micro_steps = value

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.counter.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self.counter.global_steps = value
        self.optimizer_model.plan.groups.traffic.place.step = value

    @property
    def global_samples(self) -> int:
        """Samples over all ranks so far."""
        return self.counter.global_samples

    @global_samples.setter
    def global_samples(self, value: int) -> None:
        self.counter.global_samples = value

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients."""
        if self._trains:
            self.optimizer.resolve()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        if self._trains:
            self.optimizer.resolve()
        self._skipped_steps = value

    def was_step_applied(self) -> bool:
        """Whether the last optimizer step changed the weights."""
        return bool(self._trains and self.global_steps > 0 and self.optimizer.resolve())

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Global norm of the averaged, unscaled gradients of the last step, before clipping: a 0-d double tensor.

        None before the first step, infinite where the step was skipped.
        """
        return self.optimizer.norm if self._trains else None

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro batch, accumulation steps)."""
        return self.train_batch_size(), self.counter.micro_batch, self.counter.accumulation

    def get_lr(self) -> list[float]:
        """Learning rate of every group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of every group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """``type`` entry of every group, None where there is none."""
        return [group.get("type") for group in self.optimizer.param_groups]

    def get_wall_clock_timers(self) -> Any:
        """The timers of ``wall_clock_breakdown``."""
        return self.reporter.timers

    # -- gathering and memory

    def communication_stats(self, reset: bool = False) -> dict[str, int]:
        """What this rank sent over the wire: gathers and bytes inside an hpZ group and across groups, reductions.

        Args:
            reset: start counting anew.
        """
        traffic = self.optimizer_model.plan.groups.traffic
        stats = traffic.as_dict()
        if reset:
            traffic.reset()
            self.reporter._reported = traffic.as_dict()
        return stats

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter."""
        self.optimizer.empty_partition_cache()

    def offload_states(
        self,
        include: Any = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host until ``reload_states``; see ``DeepSpeedZeroOptimizer_Stage3.offload_states``.

        States that the configuration keeps on the host already are left out.
        """
        assert self._trains, "offload_states() needs an engine with an optimizer"
        wanted = set(include) if include is not None else set(OffloadStateTypeEnum)
        if self._config.zero_config.optimizer_device is OffloadDeviceEnum.cpu:
            wanted -= {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}
        self.optimizer.offload_states(wanted, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring offloaded states back."""
        assert self._trains, "reload_states() needs an engine with an optimizer"
        self.optimizer.reload_states(non_blocking)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Accepted: reductions are coalesced per unit already, and each backward reduces."""
        yield

    # -- the rest of the public surface

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """``torch.compile`` the forward of every unit's module; hooks stay outside, so there are no breaks inside.

        Raises:
            NotSupportedError: a ``schedule`` or compiled autograd is asked for.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotSupportedError(
                "engine.compile: schedule and compiled_autograd_enabled are not built; leave them out"
            )
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        for scope in self.optimizer_model.hooks.scopes:
            if scope.module is not self.module:
                scope.module.forward = torch.compile(scope.module.forward, **options)
        self.is_compiled = True

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader over this rank's share of ``dataset``; evaluation routes keep the order."""
        if route not in ("train", "eval", "predict"):
            raise UsageError(f"deepspeed_io: route {route!r} is not one of train, eval, predict")
        if route != "train" and data_sampler is None:
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, self.world_size, self.global_rank, shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.counter.micro_batch,
            pin_memory=pin_memory,
            local_rank=self.local_rank,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.world_size,
            data_parallel_rank=self.global_rank,
            dataloader_drop_last=self._config.dataloader_drop_last,
        )

    def destroy(self) -> None:
        """Remove every hook and release the engine's memory. Safe to call twice; the engine cannot be used after."""
        if self.__dict__.get("_destroyed", True):
            return
        self._destroyed = True
        self.optimizer.destroy()
        self.reporter.close()
        get_accelerator().empty_cache()


def _calls(engine: DeepSpeedEngine, method: str) -> Callable[[], None]:
    """A callback into ``engine`` that does not keep it alive."""
    reference = weakref.ref(engine)

    def call() -> None:
        target = reference()
        if target is not None:
            getattr(target, method)()

    return call


def _local_rank(args: Any) -> int:
    """LOCAL_RANK of this process, or the local rank that the arguments carry."""
    import os

    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    for name in ("device_rank", "local_rank"):
        value = args.get(name) if isinstance(args, dict) else getattr(args, name, None)
        if isinstance(value, int):
            return value
    return comm.get_local_rank()


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring buffers to ``device``; parameters are brought there as they are sharded."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                child._buffers[name] = buffer.to(device)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return type(value)({key: _cast(item, dtype) for key, item in value.items()})
    return value

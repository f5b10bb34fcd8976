# SPDX-License-Identifier: Apache-2.0
"""Lightning's DeepSpeedStrategy at stage 3, and Fabric's, against a plain Lightning Trainer with the global batch.

Lightning refuses the strategy on anything but its CUDAAccelerator. Trainer and Fabric take an accelerator of one's own,
so here is one of that class whose devices are the CPU; the strategy runs as it is.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import models, run_ranks
from tests.harness.skips import needs
from tests.integration import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason=needs("lightning"))
EPOCHS = 2
ACCUMULATE = 2
CLIP = 0.3


def _rendezvous() -> dict[str, str]:
    """Lightning itself starts the process group in some tests: where."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _on_cpu(base: type) -> Any:
    """An accelerator of Lightning's class for CUDA, with the CPU as its devices."""
    return type(
        "OnCpu",
        (base,),
        {
            "setup_device": lambda self, device: None,
            "setup": lambda self, trainer: None,
            "teardown": lambda self: None,
            "parse_devices": staticmethod(lambda devices: list(range(devices))),
            "get_parallel_devices": staticmethod(lambda devices: [torch.device("cpu", i) for i in devices]),
            "auto_device_count": staticmethod(lambda: 1),
            "is_available": staticmethod(lambda: True),
            "name": staticmethod(lambda: "on_cpu"),
        },
    )()


def config(hpz: int) -> dict[str, Any]:
    """What a user hands to the strategy: it has no argument for hpZ."""
    return {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": hpz,
            "stage3_param_persistence_threshold": 0,
        },
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    }


def _loader(start: int, count: int, batch: int, world: int, rank: int) -> Any:
    """Lightning would shuffle what it shards over the ranks; this is the same order, not shuffled."""
    tokens = torch.randint(0, models.VOCAB, (count, 6), generator=torch.Generator().manual_seed(start))
    data = torch.utils.data.TensorDataset(tokens, torch.roll(tokens, 1, dims=1))
    sampler = None
    if world > 1:
        sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=batch, sampler=sampler)


def _lightning_module(
    batch: int, in_init: bool = False, optimizer: Any = torch.optim.AdamW, manual: bool = False
) -> Any:
    import lightning.pytorch as pl

    class Windows(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = models.blocks() if in_init else None
            self.seen: list[float] = []
            self.norms: list[float] = []
            self.automatic_optimization = not manual

        def configure_model(self) -> None:
            if self.net is None:
                self.net = models.blocks()
                self.sharded_at_build = all(hasattr(param, "ds_id") for param in self.net.parameters())

        def training_step(self, data: Any, _: int) -> Any:
            loss = self.net(*data)
            self.log("train_loss", loss.detach(), sync_dist=True)
            self.seen.append(loss.item())
            if manual:
                steps: Any = self.optimizers()
                self.manual_backward(loss)
                steps.step()
                steps.zero_grad()
            return loss

        def validation_step(self, data: Any, _: int) -> None:
            self.log("val_loss", self.net(*data), sync_dist=True)

        def test_step(self, data: Any, _: int) -> None:
            self.log("test_loss", self.net(*data), sync_dist=True)

        def predict_step(self, data: Any, _: int) -> Any:
            return self.net(*data)

        def configure_optimizers(self) -> Any:
            steps = optimizer(self.parameters(), lr=1e-2)
            decay = torch.optim.lr_scheduler.LambdaLR(steps, lambda step: 0.9**step)
            if manual:
                return steps
            return {"optimizer": steps, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

        def _load(self, start: int, count: int) -> Any:
            return _loader(start, count, batch, self.trainer.world_size, self.trainer.global_rank)

        def train_dataloader(self) -> Any:
            return self._load(11, 48)

        def val_dataloader(self) -> Any:
            return self._load(12, 16)

        test_dataloader = predict_dataloader = val_dataloader

    return Windows()


def _trainer(out: str, world: int, strategy: Any, **more: Any) -> Any:
    """`strategy` None: plain, one process, on Lightning's own CPU accelerator."""
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.plugins.environments import LightningEnvironment

    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if strategy is not None:
        where = {"accelerator": _on_cpu(CUDAAccelerator), "devices": world, "strategy": strategy}
        where["plugins"] = [LightningEnvironment()]
    arguments = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        # Lightning divides the loss by the accumulation, and so does engine.backward (as upstream's does): the norm
        # that is clipped is that much smaller. Adam's step does not depend on it otherwise.
        "gradient_clip_val": CLIP if strategy is None else CLIP / ACCUMULATE,
        "use_distributed_sampler": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": out,
    }
    return pl.Trainer(**where, **{**arguments, **more})


def _strategy(hpz: int | None, **more: Any) -> Any:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    if hpz is None:
        return None
    return DeepSpeedStrategy(config=config(hpz), **more)


def work(out: str, world: int, hpz: int | None) -> dict[str, Any]:
    """Runs on every rank: fit, validate, test, predict, fit on, resume, validate a checkpoint in a new Trainer."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    if hpz is None:
        tiny.alone()
    batch = 2 if hpz is not None else 2 * world
    keep = ModelCheckpoint(dirpath=out, filename="{epoch}", save_top_k=-1)
    trainer, module = _trainer(out, world, _strategy(hpz), callbacks=[keep]), _lightning_module(batch)
    trainer.fit(module)
    result: dict[str, Any] = {
        "losses": list(module.seen),
        "sharded at build": module.sharded_at_build,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "weights": tiny.full_weights(module.net),
    }
    [validated] = trainer.validate(module, verbose=False)
    [tested] = trainer.test(module, verbose=False)
    result["evaluated"] = [validated["val_loss"], tested["test_loss"]]
    result["predicted"] = torch.stack(trainer.predict(module))
    module.seen.clear()
    _trainer(out, world, _strategy(hpz), max_epochs=1, enable_checkpointing=False).fit(module)
    result["fit on"] = list(module.seen)
    resumed, again = _trainer(out, world, _strategy(hpz), enable_checkpointing=False), _lightning_module(batch)
    resumed.fit(again, ckpt_path=f"{out}/epoch=0.ckpt")
    result["resumed"] = list(again.seen)
    fresh = _trainer(out, world, _strategy(hpz), enable_checkpointing=False)
    [loaded] = fresh.validate(_lightning_module(batch), ckpt_path=f"{out}/epoch=1.ckpt", verbose=False)
    result["loaded"] = loaded["val_loss"]
    return result


def mean(results: list[dict[str, Any]], key: str) -> Any:
    """Over the ranks; each has its part of the global batch."""
    return torch.stack([torch.as_tensor(result[key], dtype=torch.float64) for result in results]).mean(0).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("plain"))


@functools.cache
def plain(world: int, folder: str) -> dict[str, Any]:
    """One process with the global batch of `world` ranks."""
    return run_ranks(work, 1, f"{folder}/{world}", world, None, init_group=False, timeout=120)[0]


@pytest.mark.parametrize(
    ("world", "hpz"), [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow), (4, 2)]
)
def test_trainer_equals_plain(world: int, hpz: int, folder: str, tmp_path: Path) -> None:
    wanted = plain(world, folder)
    results = run_ranks(work, world, str(tmp_path), world, hpz, init_group=False, env=_rendezvous(), timeout=180)
    got = results[0]
    assert got["sharded at build"] and not wanted["sharded at build"]
    for key in ("losses", "fit on", "resumed"):
        assert mean(results, key) == pytest.approx(wanted[key], rel=1e-5), key
    for name, value in wanted["logged"].items():
        expected = value if name != "train_loss" else mean(results, "losses")[-1]
        assert got["logged"][name] == pytest.approx(expected, rel=1e-5), name
    assert got["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
    assert got["loaded"] == pytest.approx(wanted["loaded"], rel=1e-5)
    assert mean(results, "predicted") == pytest.approx(wanted["predicted"].tolist(), rel=1e-5)
    assert got["steps"] == wanted["steps"] == 48 // (2 * world) * EPOCHS // ACCUMULATE
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "epoch=0.ckpt" / "checkpoint").glob("*_optim_states.pt"))


def variants(out: str, world: int) -> dict[str, list[float]]:
    """Runs on every rank: the model built in `__init__`, names of strategies, offload, precisions, steps by hand."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    seen = {}
    once = {"max_epochs": 1, "enable_checkpointing": False}

    def fit(name: str, module: Any, strategy: Any, **more: Any) -> Any:
        trainer = _trainer(out, world, strategy, **{**once, **more})
        trainer.fit(module)
        seen[name] = list(module.seen)
        return trainer

    module = _lightning_module(2, in_init=True)
    fit("in init", module, "deepspeed_stage_3")
    module.seen.clear()
    fit("a second fit", module, "deepspeed_stage_3")
    adam = functools.partial(DeepSpeedCPUAdam, weight_decay=0.01)
    fit("offload", _lightning_module(2, optimizer=adam), "deepspeed_stage_3_offload")
    by_hand = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = fit("by hand", _lightning_module(2, manual=True), _strategy(2), **by_hand)
    assert trainer.global_step == len(seen["by hand"])
    for precision in ("bf16-true", "bf16-mixed", "16-mixed"):
        module = _lightning_module(2, in_init=True)  # drawn in fp32, so that they are the plain model's
        fit(precision, module, _strategy(2), precision=precision)
        assert {param.dtype for param in module.parameters()} == {
            torch.float16 if precision == "16-mixed" else torch.bfloat16
        }
    return seen


def plain_variants(out: str, world: int) -> dict[str, list[float]]:
    tiny.alone()
    once: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False}
    seen = {}
    module = _lightning_module(2 * world, in_init=True)
    for name in ("in init", "a second fit"):
        _trainer(out, world, None, **once).fit(module)
        seen[name] = list(module.seen)
        module.seen.clear()
    module = _lightning_module(2 * world, manual=True)
    once.update(accumulate_grad_batches=1, gradient_clip_val=None)
    _trainer(out, world, None, **once).fit(module)
    return {**seen, "offload": seen["in init"], "by hand": list(module.seen)}


@pytest.mark.slow
def test_variants(tmp_path: Path) -> None:
    world = 4
    [wanted] = run_ranks(plain_variants, 1, str(tmp_path), world, init_group=False, timeout=120)
    results = run_ranks(variants, world, str(tmp_path), world, timeout=240)
    for name, losses in wanted.items():
        assert mean(results, name) == pytest.approx(losses, rel=1e-5), name
    for precision in ("bf16-true", "bf16-mixed", "16-mixed"):
        assert mean(results, precision) == pytest.approx(wanted["in init"], rel=1e-2), precision


def single_file(out: str, world: int) -> list[float]:
    """Runs on every rank: a checkpoint made one file by Lightning's converter, and loaded with load_full_weights."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    trainer, module = _trainer(out, world, _strategy(2), max_epochs=1), _lightning_module(2)
    trainer.fit(module)
    trainer.save_checkpoint(f"{out}/folder.ckpt")
    if trainer.is_global_zero:
        convert_zero_checkpoint_to_fp32_state_dict(f"{out}/folder.ckpt", f"{out}/file.ckpt")
    trainer.strategy.barrier()
    [before] = trainer.validate(module, verbose=False)
    loads = _trainer(out, world, _strategy(2, load_full_weights=True))
    [after] = loads.validate(_lightning_module(2), ckpt_path=f"{out}/file.ckpt", weights_only=False, verbose=False)
    return [before["val_loss"], after["val_loss"]]


def read_single_file(path: str) -> float:
    """Plain Lightning reads it."""
    tiny.alone()
    trainer = _trainer(str(Path(path).parent), 1, None)
    [found] = trainer.validate(_lightning_module(8), ckpt_path=path, weights_only=False, verbose=False)
    return found["val_loss"]


@pytest.mark.slow
def test_single_file(tmp_path: Path) -> None:
    for before, after in run_ranks(single_file, 4, str(tmp_path), 4, timeout=120):
        assert before == after
    [alone] = run_ranks(read_single_file, 1, str(tmp_path / "file.ckpt"), init_group=False)
    assert alone == pytest.approx(before, rel=1e-5)


def fabric(out: str, hpz: int | None, world: int) -> dict[str, Any]:
    """Runs on every rank: a loop of one's own; saved after three batches, loaded after six."""
    import lightning as L
    from lightning.fabric.accelerators import CUDAAccelerator
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DeepSpeedStrategy

    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if hpz is None:
        tiny.alone()
    else:
        strategy = DeepSpeedStrategy(stage=3, config={**config(hpz), "gradient_clipping": CLIP})
        where = {"accelerator": _on_cpu(CUDAAccelerator), "devices": world, "strategy": strategy}
        where["plugins"] = [LightningEnvironment()]
    runner = L.Fabric(**where)
    runner.launch()
    with runner.init_module():
        model: Any = models.blocks()
    result: dict[str, Any] = {"sharded at build": all(hasattr(param, "ds_id") for param in model.parameters())}
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = runner.setup(model, optimizer)
    batch = 2 if hpz is not None else 2 * world
    batches = list(
        runner.setup_dataloaders(
            _loader(11, 48, batch, runner.world_size, runner.global_rank), use_distributed_sampler=False
        )
    )

    def steps(some: list[Any]) -> list[float]:
        seen = []
        for data in some:
            loss = model(*data)
            runner.backward(loss)
            if hpz is None:
                runner.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    result["losses"] = steps(batches[:3])
    runner.save(f"{out}/fabric.ckpt", {"model": model, "optimizer": optimizer, "seen": 3})
    result["losses"] += steps(batches[3:6])
    state = {"model": model, "optimizer": optimizer, "seen": 0}
    runner.load(f"{out}/fabric.ckpt", state)
    result["seen"], result["again"] = state["seen"], steps(batches[3:6])
    model.eval()
    with torch.no_grad():
        result["evaluated"] = [model(*data).item() for data in batches]
    return result


@pytest.mark.parametrize(
    ("world", "hpz"), [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow), (4, 2)]
)
def test_fabric_equals_plain(world: int, hpz: int, tmp_path: Path) -> None:
    [wanted] = run_ranks(fabric, 1, str(tmp_path / "plain"), None, world, init_group=False, timeout=120)
    results = run_ranks(fabric, world, str(tmp_path / "sharded"), hpz, world, timeout=120)
    for key in ("losses", "again", "evaluated"):
        assert mean(results, key) == pytest.approx(wanted[key], rel=1e-5), key
    assert all(result["sharded at build"] and result["seen"] == 3 for result in results)
    assert all(result["again"] == pytest.approx(result["losses"][3:], rel=1e-6) for result in results)


def refused(out: str) -> str:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    os.environ["WORLD_SIZE"] = "1"
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=DeepSpeedStrategy(stage=3), default_root_dir=out)
    try:
        trainer.fit(_lightning_module(2))
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_lightning_itself_refuses_its_cpu_accelerator(tmp_path: Path) -> None:
    """The day it does not, the accelerator of this file can go."""
    [said] = run_ranks(refused, 1, str(tmp_path), init_group=False)
    assert said == "The DeepSpeed strategy is only supported on CUDA GPUs but `CPUAccelerator` is used."

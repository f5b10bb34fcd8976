# SPDX-License-Identifier: Apache-2.0
"""The data loader that `initialize(training_data=...)` makes, and a wrapper that never runs out.

What must hold: over one epoch the ranks together see every sample (DistributedSampler pads, or drops with
`dataloader_drop_last`), and each epoch has another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler


def _set_epoch(loader: Any, epoch: int) -> None:
    for owner in (loader, getattr(loader, "sampler", None)):
        tell = getattr(owner, "set_epoch", None)
        if tell is not None:
            tell(epoch)
            return


class RepeatingLoader:
    """Iterates a loader again and again, telling it (or its sampler) the epoch where it has `set_epoch`.

    `next` raises ValueError where the loader yields nothing at all.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.epoch += 1
            _set_epoch(self.loader, self.epoch)
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            raise ValueError("the loader yields no batch: it cannot be repeated") from None


class DeepSpeedDataLoader:
    """A DataLoader over this rank's share of a dataset.

    A map-style dataset is split by a DistributedSampler unless `data_sampler` is given; an iterable one is read as it
    is, so it must itself give each rank its share. `tput_timer` is started at each batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        data_parallel_world_size: int = 1,
        data_parallel_rank: int = 0,
        dataloader_drop_last: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.local_rank = local_rank
        self.tput_timer = tput_timer
        iterable = isinstance(dataset, IterableDataset)
        if data_sampler is None and not iterable:
            data_sampler = DistributedSampler(
                dataset, data_parallel_world_size, data_parallel_rank, drop_last=dataloader_drop_last
            )
        self.sampler = data_sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            pin_memory=pin_memory and torch.cuda.is_available(),
            sampler=None if iterable else data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=dataloader_drop_last,
        )
        self.dataset = dataset
        self._epoch = 0
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches per epoch on this rank. Raises TypeError for an iterable dataset without a length."""
        return len(self.dataloader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """One pass over this rank's share, in the order of its epoch."""
        if self.sampler is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self._epoch)
        self._epoch += 1
        for batch in self.dataloader:
            if self.tput_timer is not None:
                self.tput_timer.start()
            yield batch

    def __next__(self) -> Any:
        """The next batch of a pass that the first call starts and that StopIteration ends."""
        if self._batches is None:
            self._batches = iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

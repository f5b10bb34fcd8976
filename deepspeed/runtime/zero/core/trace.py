# SPDX-License-Identifier: Apache-2.0
"""Pure: the order in which units are used in one kind of pass, and what follows from it.

A pass is compared with the order of the pass before. While they agree, ``upcoming`` tells what to prefetch; where
they differ (another branch, another data path) nothing is wrong: the caller gathers on demand and the new order is
adopted when the pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Trace:
    """Recorded order of unit indices for one kind of pass (forward, evaluation, backward)."""

    __slots__ = ("order", "position", "seen", "valid")

    def __init__(self) -> None:
        self.order: list[int] = []
        self.seen: list[int] = []
        self.position = 0
        self.valid = True

    def visit(self, index: int) -> None:
        """Note that the unit ``index`` is used now."""
        self.seen.append(index)
        position = self.position
        if position < len(self.order) and self.order[position] == index:
            self.position = position + 1
            return
        self.valid = False
        try:
            self.position = self.order.index(index, position) + 1
        except ValueError:
            pass

    def upcoming(self) -> Iterator[int]:
        """Units expected after the current position, nearest first."""
        order = self.order
        for position in range(self.position, len(order)):
            yield order[position]

    def finish(self) -> bool:
        """End the pass; adopt its order where it differed. Returns whether the order changed."""
        changed = not self.valid or len(self.seen) != len(self.order)
        if changed and self.seen:
            self.order = self.seen
        self.reset()
        return changed

    def reset(self) -> None:
        """Forget the running pass and keep the recorded order."""
        self.seen = []
        self.position = 0
        self.valid = True

    def forget(self) -> None:
        """Forget the recorded order as well; the next pass records it anew."""
        self.order = []
        self.reset()


def reuse_distances(uses: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Elements of other units used between two uses of the same unit: the smallest such distance of each unit.

    Args:
        uses: unit indices in order of use; ``sizes[i]`` is the number of elements of unit ``i``.

    A unit that is used once has no entry.
    """
    last: dict[int, int] = {}
    nearest: dict[int, int] = {}
    passed = 0
    for index in uses:
        if index in last:
            distance = passed - last[index]
            nearest[index] = min(distance, nearest.get(index, distance))
        passed += sizes[index]
        last[index] = passed
    return nearest

"""A ring: tiles handed from one role to another through a few slots of shared memory.

Each slot has two mbarriers. `full` counts bytes: the producer announces what its copies will write,
the copy engine subtracts what it has written, and the phase flips at zero. `empty` counts arrivals:
one per consumer warp that has read the slot.

    producer                         slot                          consumer
    wait empty, announce bytes  ->  [ full  ]  <- TMA complete_tx
    TMA copies                      [ tiles ]  ->  wait full, WGMMA
                                    [ empty ]  <-  one arrival a warp

Both counts follow from the tables, so no number here can disagree with a copy or a role.

A `WordRing` hands over 32-bit words instead of tiles: what one warp has decided, such as the next
tile to visit, told to all warps of another role.

On SM100 the tensor cores themselves take part: their commit empties a slot that they have read
(`UmmaRing`) and fills a slot of tensor memory that they have written (`AccumulatorRing`).

    mma                              slot                          epilogue
    UMMA, then commit           ->  [ full  ]  one arrival
                                    [ acc   ]  ->  wait full, read TMEM
    wait empty                      [ empty ]  <-  one arrival a thread
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineAsync,
    PipelineTmaAsync,
    PipelineTmaUmma,
    PipelineUmmaAsync,
)

from cutedsl_fa3.layouts import Tile

from .roles import WARP, Role
from .schedule import ScheduleError, is_whole

BARRIER_BYTES = 8
WORD_BYTES = 4


@dataclass(frozen=True)
class Ring:
    """`tiles` that travel together from `producer` to `consumer` through `stages` slots.

    `multicast` names the cluster axis ("m" or "n") along which CTAs share a tile: each copies its
    part of it into all of them, so a slot is empty only when the consumers of all of them say so.

    Raises:
        ScheduleError: no tile, a tile twice, no stage, or a role that hands tiles to itself.
    """

    tiles: tuple[str, ...]
    stages: int
    producer: str = "producer"
    consumer: str = "consumer"
    multicast: Mapping[str, str] = field(default_factory=dict)

    pipeline: ClassVar[type[PipelineAsync]] = PipelineTmaAsync

    def __post_init__(self) -> None:
        tiles, stages = self.tiles, self.stages
        self._check_tiles()
        if not is_whole(stages):
            raise ScheduleError(
                f"ring {tiles}: stages = {stages!r}; a whole number (int) is needed"
            )
        if stages < 1:
            raise ScheduleError(f"ring {tiles}: stages = {stages}; 1 or more are needed")
        if self.producer == self.consumer:
            raise ScheduleError(
                f"ring {tiles}: {self.producer!r} is producer and consumer, and would wait for "
                "itself; two roles are needed"
            )
        if not isinstance(self.multicast, Mapping):
            raise ScheduleError(
                f"ring {tiles}: multicast = {self.multicast!r}; a mapping from tile to 'm' or 'n' "
                "is needed"
            )

    def _check_tiles(self) -> None:
        tiles = self.tiles
        if not isinstance(tiles, tuple) or not all(isinstance(name, str) for name in tiles):
            one = f"; use ({tiles!r},)" if isinstance(tiles, str) else ""
            raise ScheduleError(f"ring tiles = {tiles!r}: a tuple of names is needed{one}")
        if not tiles:
            raise ScheduleError("ring tiles = (): one tile or more is needed")
        if len(set(tiles)) < len(tiles):
            raise ScheduleError(
                f"ring tiles = {tiles}: each tile has one place in a slot; name it once"
            )

    def transaction_bytes(self, tiles: Mapping[str, Tile]) -> int:
        """Bytes that fill one slot of one CTA."""
        return sum(tiles[name].bytes for name in self.tiles)

    def partners(self, cluster: tuple[int, int]) -> int:
        """CTAs, this one included, whose producers write into one CTA's slot."""
        along_m = cluster[0] if "m" in self.multicast.values() else 1
        along_n = cluster[1] if "n" in self.multicast.values() else 1
        return along_m + along_n - 1

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        """Arrivals that empty a slot: a warp of the consumers signals each partner once."""
        return roles[self.consumer].warps * self.partners(cluster)

    def describe(
        self,
        tiles: Mapping[str, Tile],
        roles: Mapping[str, Role],
        cluster: tuple[int, int] = (1, 1),
    ) -> str:
        """Who hands how much to whom, in a line."""
        return (
            f"{self.producer} -> {self.consumer}: {self.stages} slots, full at "
            f"{self.transaction_bytes(tiles)} B, empty at {self.arrivals(roles, cluster)} arrivals"
        )

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of the full and empty mbarriers."""
        return 2 * self.stages * BARRIER_BYTES

    @property
    def bytes(self) -> int:
        """Shared memory that the ring needs besides its tiles."""
        return self.barrier_bytes

    def open(
        self,
        barriers: cute.Pointer,
        tiles: Mapping[str, Tile],
        roles: Mapping[str, Role],
        cluster: tuple[int, int] = (1, 1),
    ) -> PipelineAsync:
        """Initialise the mbarriers (by one thread); the caller synchronises the CTA or cluster."""
        axes = self.multicast.values()
        sharing = ("n" in axes, "m" in axes) if axes else (True, True)
        told = cluster if axes else (1, 1)  # what nobody shares concerns this CTA alone
        return self.pipeline.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.arrivals(roles, cluster)),
            tx_count=self.transaction_bytes(tiles),
            cta_layout_vmnk=cute.make_layout((1, *told, 1)),
            mcast_mode_mn=tuple(int(shared) for shared in sharing),
            defer_sync=True,
        )


@dataclass(frozen=True)
class WordRing(Ring):
    """32-bit words that one warp of `producer` tells all warps of `consumer`, `words` a slot.

    `put` and `take` hand them over; the words lie in shared memory behind the mbarriers, and the
    kernel's `smem` has them under the ring's name.

    Raises: ScheduleError, besides those of a ring: no words.
    """

    tiles: tuple[str, ...] = ()
    stages: int = 4
    words: int = 1

    pipeline: ClassVar[type[PipelineAsync]] = PipelineAsync

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.words) or self.words < 1:
            raise ScheduleError(
                f"ring words = {self.words!r}: a whole number of words a slot from 1 is needed"
            )

    def _check_tiles(self) -> None:
        if self.tiles:
            raise ScheduleError(f"ring tiles = {self.tiles}: a WordRing carries words; name none")

    @property
    def bytes(self) -> int:
        """Shared memory of the mbarriers and, in whole mbarriers' sizes, of the words."""
        words = self.stages * self.words * WORD_BYTES
        return self.barrier_bytes + -(-words // BARRIER_BYTES) * BARRIER_BYTES

    def describe(
        self,
        tiles: Mapping[str, Tile],
        roles: Mapping[str, Role],
        cluster: tuple[int, int] = (1, 1),
    ) -> str:
        """Who hands how much to whom, in a line."""
        words = "a word" if self.words == 1 else f"{self.words} words"
        return (
            f"{self.producer} -> {self.consumer}: {self.stages} slots of {words}, full at {WARP} "
            f"arrivals, empty at {self.arrivals(roles, cluster)} arrivals"
        )

    def tensor(self, barriers: cute.Pointer) -> cute.Tensor:
        """The words (stages, words), of the ring whose mbarriers begin at this byte address."""
        address = cute.recast_ptr(barriers + self.barrier_bytes, dtype=cutlass.Int32)
        layout = cute.make_layout((self.stages, self.words), stride=(self.words, 1))
        return cute.make_tensor(address, layout)

    def open(
        self,
        barriers: cute.Pointer,
        tiles: Mapping[str, Tile],
        roles: Mapping[str, Role],
        cluster: tuple[int, int] = (1, 1),
    ) -> PipelineAsync:
        """Initialise the mbarriers; every lane of the producing warp arrives, no bytes count."""
        return self.pipeline.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=CooperativeGroup(Agent.Thread, WARP),
            consumer_group=CooperativeGroup(Agent.Thread, self.arrivals(roles, cluster)),
            defer_sync=True,
        )


@cute.jit
def put(end, words, *said):
    """Tell the consumers a slot's words; all lanes of the producing warp call it.

    Returns the ring's end.
    """
    slot = end.acquire_and_advance()
    if cute.arch.lane_idx() == 0:
        for n in cutlass.range_constexpr(len(said)):
            words[slot.index, n] = said[n]
    slot.commit()  # lane 0's own arrival orders its writes before it
    return end


@cute.jit
def take(end, words):
    """The next slot's words, for every lane of a consuming warp. Returns (the ring's end, *words)."""
    slot = end.wait_and_advance()
    said = _uniform(words, slot.index)
    cute.arch.sync_warp()  # all lanes have read them
    if cute.arch.lane_idx() == 0:
        slot.release()
    return (end, *said)


def _uniform(words: cute.Tensor, slot: cutlass.Int32) -> list[cutlass.Int32]:
    """The words of a slot, known to be the same in all lanes."""
    count = cute.size(words, mode=[1])
    return [cute.arch.make_warp_uniform(words[slot, n]) for n in range(count)]


@dataclass(frozen=True)
class UmmaRing(Ring):
    """A ring whose consumer is the tensor core: the commit after a product empties the slot."""

    consumer: str = "mma"

    pipeline: ClassVar[type[PipelineAsync]] = PipelineTmaUmma

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        """Arrivals that empty a slot: one commit signals each partner once."""
        return self.partners(cluster)


@dataclass(frozen=True)
class AccumulatorRing(Ring):
    """Accumulators in tensor memory, from the tensor core to the threads that read them."""

    producer: str = "mma"
    consumer: str = "epilogue"

    pipeline: ClassVar[type[PipelineAsync]] = PipelineUmmaAsync

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        """Arrivals that empty a slot: every thread of the consumer."""
        return roles[self.consumer].threads

    def open(
        self,
        barriers: cute.Pointer,
        tiles: Mapping[str, Tile],
        roles: Mapping[str, Role],
        cluster: tuple[int, int] = (1, 1),
    ) -> PipelineAsync:
        """Initialise the mbarriers; a slot is full by one commit, no bytes are counted."""
        return self.pipeline.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.arrivals(roles, cluster)),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

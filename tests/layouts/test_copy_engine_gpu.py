"""The emulated copy engine against a GPU: shared memory byte by byte, mbarriers, products."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import smem_runs
import torch
from cases.alone import python
from copy_cases import POISON, SMEM_BYTES, Case
from cutlass import BFloat16
from smem_runs import LOADS, PRODUCTS, STORES, TILES, UNITS, Operand

from cutedsl_fa3.global_tensor import global_tensor
from cutedsl_fa3.layouts import Tile, copy_engine
from cutedsl_fa3.tma_probe import PRODUCT_TILE, Product, RawLoad

LIMIT = 120  # seconds: an import, a small compilation on a busy machine, milliseconds of copies
AT_ONCE = 8


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What the kernels of a unit showed, each unit in a process of its own.

    Under pytest-xdist a worker runs those that it is asked for, else all begin side by side.
    """
    folder, pool = tmp_path_factory.mktemp("smem"), ThreadPoolExecutor(AT_ONCE)
    begun: dict[str, Future[Any]] = {}

    def run(unit: str) -> Any:
        file = folder / f"{unit}.pt"
        python(str(Path(smem_runs.__file__)), str(file), unit, limit=LIMIT)
        return torch.load(file)

    def result(unit: str) -> Any:
        alone = "PYTEST_XDIST_WORKER" in os.environ
        for name in [unit] if alone else UNITS:
            if name not in begun:
                begun[name] = pool.submit(run, name)
        return begun[unit].result()

    return result


def pairs(groups: dict) -> list[tuple[str, int]]:
    return [(group, rank) for group, (_, ranks) in groups.items() for rank in ranks]


def emulated(case: Case) -> bytearray:
    smem = bytearray([POISON]) * SMEM_BYTES
    copy_engine.load(case.tmap, case.memory, case.coordinate, smem=smem, at=case.at)
    return smem


def difference(found: bytes, wanted: bytes, what: object, at: int, context: object) -> str:
    """The first byte that differs, with the element that should lie there; "" where none does."""
    if found == wanted:
        return ""
    differ = [i for i, (f, w) in enumerate(zip(found, wanted, strict=True)) if f != w]
    first = differ[0]
    inside = at <= first < at + copy_engine.footprint(what)
    element = copy_engine.element_at(what, first, at=at) if inside else "outside the copy"
    device, engine = (data[first : first + 16].hex(" ") for data in (found, wanted))
    return (
        f"{len(differ)} bytes differ, from {first} on, where lies {element}: {device} on the "
        f"device, {engine} emulated; {context}"
    )


def agree(differences: list[str]) -> None:
    """Fail with the number of cases that differ and the first of them."""
    bad = [text for text in differences if text]
    assert not bad, f"{len(bad)} of {len(differences)} cases differ; the first: {bad[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "rank"), pairs(LOADS))
def test_shared_memory_after_a_load_is_what_is_emulated_byte_by_byte(shown, group, rank):
    cases = smem_runs.cases(LOADS, group, rank)
    found = shown(f"load {group} {rank} 0")["smem"]
    agree(
        [
            difference(found[i].numpy().tobytes(), bytes(emulated(case)), case.tmap, case.at, case)
            for i, case in enumerate(cases)
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "rank"), pairs(LOADS))
def test_the_phase_ends_with_the_bytes_that_are_emulated(shown, group, rank):
    seen = shown(f"load {group} {rank} 0")["seen"]
    cases = smem_runs.cases(LOADS, group, rank)
    for case, (ended, *_) in zip(cases, seen.tolist(), strict=True):
        found = copy_engine.load(case.tmap, case.memory, case.coordinate)
        assert found.transaction_bytes == case.tmap.bytes_per_box  # which the kernel announced
        assert ended, f"{found.transaction_bytes} bytes announced, and not all came: {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("rank", LOADS["plain"][1])
def test_a_byte_more_than_that_never_comes(shown, rank):
    seen = shown(f"load plain {rank} 1")["seen"]
    for case, (ended, *_) in zip(smem_runs.cases(LOADS, "plain", rank), seen.tolist(), strict=True):
        assert not ended, f"a phase ended one byte short: {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", smem_runs.BEYOND)
@pytest.mark.parametrize("rank", LOADS["plain"][1])
def test_an_mbarrier_ends_as_one_that_was_told_only_the_bytes_beyond(shown, rank, beyond):
    seen = shown(f"load plain {rank} {beyond}")["seen"]
    differ = [f"0x{a:x} and 0x{b:x}" for _, a, b in seen.tolist() if a != b]
    assert not differ, f"{len(differ)} pairs of mbarriers differ, the first: {differ[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "rank"), pairs(STORES))
def test_memory_after_a_store_is_what_is_emulated_byte_by_byte(shown, group, rank):
    cases, smem = smem_runs.cases(STORES, group, rank), smem_runs.stored_smem(rank)
    differ = []
    memories = shown(f"store {group} {rank}")
    for case, stored, found in zip(cases, smem, memories, strict=True):
        memory = bytearray(case.memory)
        data = stored.numpy().tobytes()
        copy_engine.store(case.tmap, memory, case.coordinate, data, at=case.at)
        wrong = [i for i, (f, w) in enumerate(zip(found.tolist(), memory, strict=True)) if f != w]
        differ.append(f"{len(wrong)} bytes, from {wrong[0]} on: {case}" if wrong else "")
    agree(differ)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(TILES)), ids=[str(tile) for tile, _ in TILES])
def test_tiles_loaded_by_a_ring_lie_as_emulated_from_every_corner(shown, number):
    tile, rank = TILES[number]
    tensor = global_tensor(smem_runs.tile_tensor(tile, rank))
    found = shown(f"tile {number}")
    differ = []
    for i, (row, col, *outer) in enumerate(smem_runs.tile_corners(tile, rank)):
        at = i % 2 * tile.bytes  # its slot
        coordinate = (col, row, *outer)
        wanted = copy_engine.load(tile, tensor, coordinate, at=at).smem[at:]
        got = found[i].numpy().tobytes()
        differ.append(difference(got, bytes(wanted), tile, 0, f"coordinate {coordinate}"))
    agree(differ)


def operand(given: Operand) -> torch.Tensor:
    """The tile as the emulated engine loads it, (rows, cols) float64."""
    tile, tensor = PRODUCT_TILE, global_tensor(given.matrix, given.oob_fill)
    smem = copy_engine.load(tile, tensor, (given.col, given.row)).smem
    chunks = product(range(tile.rows), range(0, tile.cols, 8))
    places = [copy_engine.address_of(tile, (col, row)) for row, col in chunks]
    data = bytearray(b"".join(smem[place : place + 16] for place in places))
    return torch.frombuffer(data, dtype=torch.bfloat16).view(tile.rows, tile.cols).double()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRODUCTS)
def test_wgmma_carries_nan_fill_into_its_rows_and_columns_and_no_further(shown, name):
    a, b = PRODUCTS[name]
    found = shown("products")[list(PRODUCTS).index(name)].double()
    wanted = operand(a) @ operand(b).T
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


NAN_PLACES = {
    "inside": (range(0), range(0)),
    "rows behind a": (range(41, 64), range(0)),
    "rows before a": (range(9), range(0)),
    "rows behind b": (range(0), range(50, 64)),
    "rows before b": (range(0), range(3)),
    "rows of both": (range(60, 64), range(40, 64)),
    "columns behind a": (range(64), range(0)),
    "columns before b": (range(64), range(0)),
    "columns behind a against zeros": (range(64), range(0)),
    "all of a": (range(64), range(0)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_emulated_product_has_its_nans_where_the_seed_says(name):
    """A row of A out of bounds is a row of the product, of B a column; along k it is everything,
    zeros in the other operand notwithstanding. Zero fill is none of it.
    """
    rows, cols = NAN_PLACES.get(name, (range(0), range(0)))
    wanted = torch.zeros(64, 64, dtype=torch.bool)
    wanted[list(rows)] = True
    wanted[:, list(cols)] = True
    a, b = PRODUCTS[name]
    assert torch.equal((operand(a) @ operand(b).T).isnan(), wanted)


# Without a GPU


@pytest.mark.compile
def test_the_kernels_that_show_shared_memory_compile_without_spills():
    from smem_dump import RawStore, TileLoad

    from cutedsl_fa3.compile import compile_kernel

    tile = TileLoad(Tile(64, 64, BFloat16), 3)
    for kernel in (RawLoad(2), RawStore(2), tile, Product()):
        assert compile_kernel(kernel).resources.spills == 0


def test_the_cases_reach_over_every_edge_of_every_dimension():
    for rank in LOADS["plain"][1]:
        cases = smem_runs.cases(LOADS, "plain", rank)
        for d in range(rank):
            box = [
                (c.coordinate[d], c.coordinate[d] + c.tmap.box[d], c.tmap.shape[d]) for c in cases
            ]
            assert any(low < 0 < high for low, high, _ in box)
            assert any(low < size < high for low, high, size in box)
            assert any(high <= 0 or low >= size for low, high, size in box)
        inside = [copy_engine.load(c.tmap, c.memory, c.coordinate).filled == 0 for c in cases]
        assert any(inside) and not all(inside)

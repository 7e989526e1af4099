"""Pictures of shared memory: stored ones carry what the code draws, which is what they say."""

from __future__ import annotations

import pytest
import torch

from cutedsl_fa3 import gallery, smem_pictures
from cutedsl_fa3.global_tensor import global_tensor
from cutedsl_fa3.layouts import Tile, copy_engine
from cutedsl_fa3.smem_pictures import FILL, FOLDER, PICTURES, Cells, Key

COLUMN = 8  # chunks that a column of a box has, and groups of banks that there are


def cells(name: str) -> list[Cells]:
    return [part for part in PICTURES[name]() if isinstance(part, Cells)]


@pytest.mark.parametrize("name", PICTURES)
def test_a_stored_picture_carries_what_the_code_draws(name):
    levels = torch.cat([part.levels.flatten() for part in PICTURES[name]()])
    assert torch.equal(gallery.stored(FOLDER / f"{name}.png"), levels), smem_pictures.COMMAND


def test_the_page_is_what_the_code_says_and_shows_every_picture():
    text = (FOLDER / "README.md").read_text()
    assert text == smem_pictures.page(), f"run `{smem_pictures.COMMAND}`"
    assert all(f"({name}.png)" in text for name in PICTURES)
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {"README.md", *(f"{name}.png" for name in PICTURES)}
    assert max(path.stat().st_size for path in FOLDER.iterdir()) < 40_000


def test_columns_of_swizzled_boxes_have_every_group_of_banks_and_others_one():
    plain, *swizzled = cells("banks")
    assert all(len(column.unique()) == 1 for column in plain.levels.T)
    for part in swizzled:
        assert all(len(column.unique()) == COLUMN for column in part.levels.T)
        assert part.title.endswith("+0")
    assert plain.title == "none: +7"


def test_the_ragged_tail_is_filled_where_a_load_fills_it():
    import cutlass

    cols, rows = smem_pictures.TAIL_SHAPE
    stored = torch.ones(rows, -(-cols // 8) * 8, dtype=torch.bfloat16)[:, :cols]
    tile = Tile(*smem_pictures.TAIL_TILE, cutlass.BFloat16)
    load = copy_engine.load(tile, global_tensor(stored), smem_pictures.TAIL_CORNER)
    logical, physical = (part.levels == FILL for part in cells("tail"))
    assert int(logical.sum()) == int(physical.sum()) == load.filled
    zero = torch.frombuffer(load.smem, dtype=torch.bfloat16) == 0
    assert torch.equal(physical.flatten(), zero)


def test_every_core_matrix_lies_in_all_groups_of_banks():
    logical, physical = (part.levels for part in cells("cores"))
    chunks = torch.arange(COLUMN).expand(physical.shape)
    for core in range(1, int(logical.max()) + 1):
        assert chunks[logical == core].unique().numel() == 1  # 16 bytes wide
        assert sorted(chunks[physical == core].tolist()) == list(range(COLUMN))


@pytest.mark.jupyter
def test_pictures_are_drawn_with_a_key(tmp_path):
    written = smem_pictures.write(tmp_path)
    assert {path.name for path in written} == {path.name for path in FOLDER.iterdir()}
    assert all(any(isinstance(part, Key) for part in draw()) for draw in PICTURES.values())

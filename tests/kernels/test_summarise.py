"""The table of smallest and largest values: the device's pass against torch."""

from __future__ import annotations

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cutedsl_fa3.audit import census_of, disassemble
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.inputs import as_numbers
from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.kernels.sm90.summarise import Summarise
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.summaries import summaries, summarise, table_shape

LENGTH = 700
_generator = torch.Generator().manual_seed(5)


def _vector(low: int, high: int, *shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape or (LENGTH,), generator=_generator).to(dtype)


DOC = _vector(0, 9).sort().values
BEGINS = torch.searchsorted(DOC, torch.arange(10, dtype=torch.int32))
EXTREME = _vector(-(2**31), 2**31)
LONGS = torch.tensor([2**40, -(2**40), 7, -7])
SHORTS = _vector(-(2**15), 2**15, 3, LENGTH, dtype=torch.int16)
BYTES = _vector(0, 256, 2, LENGTH, dtype=torch.uint8)
FLAGS = _vector(0, 2).bool()
FLOATS = torch.randn(LENGTH, generator=_generator)


def packed(b, h, q, k):
    inside = q - BEGINS[DOC[q]] >= k - BEGINS[DOC[k]]
    return (DOC[q] == DOC[k]) & inside


MASKS = {
    "documents": lambda b, h, q, k: (DOC[q] == DOC[k]) & (k <= q),
    "positions inside documents": packed,
    "32-bit ends": lambda b, h, q, k: EXTREME[q] + 3 > EXTREME[k],
    "64-bit ends": lambda b, h, q, k: LONGS[q % 4] > LONGS[k - 600],
    "each head, each batch entry": lambda b, h, q, k: SHORTS[h, q] * 3 > BYTES[b, k] - 9,
    "conditions": lambda b, h, q, k: (FLAGS[k] & (k > 5)) | (FLOATS[q] * 2 > 0.5),
}


class Alone:
    """The pass as a kernel of its own."""

    arch = "sm_90a"
    name = "summarise"
    blocks = Summarise.blocks

    def __init__(self, variant: Variant, tile_m: int, tile_n: int) -> None:
        self.variant, self.sizes = variant, (tile_m, tile_n)
        self.summarise = Summarise(variant.mask, tile_m, tile_n)

    @property
    def key_text(self) -> str:
        return f"{self.name} {self.sizes} {self.variant.text}"

    def fake_args(self) -> tuple:
        words = 2 * len(summaries(self.variant.mask))
        shape = (*(cute.sym_int() for _ in range(3)), words)
        return (
            Elements.fake_captures(self.variant),
            make_fake_compact_tensor(Int32, shape, stride_order=(3, 2, 1, 0), assumed_align=16),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def host(self, captured, table, seqlen_q, seqlen_k, stream):
        captures = Elements.given_captures(self.variant, frozenset(), captured)
        self.summarise.launch(captures, table, seqlen_q, seqlen_k, stream)


@pytest.mark.compile
@pytest.mark.parametrize("sizes", [(128, 128), (192, 80)])
@pytest.mark.parametrize("name", MASKS)
def test_the_pass_compiles_without_spills_and_reads_each_element_once(name, sizes):
    variant = Variant(mask=MASKS[name])
    compiled = compile_kernel(Alone(variant, *sizes))
    assert (compiled.resources.spills, compiled.resources.stack) == (0, 0)
    assert compiled.resources.advisories == ()
    census = census_of(disassemble(compiled.cubin))
    found = summaries(variant.mask)
    assert census.count("REDUX") == 2 * len(found)
    a_lane = sum(-(-size // 32) for size in set(sizes))  # blocks of one size are read once for both
    if name in ("documents", "positions inside documents"):
        assert census.count("LDG") == len(variant.captures) * a_lane


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(700, 700), (1, 700), (650, 129), (5, 0), (0, 3)])
@pytest.mark.parametrize("sizes", [(128, 128), (192, 80)])
@pytest.mark.parametrize("name", MASKS)
def test_the_device_finds_the_table_that_torch_finds(name, sizes, seqlens):
    cpu = Variant(mask=MASKS[name])
    arguments = (2, 3, *seqlens, *sizes)
    wanted = summarise(cpu.mask, cpu.captures, *arguments)
    captures = [t.cuda() for t in cpu.captures]
    table = torch.full(wanted.shape, 77, dtype=torch.int32, device="cuda")
    assert table.shape == table_shape(cpu.mask, *arguments)
    compile_kernel(Alone(cpu, *sizes)).launch(as_numbers(captures), table, *seqlens)
    assert torch.equal(table.cpu(), wanted)

"""What the kernel makes of the elements of a tile, run on the CPU, is what the graphs say."""

from __future__ import annotations

import math

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor
from on_cpu import for_each, launchable

from cutedsl_fa3 import Elementwise, Variant, masks, scores
from cutedsl_fa3.inputs import as_numbers
from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.layouts.wgmma import Places
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.limits import LOG2_E, bounded

ROWS, COLS, SCALE = (0, 8), tuple(8 * n + m for n in range(4) for m in (0, 1)), 0.125
HEADS, SEQLEN_Q, SEQLEN_K = 2, 80, 100
SLOPES, TABLE = torch.tensor([0.7, 0.3]), torch.randn(HEADS, 2 * 40 + 1)
BYTES = torch.randint(0, 256, (HEADS, 200), dtype=torch.uint8)
RATES, BIAS = torch.tensor([0.9, 0.99]), torch.randn(HEADS, SEQLEN_Q, SEQLEN_K)

VARIANTS = {
    "nothing": Variant(mask=masks.causal),
    "alibi": Variant(scores.alibi(SLOPES), masks.causal),
    "alibi both ways": Variant(scores.alibi(SLOPES)),
    "softcap": Variant(scores.softcap(30.0), masks.causal),
    "large softcap": Variant(scores.softcap(100.0), masks.causal),
    "softcap and alibi": Variant(
        scores.chain(scores.softcap(20.0), scores.alibi(SLOPES)), masks.causal
    ),
    "relative bias": Variant(scores.relative_bias(TABLE), masks.causal),
    "bytes by distance": Variant(lambda s, b, h, q, k: s + BYTES[h, k - q + 90], masks.causal),
    "relative bias beyond its ends": Variant(scores.relative_bias(TABLE[:, 30:51])),
    "bias": Variant(scores.bias(BIAS), masks.window(30, 3)),
    "bias by distance in two dimensions": Variant(
        lambda s, b, h, q, k: s + BIAS[h, q - k + 3, 2 * k - 2 * q]
    ),
    "sigmoid": Variant(
        lambda s, b, h, q, k: s - 4.0, masks.causal, Elementwise(torch.sigmoid)
    ),
    "sigmoid and alibi": Variant(scores.alibi(SLOPES), masks.causal, Elementwise(torch.sigmoid)),
    "tanh": Variant(softmax=Elementwise(torch.tanh)),
    "decay": Variant(scores.decay(RATES), masks.causal, Elementwise(lambda s: s)),
    "t5": Variant(scores.t5_bias(torch.randn(8, HEADS), bidirectional=True, max_distance=20)),
    "temperature": Variant(scores.temperature(SLOPES), masks.causal),
    "a choice": Variant(lambda s, b, h, q, k: torch.where(q > k, torch.sigmoid(s), -math.inf)),
}  # fmt: skip
BEYOND = "relative bias beyond its ends", "bias by distance in two dimensions"
THREADS, HEAD = 32, 1  # of one warp, by whose first rows and columns the tile is told apart
SHAPE = THREADS, len(ROWS), len(COLS)


def name_of(variant: Variant) -> str:
    return next(name for name, one in VARIANTS.items() if one is variant)


def places() -> dict:
    """The positions of every element, in a tile that begins at query 16 and key 32."""
    thread = torch.arange(THREADS)[:, None, None]
    queries = 16 + thread // 4 + torch.tensor(ROWS)[:, None]
    keys = 32 + thread % 4 * 2 + torch.tensor(COLS)
    return {
        "b": 0, "h": HEAD, "q": queries, "k": keys, "seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K,
    }  # fmt: skip


def shown(variant: Variant) -> torch.Tensor:
    """Which elements the mask shows."""
    if variant.mask is None:
        return torch.ones(SHAPE, dtype=torch.bool)
    return evaluate(variant.mask, places(), variant.captures).expand(SHAPE)


def applied(variant: Variant, raw: torch.Tensor, masked: bool) -> torch.Tensor:
    """What `Elements.apply` leaves of raw products, for every thread."""
    found = raw.clone()

    def write(i, given, results):
        zero = i * 0
        lengths, head = (zero + SEQLEN_Q, zero + SEQLEN_K), (zero, zero + HEAD)
        elements = Elements(variant, given, Float32(SCALE), head, lengths, bounded=bounded(variant))
        mine, first = Places(i // 4, i % 4 * 2, ROWS, COLS), (zero + 16, zero + 32)
        memos = elements.ahead(mine, first, masked or name_of(variant) in BEYOND)
        elements.apply(results[0][i, None, None], mine, first, masked, memos)

    given = list(map(launchable, variant.captures)) or [torch.zeros(1)]
    for_each(THREADS, given, [found], write)
    return found


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("name", VARIANTS)
def test_elements_are_what_the_graphs_say(name, masked):
    variant, raw = VARIANTS[name], torch.randn(SHAPE) * 60
    raw[0, 0, :4] = torch.tensor([0.0, 3e4, -3e4, 1e-3])
    wanted = raw if variant.score is variant.weight is None else raw * SCALE
    for graph in (variant.score, variant.weight):
        if graph is not None:
            wanted = evaluate(graph, {**places(), "score": wanted}, variant.captures).expand(SHAPE)
    wanted = wanted * LOG2_E if bounded(variant) else wanted
    hidden = 0.0 if variant.weight is not None else -math.inf
    wanted = torch.where(shown(variant), wanted, hidden)
    checked = shown(variant) | masked
    found = applied(variant, raw, masked)
    torch.testing.assert_close(found[checked], wanted[checked], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.mask is not None])
def test_a_hidden_key_that_is_nan_reaches_no_other(name):
    variant, raw = VARIANTS[name], torch.randn(SHAPE)
    seen = shown(variant)
    assert not seen.all()
    with_0, with_nan = (
        applied(variant, torch.where(seen, raw, fill), masked=True) for fill in (0.0, math.nan)
    )
    assert torch.equal(with_0, with_nan)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "a choice"])
def test_a_visible_nan_stays_one_and_spoils_no_other_row(name):
    variant, raw = VARIANTS[name], torch.randn(SHAPE)
    spoilt = raw.clone()
    spoilt[:, 0, 3] = math.nan
    without, found = applied(variant, raw, masked=False), applied(variant, spoilt, masked=False)
    assert found[:, 0, 3].isnan().all()
    assert torch.equal(found[:, 1], without[:, 1])


CAPTURED = {
    "a scalar": torch.tensor(2.5),
    "a flag": torch.tensor(True),
    "flags": torch.arange(7) % 3 == 1,
    "bytes": 30 * torch.arange(9, dtype=torch.uint8),
    "long integers": torch.arange(5) * 3,
    "rows apart": torch.randn(4, 128)[:, :64],
    "columns apart": torch.randn(3, 10, dtype=torch.float16)[:, ::2],
    "columns first": torch.randn(6, 4).T,
    "one for all": torch.randn(1, 1, dtype=torch.bfloat16).expand(3, 5),
    "three dimensions": torch.randn(2, 3, 4, dtype=torch.float64).transpose(0, 2),
}  # fmt: skip


def test_a_kernel_reads_captured_tensors_where_their_numbers_say():
    """On CPU memory, where the same host code runs: the last element of each."""
    last = [tuple(size - 1 for size in t.shape) for t in CAPTURED.values()]

    def score(s, b, h, q, k):
        for tensor, at in zip(CAPTURED.values(), last, strict=True):
            s = s + (tensor[at] if at else tensor)
        return s

    variant = Variant(score)
    assert all(a is b for a, b in zip(variant.captures, CAPTURED.values(), strict=True))

    @cute.jit
    def read(captured, found):
        for number, given in enumerate(Elements.given_captures(variant, frozenset(), captured)):
            assert cute.rank(given) == max(1, variant.captures[number].dim())
            found[number] = Float32(given[tuple(size - 1 for size in given.shape)])

    found = torch.zeros(len(last))
    like = make_fake_compact_tensor(Float32, (len(last),), memspace=cute.AddressSpace.generic)
    fake = Elements.fake_captures(variant)
    cute.compile(read, fake, like, options="--enable-tvm-ffi")(as_numbers(variant.captures), found)
    wanted = [t[at].float() for t, at in zip(variant.captures, last, strict=True)]
    assert dict(zip(CAPTURED, found, strict=True)) == dict(zip(CAPTURED, wanted, strict=True))

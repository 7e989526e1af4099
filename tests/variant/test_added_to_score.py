"""What a score function adds to the score costs one FMA: raw product times scale, plus it."""

from __future__ import annotations

import pytest
import torch
from cutlass import Float32
from on_cpu import for_each

from cutedsl_fa3 import Variant
from cutedsl_fa3.variant.lower import Lowering

SMALL = 2.0**-12  # its square is lost where 1 + 2 SMALL + SMALL^2 is rounded to fp32

# By name: a score function of s = 0 or of what cancels the rounded square, and its exact result.
FUSED = {
    "score + it": (lambda s, t: s + t, SMALL**2),
    "it + score": (lambda s, t: t + s, SMALL**2),
    "score - it": (lambda s, t: s - (-t), SMALL**2),
}
APART = {
    "it - score": (lambda s, t: (-t) - s, 0.0),
    "score * it": (lambda s, t: s * t, -((1 + 2 * SMALL) ** 2)),
    "score + score": (lambda s, t: s + s, 2 * (1 + 2 * SMALL)),
    "after a clamp": (lambda s, t: torch.clamp(s, min=-9.0) + t, 0.0),
}


@pytest.mark.parametrize("name", [*FUSED, *APART])
def test_only_what_is_added_to_the_score_itself_is_fused_with_its_scale(name):
    function, expected = (FUSED | APART)[name]
    t = torch.tensor([-(1 + 2 * SMALL)])
    graph = Variant(lambda s, b, h, q, k: function(s, t[h])).score
    out = torch.zeros(1)

    def write(i, tensors, results):
        uniform = {"b": i, "h": i, "seqlen_q": i, "seqlen_k": i}
        factor = Float32(1 + SMALL)
        at = {"score": factor * factor, "product": (factor, factor), "q": i, "k": i, **uniform}
        results[0][i] = Lowering(graph, tensors, uniform).at(at, 0, 0, {})

    for_each(1, [t], [out], write)
    assert out.item() == expected

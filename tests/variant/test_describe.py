"""What a mask visits, in words."""

import pytest
import torch

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.describe import describe

LENGTHS = torch.tensor([3, 9])
DOCUMENT = torch.arange(100) // 7


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.full, "every k; all full"),
        (masks.none, "no k; none full"),
        (
            masks.causal,
            "k in [0, q1 + (seqlen_k - seqlen_q)]; full up to q0 + (seqlen_k - seqlen_q)",
        ),
        (lambda b, h, q, k: k <= q, "k in [0, q1]; full up to q0"),
        (masks.prefix(LENGTHS), "k in [0, t0[b] - 1]; full up to t0[b] - 1"),
        (
            lambda b, h, q, k: (k <= q) & (q - k < 512),
            "k in [q0 - 511, q1]; full in [q1 - 511, q0]",
        ),
        (
            lambda b, h, q, k: (k <= q) & (q - k < 512) & (DOCUMENT[q] == DOCUMENT[k]),
            "k in [q0 - 511, q1], tile by tile: the ranges of t0[q], t0[k] in each block say which "
            "are visited and full",
        ),
        (
            lambda b, h, q, k: (
                (DOCUMENT[q] == DOCUMENT[k])
                & (q - LENGTHS[DOCUMENT[q]] >= k - LENGTHS[DOCUMENT[k]])
            ),
            "every k, tile by tile: the ranges of t0[q], t0[k], q - t1[t0[q]], k - t1[t0[k]] in "
            "each block say which are visited and full, others' ranges at both ends of t0[q] and "
            "t0[k] too",
        ),
        (
            lambda b, h, q, k: (k <= q) & ((k // 128) % 4 == 0),
            "k in [0, q1], tile by tile: the mask on the tile's ranges of q and k says which are "
            "visited and full",
        ),
        (
            lambda b, h, q, k: (torch.maximum(DOCUMENT[k], LENGTHS[b] >> 1) * 2.5 > 7) & (k <= q),
            "k in [0, q1], tile by tile: the ranges of (maximum(t0[k], t1[b] >> 1) * 2.5) > 7.0 "
            "in each block say which are visited and full",
        ),
        (
            lambda b, h, q, k: k // 64 == q // 64,
            "k in [64 * (q0 // 64), 64 * (q1 // 64) + 63]; "
            "full in [64 * (q1 // 64), 64 * (q0 // 64) + 63]",
        ),
        (
            lambda b, h, q, k: (k < 4) | (k >= 100),
            "k in [0, 3] and [100, seqlen_k - 1]; all full outside [4, 99]",
        ),
        (lambda b, h, q, k: k >= q, "k in [q0, seqlen_k - 1]; full from q1"),
    ],
)
def test_visited_and_full_keys_are_found_in_the_mask_and_said_plainly(mask, text):
    assert describe(Variant(mask=mask).mask) == text


def test_a_summary_too_long_to_read_is_named_by_its_inputs():
    def folded(b, h, q, k):
        value = DOCUMENT[k] + h
        for _ in range(40):
            value = value * value
        return value > q

    text = describe(Variant(mask=folded).mask)
    assert text.startswith("every k, tile by tile: the ranges of an expression of h and k in each")

"""Sequences laid end to end: the captured tensors that masks of documents and trees read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import arguments
from .errors import VariantError


def document_ids(offsets: torch.Tensor, seqlen: int) -> torch.Tensor:
    """The document of each position, int32, of documents laid end to end.

    Positions from the last offset on count as one more document, so that padding sees padding only.
    Nothing waits for the device.

    Shape: offsets (documents + 1,), integers that do not fall, from 0 (cu_seqlens) -> (seqlen,).
    Raises: VariantError for another type, shape or dtype.
    """
    name = "packing.document_ids"
    arguments.tensor(name, "offsets", offsets, arguments.INTEGERS, "(documents + 1,)")
    length = arguments.integer(name, "seqlen", seqlen, 1)
    positions = torch.arange(length, device=offsets.device)
    return torch.searchsorted(offsets[1:].long(), positions, right=True, out_int32=True)


def span_bounds(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the span of each position starts and ends, int32, for `masks.spans`.

    A span is a run of equal ids; ids below 0 are in none, and see nothing. Nothing waits for the
    device.

    Shape: ids (seqlen,) or (batch, seqlen), integers; starts and ends alike.
    Raises: VariantError for another type, shape or dtype.
    """
    name = "packing.span_bounds"
    arguments.tensor(name, "ids", ids, arguments.INTEGERS, "(seqlen,)", "(batch, seqlen)")
    seqlen = ids.shape[-1]
    positions = torch.arange(seqlen, device=ids.device, dtype=torch.int32).expand(ids.shape)
    differs = ids[..., 1:] != ids[..., :-1]
    edge = differs.new_ones((*ids.shape[:-1], 1))
    first = positions.where(torch.cat((edge, differs), -1), 0).cummax(-1).values
    last = positions.where(torch.cat((differs, edge), -1), seqlen - 1)
    last = last.flip(-1).cummin(-1).values.flip(-1)
    # Elsewhere from the last key to the first: that widens no block's range of keys.
    inside = ids >= 0
    return first.where(inside, seqlen), (last + 1).where(inside, 0)


def tree_ends(parents: Sequence[int]) -> torch.Tensor:
    """One past the last descendant of each token, int32, for `masks.tree`.

    `parents` has the index of each token's parent, -1 for a root. Depth-first order: a token's
    parent is the token before it, or an ancestor of that one.

    Raises: VariantError for other orders, and for what is no int.
    """
    ends = list(range(1, len(parents) + 1))
    path: list[int] = []  # from the root to the token before
    for token, parent in enumerate(parents):
        while path and path[-1] != parent:
            ends[path.pop()] = token
        if not arguments.is_int(parent) or (not path and parent != -1):
            raise VariantError(
                f"packing.tree_ends: the parent of token {token} is {parent!r}; valid are -1 for a "
                "root, the token before, and ancestors of that one (depth-first order)"
            )
        path.append(token)
    for token in path:
        ends[token] = len(ends)
    return torch.tensor(ends, dtype=torch.int32)

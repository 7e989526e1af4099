"""Masks: which keys a query sees; each is a plain function for `Variant(mask=...)`.

A mask is a function of (b, h, q, k). Those that compare positions are aligned at the bottom right:
the last query sees the last key, whatever the lengths, so that query i stands at key position
i + (seqlen_k - seqlen_q). Bounds are inclusive. Masks join with `and_masks`, `or_masks` and
`not_mask`: `and_masks(causal, documents(ids))` is causal within each document.

Captured tensors are read at each launch: new ids or lengths in them need no new Variant. They must
be on the device of q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import arguments
from .errors import VariantError
from .variant import Variant, seqlen_k, seqlen_q

Mask = Callable[[Any, Any, Any, Any], Any]


def _position(q: Any) -> Any:
    """The key position at which a query stands."""
    return q + (seqlen_k - seqlen_q)


def _entry(table: torch.Tensor, rank: int, b: Any, *index: Any) -> Any:
    """An element of a table of `rank` dimensions, or of one such table for each batch entry."""
    return table[index] if table.ndim == rank else table[(b, *index)]


def full(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Every query sees every key."""
    return True


def none(b: Any, h: Any, q: Any, k: Any) -> Any:
    """No query sees any key: outputs 0, LSE -inf."""
    return False


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A query sees the keys up to its own position, aligned at the bottom right."""
    return k <= _position(q)


def window(left: int | None = None, right: int | None = None, *, causal: bool = False) -> Mask:
    """A query sees the keys from `left` before its position to `right` after it, both inclusive.

    A window of W tokens that ends at the query is (W - 1, 0). None or -1 leaves a side unbounded;
    `causal` caps the right side at 0.

    Raises: VariantError for other negative sizes, and for what is no int or bool.
    """
    if not isinstance(causal, bool):
        raise VariantError(f"masks.window: causal is {causal!r}; valid are True and False")
    before, after = _side("window", "left", left), _side("window", "right", right)
    if causal:
        after = 0

    def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = _position(q)
        seen = True if before is None else k >= position - before
        return seen if after is None else seen & (k <= position + after)

    return windowed


def _side(function: str, name: str, size: int | None) -> int | None:
    if size is None or (arguments.is_int(size) and size == -1):
        return None
    if not arguments.is_int(size) or size < 0:
        raise VariantError(
            f"masks.{function}: {name} is {size!r}; valid are ints from 0, and None or -1 for an "
            "unbounded side"
        )
    return int(size)


def prefix(length: int | torch.Tensor) -> Mask:
    """Every query sees the first `length` keys: one number, or one for each batch entry.

    Shape: int, () or (batch,), integers.
    Raises: VariantError for another type, shape or dtype.
    """
    if not isinstance(length, torch.Tensor):
        if not arguments.is_int(length):
            raise VariantError(
                f"masks.prefix: length is {length!r}; valid are an int, and a tensor of integers "
                "of shape () or (batch,)"
            )
        return lambda b, h, q, k: k < length
    lengths = arguments.tensor(
        "masks.prefix", "length", length, arguments.INTEGERS, "()", "(batch,)"
    )
    return lambda b, h, q, k: k < _entry(lengths, 0, b)


def prefix_lm(length: int | torch.Tensor) -> Mask:
    """Causal, but every query also sees the first `length` keys.

    Shape: int, () or (batch,), integers.
    Raises: VariantError for another type, shape or dtype.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1.
    """
    return or_masks(prefix(length), causal)


def padding(
    key_lengths: torch.Tensor, query_lengths: torch.Tensor | None = None, *, side: str = "right"
) -> Mask:
    """The keys of each batch entry's own sequence, without the padding beside it.

    `side` is where the padding lies: "right" of the sequence, or "left" of it. Padding queries are
    computed unless `query_lengths` is given (the same tensor, for self attention): then they see
    nothing.

    Shape: (batch,), integers.
    Raises: VariantError for another type, shape, dtype or side.
    """
    if side not in ("right", "left"):
        raise VariantError(f"masks.padding: side is {side!r}; valid are 'right' and 'left'")
    for name, lengths in (("key_lengths", key_lengths), ("query_lengths", query_lengths)):
        if name == "key_lengths" or lengths is not None:
            arguments.tensor("masks.padding", name, lengths, arguments.INTEGERS, "(batch,)")

    def inside(index: Any, seqlen: Any, length: Any) -> Any:
        return index < length if side == "right" else index >= seqlen - length

    def padded(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = inside(k, seqlen_k, key_lengths[b])
        if query_lengths is None:
            return seen
        return seen & inside(q, seqlen_q, query_lengths[b])

    return padded


def documents(ids: torch.Tensor, key_ids: torch.Tensor | None = None) -> Mask:
    """A query sees the keys of its own document: those with its id.

    `ids` has an entry for each key position, and a query is of the document at its position; one
    that stands before the first key is of none. With `key_ids`, `ids` has an entry for each query
    instead (cross attention). Ids need not be sorted; where they are, a launch visits the tiles of
    the own documents only. Positions past the last entry are of its document.

    Shape: (seqlen,) or (batch, seqlen), integers of 32 bits at most.
    Raises: VariantError for another type, shape or dtype, and for int64 ids of more bits.
    """
    _ids("documents", "ids", ids)
    if key_ids is not None:
        _ids("documents", "key_ids", key_ids)

        def crossed(b: Any, h: Any, q: Any, k: Any) -> Any:
            return _entry(ids, 1, b, q) == _entry(key_ids, 1, b, k)

        return crossed

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = _position(q)
        return (_entry(ids, 1, b, position) == _entry(ids, 1, b, k)) & (position >= 0)

    return same


def _ids(function: str, name: str, ids: Any) -> torch.Tensor:
    function = f"masks.{function}"
    shapes = "(seqlen,)", "(batch, seqlen)"
    arguments.tensor(function, name, ids, arguments.INTEGERS, *shapes)
    return arguments.fits_32_bits(function, name, ids)


def packed(mask: Mask, ids: torch.Tensor, offsets: torch.Tensor) -> Mask:
    """`mask` within each of the documents laid end to end, positions counted in the document.

    Document d begins at offsets[d] (cu_seqlens will do), and `ids` has the document of each key
    position (`packing.document_ids` makes it from offsets). A mask that compares positions, such as
    `window` or `prefix_lm(100)`, applies to each document as if it were alone.

    Shape: ids (seqlen,) or (batch, seqlen), offsets (documents + 1,) or (batch, documents + 1),
        integers.
    Raises: VariantError for another type, shape or dtype, and for what is no mask function.
    """
    _check_functions("packed", (mask,))
    _ids("packed", "ids", ids)
    arguments.tensor(
        "masks.packed",
        "offsets",
        offsets,
        arguments.INTEGERS,
        "(documents + 1,)",
        "(batch, documents + 1)",
    )

    def local(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = _position(q)
        own = _entry(ids, 1, b, position)
        start = _entry(offsets, 1, b, own)
        seen = (own == _entry(ids, 1, b, k)) & (position >= 0)
        # Both from the start of the query's document, so that their difference is that of q and k;
        # the mask's own alignment then leads to the position in the document.
        return seen & mask(b, h, q - start, k - start)

    return local


def spans(starts: torch.Tensor, ends: torch.Tensor) -> Mask:
    """A query at position p sees the keys from starts[p] to below ends[p].

    `packing.span_bounds` makes both from an id for each position; `or_masks(causal, spans(...))` is
    causal text with images that see themselves in both directions.

    Shape: (seqlen,) or (batch, seqlen), integers.
    Raises: VariantError for another type, shape or dtype.
    """
    _ids("spans", "starts", starts)
    _ids("spans", "ends", ends)

    def between(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = _position(q)
        start, end = _entry(starts, 1, b, position), _entry(ends, 1, b, position)
        return (k >= start) & (k < end) & (position >= 0)

    return between


def tree(ends: torch.Tensor) -> Mask:
    """A token sees itself and its ancestors in a tree whose tokens lie in depth-first order.

    ends[k] is one past the last descendant of token k (`packing.tree_ends` makes it from parents).
    Drafts that branch, and continuations that share a prompt, are such trees.

    Shape: ends (seqlen,) or (batch, seqlen), integers.
    Raises: VariantError for another type, shape or dtype.
    """
    _ids("tree", "ends", ends)

    def ancestors(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = _position(q)
        return (k <= position) & (position < _entry(ends, 1, b, k))

    return ancestors


def chunked(size: int) -> Mask:
    """A query sees the keys of its own chunk of `size` positions, counted from the first key.

    Raises: VariantError for what is no int from 1.
    """
    length = arguments.integer("masks.chunked", "size", size, 1)
    return lambda b, h, q, k: _position(q) // length == k // length


def block_causal(size: int) -> Mask:
    """A query sees the keys of its own block of `size` positions and of all blocks before it.

    Raises: VariantError for what is no int from 1.
    """
    length = arguments.integer("masks.block_causal", "size", size, 1)
    return lambda b, h, q, k: k // length <= _position(q) // length


def block_strided(size: int, stride: int) -> Mask:
    """A query sees its own block of `size` positions, and every `stride`-th block from there.

    Raises: VariantError for what is no int from 1.
    """
    length = arguments.integer("masks.block_strided", "size", size, 1)
    step = arguments.integer("masks.block_strided", "stride", stride, 1)
    return lambda b, h, q, k: (_position(q) // length - k // length) % step == 0


def dilated(window: int | None, dilation: int) -> Mask:
    """A query sees every `dilation`-th key up to `window` positions before and after its own.

    None or -1 is a window without bound.

    Raises: VariantError for other windows below 0, a dilation below 1, and for what is no int.
    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.
    """
    reach = _side("dilated", "window", window)
    step = arguments.integer("masks.dilated", "dilation", dilation, 1)

    def spaced(b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = _position(q) - k
        seen = distance % step == 0
        return seen if reach is None else seen & (torch.abs(distance) <= reach)

    return spaced


def streaming(sinks: int, left: int) -> Mask:
    """Causal: a query sees the first `sinks` keys, its own, and the `left` keys before that.

    Raises: VariantError for what is no int from 0.
    Source: Xiao et al. 2024, arXiv:2309.17453.
    """
    first = arguments.integer("masks.streaming", "sinks", sinks, 0)
    before = arguments.integer("masks.streaming", "left", left, 0)
    return and_masks(causal, or_masks(prefix(first), window(before, 0)))


def global_window(tokens: int, left: int, right: int) -> Mask:
    """A window, beside which the first `tokens` positions see every key and every query sees them.

    Raises: VariantError for what is no int from 0.
    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.
    """
    many = arguments.integer("masks.global_window", "tokens", tokens, 0)
    before = arguments.integer("masks.global_window", "left", left, 0)
    after = arguments.integer("masks.global_window", "right", right, 0)
    local = window(before, after)

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < many) | (_position(q) < many) | local(b, h, q, k)

    return seen


def neighborhood(shape: Sequence[int], kernel: int | Sequence[int]) -> Mask:
    """A query sees the `kernel` cells around it in a grid, at the border the `kernel` nearest.

    Positions run through the grid row by row, the last dimension fastest.

    Shape: sizes of the grid, and odd sizes of the neighbourhood (or one for every dimension).
    Raises: VariantError for sizes that are no ints from 1, even ones, and ones beyond the grid.
    Source: Hassani et al. 2023, arXiv:2204.07143.
    """
    name = "masks.neighborhood"
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not shape:
        raise VariantError(f"{name}: shape is {shape!r}; valid are sizes such as (32, 32)")
    sizes = [arguments.integer(name, f"shape[{i}]", size, 1) for i, size in enumerate(shape)]
    given = list(kernel) if isinstance(kernel, Sequence) else [kernel] * len(sizes)
    if len(given) != len(sizes):
        raise VariantError(
            f"{name}: kernel has {len(given)} sizes; valid are one, and {len(sizes)} as shape has"
        )
    widths = [arguments.integer(name, f"kernel[{i}]", width, 1) for i, width in enumerate(given)]
    for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        if width % 2 == 0 or width > size:
            raise VariantError(
                f"{name}: kernel[{i}] is {width}; valid are odd sizes up to the grid's {size}"
            )

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen: Any = True
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            inner, half = math.prod(sizes[i + 1 :]), width // 2
            own, its = _position(q) // inner, k // inner
            if i > 0:
                own, its = own % size, its % size
            center = torch.clamp(own, half, size - 1 - half)
            seen = seen & (its >= center - half) & (its <= center + half)
        return seen

    return near


def block_sparse(table: torch.Tensor, size: int) -> Mask:
    """A query sees the blocks of `size` keys that the row of its own block of positions marks.

    Tiles no larger than a block are skipped where no block that they touch is marked.

    Shape: table (q_blocks, k_blocks), (heads, q_blocks, k_blocks) or
        (batch, heads, q_blocks, k_blocks), bool.
    Raises: VariantError for another type, shape or dtype, and for a size that is no int from 1.
    """
    arguments.tensor(
        "masks.block_sparse",
        "table",
        table,
        (torch.bool,),
        "(q_blocks, k_blocks)",
        "(heads, q_blocks, k_blocks)",
        "(batch, heads, q_blocks, k_blocks)",
    )
    length = arguments.integer("masks.block_sparse", "size", size, 1)
    return lambda b, h, q, k: table[
        (*(b, h)[4 - table.ndim :], _position(q) // length, k // length)
    ]


def _check_functions(name: str, masks: tuple[Any, ...]) -> None:
    for i, mask in enumerate(masks):
        if not callable(mask):
            many = isinstance(mask, list | tuple) and name in ("and_masks", "or_masks")
            given = "a Variant" if isinstance(mask, Variant) else repr(mask)
            raise VariantError(
                f"masks.{name}: argument {i} is {given}; valid are functions mask(b, h, q, k)"
                + (f", each an argument of its own: {name}(*masks)" if many else "")
            )


def and_masks(*masks: Mask) -> Mask:
    """A query sees the keys that all masks show.

    Raises: VariantError for an argument that is no mask function.
    """
    _check_functions("and_masks", masks)

    def every(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen: Any = True
        for mask in masks:
            seen = seen & mask(b, h, q, k)
        return seen

    return every


def or_masks(*masks: Mask) -> Mask:
    """A query sees the keys that any mask shows.

    Raises: VariantError for an argument that is no mask function.
    """
    _check_functions("or_masks", masks)

    def some(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen: Any = False
        for mask in masks:
            seen = seen | mask(b, h, q, k)
        return seen

    return some


def not_mask(mask: Mask) -> Mask:
    """A query sees the keys that the mask hides.

    Raises: VariantError for an argument that is no mask function.
    """
    _check_functions("not_mask", (mask,))

    def other(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask(b, h, q, k) ^ True

    return other

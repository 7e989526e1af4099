"""How a tensor lies in memory, whatever library made it: all that a tensor map says of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cutedsl_fa3.layouts.errors import LayoutError

# What torch and numpy call an element, by the name that cutlass gives it.
CUTLASS_NAMES = {
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "float8_e4m3fn": "Float8E4M3FN",
    "float8_e5m2": "Float8E5M2",
    **{f"{kind}{width}": f"{kind}{width}".title() for kind in ("int", "uint") for width in (8, 16)},
    **{
        f"{kind}{width}": f"{kind}{width}".title() for kind in ("int", "uint") for width in (32, 64)
    },
}
ABBREVIATIONS = {  # of the command line
    "BFloat16": "bf16",
    "Float16": "fp16",
    "Float32": "fp32",
    "Float64": "fp64",
    "Float8E4M3FN": "e4m3",
    "Float8E5M2": "e5m2",
    **{name: name.lower() for name in CUTLASS_NAMES.values() if "nt" in name},
}
_BY_NAME = {**CUTLASS_NAMES, **{short: name for name, short in ABBREVIATIONS.items()}}
# Types that TMA does not take as they are, and the bytes of one element.
OTHERS = {"bool": 1, "complex64": 8, "complex128": 16}


def element(name: str) -> type | str:
    """The cutlass type of a name, in torch's, numpy's or short words; the name where none is."""
    import cutlass

    name = name.rpartition(".")[2]
    found = _BY_NAME.get(name)
    return getattr(cutlass, found) if found else name


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in memory.

    `dtype` is a cutlass type, or the name of a type that cutlass lacks. `address` is None where
    there is no memory yet, as for a meta tensor: it then counts as aligned. `before` are bytes of
    the same storage in front of it. `library` is "torch" or "numpy" where changes can be said in
    its words. `lazy` names what the library does to elements when it reads them (it "negates",
    "conjugates" or "swaps the bytes of" them), which a copy engine does not.

    Shape: dimensions in the library's order, usually the contiguous one last.
    Units: `strides`, `itemsize`, `address` and `before` in bytes.
    Raises: LayoutError if shape and strides differ in length.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: type | str
    address: int | None = None
    itemsize: int = 0
    library: str = ""
    before: int = 0
    lazy: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", element(self.dtype))
        if not self.itemsize:
            width = getattr(self.dtype, "width", 0)
            bytes_each = -(-width // 8) if width else OTHERS.get(str(self.dtype), 0)
            object.__setattr__(self, "itemsize", bytes_each)
        if len(self.shape) != len(self.strides):
            raise LayoutError(
                f"shape {self.shape} has {len(self.shape)} dimensions, strides {self.strides} "
                f"have {len(self.strides)}: one stride a dimension is needed"
            )
        if self.itemsize < 1:
            raise LayoutError(
                f"dtype = {self.dtype!r}: the size of its elements is not known; give a type of "
                "cutlass, its name, or itemsize"
            )

    @classmethod
    def dense(cls, shape: Iterable[int], dtype: type | str, **fields: object) -> Geometry:
        """A tensor without gaps, its last dimension contiguous."""
        shape = tuple(shape)
        one = cls((), (), dtype, **fields)
        strides = dense_strides(shape, one.itemsize, range(len(shape)))
        return cls(shape, strides, one.dtype, **fields)

    @property
    def kind(self) -> str:
        """The name of the element type."""
        return getattr(self.dtype, "__name__", str(self.dtype))

    @property
    def bytes(self) -> int:
        """Bytes of all elements, gaps not counted."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the library would call it contiguous."""
        wanted = dense_strides(self.shape, self.itemsize, range(len(self.shape)))
        pairs = zip(self.shape, self.strides, wanted, strict=True)
        return all(given == dense or size == 1 for size, given, dense in pairs)


def dense_strides(shape: tuple[int, ...], itemsize: int, order: Iterable[int]) -> tuple[int, ...]:
    """Strides in bytes without gaps, the last dimension of `order` innermost."""
    strides, step = [0] * len(shape), itemsize
    for dim in reversed(tuple(order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def geometry_of(tensor: object) -> Geometry:
    """The geometry of a torch tensor, meta tensors included, or of what has an array interface.

    Raises: LayoutError for what has no strides in memory.
    """
    if isinstance(tensor, Geometry):
        return tensor
    if callable(getattr(tensor, "stride", None)):
        return _of_torch(tensor)
    for interface in ("__array_interface__", "__cuda_array_interface__"):
        if hasattr(tensor, interface):
            return _of_array(tensor, getattr(tensor, interface))
    raise LayoutError(
        f"tensor = {type(tensor).__name__}: a torch tensor, an array with strides, a TensorMap or "
        "Geometry(shape, strides, dtype, address) is needed"
    )


def _of_torch(tensor: object) -> Geometry:
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided" or getattr(tensor, "is_nested", False):
        kind = "nested" if getattr(tensor, "is_nested", False) else layout.removeprefix("torch.")
        raise LayoutError(
            f"tensor is a {kind} tensor: a dense one is needed, strided as it may be; the parts it "
            "is stored as (values, indices) are such"
        )
    if getattr(tensor, "is_quantized", False):
        raise LayoutError("tensor is quantized: give the integers it holds, x.int_repr()")
    size = tensor.element_size()
    address = _address(tensor)
    offset = getattr(tensor, "storage_offset", lambda: 0)() * size
    lazy = ""
    if getattr(tensor, "is_conj", bool)():
        lazy = "conjugates"
    elif getattr(tensor, "is_neg", bool)():
        lazy = "negates"
    return Geometry(
        tuple(int(n) for n in tensor.shape),
        tuple(int(s) * size for s in tensor.stride()),
        str(tensor.dtype),
        address,
        size,
        "torch",
        0 if address is None else int(offset),
        lazy,
    )


def _address(tensor: object) -> int | None:
    """Where the first element lies; None for meta and fake tensors, and where nothing lies."""
    # A fake tensor warns where its address is asked for; a part of a meta tensor has an offset.
    if type(tensor).__name__ == "FakeTensor" or str(getattr(tensor, "device", "")) == "meta":
        return None
    try:
        return tensor.data_ptr() or None
    except RuntimeError:  # a tensor of a transform, or one whose storage was freed
        return None


def _of_array(array: object, interface: dict) -> Geometry:
    """Of the protocol that numpy and cupy arrays speak, in which strides None means dense."""
    shape, dtype = tuple(interface["shape"]), array.dtype
    name, size = getattr(dtype, "name", str(dtype)), int(dtype.itemsize)
    if name == "object":
        raise LayoutError("tensor holds Python objects: there is nothing in its memory to copy")
    strides = interface.get("strides")
    if strides is None:
        strides = dense_strides(shape, size, range(len(shape)))
    library = "numpy" if type(array).__module__.partition(".")[0] == "numpy" else ""
    return Geometry(
        shape,
        tuple(int(s) for s in strides),
        name,
        interface["data"][0] or None,
        size,
        library,
        lazy="" if getattr(dtype, "isnative", True) else "swaps the bytes of",
    )

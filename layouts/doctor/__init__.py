"""The TMA doctor: whether TMA can copy a tile of a tensor, by which rules, and what would help.

geometry   a tensor of torch, numpy or only described
binding    a tile or a box on it, and the rules of both
retile, relayout, rerank   single changes: to the tile, to the memory, to the dimensions
remedies   the cheapest series of changes that makes it legal
sectors    bytes and sectors that one instruction moves
diagnosis  all of it on a page
"""

from .diagnosis import Diagnosis, encoded, explain, refusal
from .geometry import Geometry
from .remedies import Remedy
from .sectors import Traffic, traffic

__all__ = [
    "Diagnosis",
    "Geometry",
    "Remedy",
    "Traffic",
    "encoded",
    "explain",
    "refusal",
    "traffic",
]

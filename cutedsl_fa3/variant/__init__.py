"""Attention variants: plain Python functions, each traced once into a graph."""

from .graph import Graph, Node, Ref
from .softmax import Elementwise, OnlineSoftmax
from .symbols import seqlen_k, seqlen_q
from .variant import Variant

__all__ = [
    "Elementwise",
    "Graph",
    "Node",
    "OnlineSoftmax",
    "Ref",
    "Variant",
    "seqlen_k",
    "seqlen_q",
]

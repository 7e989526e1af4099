"""Attention variants: plain Python score and mask functions, traced into one graph."""

from .graph import Graph, Node, Ref
from .symbols import seqlen_k, seqlen_q
from .variant import Variant

__all__ = ["Graph", "Node", "Ref", "Variant", "seqlen_k", "seqlen_q"]

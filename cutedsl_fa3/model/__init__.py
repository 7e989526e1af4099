"""The pipeline model: what a traced kernel's roles execute, checked over all interleavings.

program    the traced kernel, cut down to what decides barriers and shared memory
host       what its host function launches for given arguments
warp       runs the scalar code of one warp and yields its steps
search     runs all warps, with the causal past of every step: one order that stands for all
analyse    races over bytes, what each read finds, who waits for whom
check      `check_pipeline`: a kernel and pieces of work -> a printable verdict
walk       `walk`: one interleaving, step by step, with the state of every mbarrier
"""

from .check import Outcome, Verdict, check_pipeline
from .program import NotCovered
from .state import Finding
from .walk import Walk, walk

__all__ = ["Finding", "NotCovered", "Outcome", "Verdict", "Walk", "check_pipeline", "walk"]

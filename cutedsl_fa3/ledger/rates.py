"""What instructions cost an SM of an H100 or H200, and which instructions an operation becomes.

Two tables. `PIPES` and `FAMILIES` are the hardware: which pipe an instruction takes, and how many
of its lanes that pipe serves in a clock. `OPS` is the lowering (variant/lower.py) as machine code:
what one evaluation of an operation becomes, read from cubins of ptxas 13.4.
tests/ledger/test_instructions.py holds it against today's and names the entry that is off.

Sources of the rates, results a clock and SM: CUDA C++ programming guide, arithmetic instructions,
capability 9.0 (fp32 add, multiply, FMA 128; integer add, multiply, shift, logic, compare, minimum,
maximum 64; special functions 16; shuffles 32); H100 data sheet (dense bf16 on 132 SMs at 1830 MHz);
four schedulers issue an instruction of a warp in each clock. Conversions between integers and
floats are taken at 16, as slow as an exponential, those to bf16 and fp16 in pairs at 64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cutedsl_fa3.variant.shared import MOST

SMS = 132  # of an H200 and an H100 SXM
SCHEDULERS, LANES = 4, 32
WGMMA_FLOP = 4096  # dense, 16-bit, a clock and SM
# What a load that finds its line in L2 waits, in clocks. Source: Luo et al. 2024, arXiv:2402.13499.
L2_LATENCY = 260

# Lanes that a pipe serves in a clock, by its name.
PIPES: dict[str, int] = {"MUFU": 16, "FMA": 128, "ALU": 64, "LSU": 32}

# Families of instructions (the first word of a mnemonic) by pipe. IMAD takes half of the FMA pipe,
# so it counts twice there; UIADD3 and the like are bookkeeping and only take issue slots.
FAMILIES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("MUFU", "FRND", "F2I", "I2FP"), ("MUFU", 1)),
    **dict.fromkeys(("FFMA", "FADD", "FMUL"), ("FMA", 1)),
    "IMAD": ("FMA", 2),
    **dict.fromkeys(
        "FMNMX FSEL FSETP F2FP ISETP SEL VIADD VIMNMX IABS SHF LEA LOP3 R2P".split(),
        ("ALU", 1),
    ),
    **dict.fromkeys(("LDG", "SHFL"), ("LSU", 1)),
}
# Other names of one instruction; what is counted under the first, ptxas also writes as these.
ALSO = {"VIADD": ("IADD3", "VIADDMNMX"), "IMAD": (), "MUFU": ()}

Counts = Mapping[str, float]

_RECIPROCAL = {"MUFU": 1}

# By operation and the type it works on: instructions of one evaluation. Selections of a mask's
# conditions, loads, and what is folded into its user are in instructions.py.
OPS: dict[tuple[str, str], Counts] = {
    ("add", "float"): {"FADD": 1},
    ("sub", "float"): {"FADD": 1},
    ("mul", "float"): {"FMUL": 1},
    ("div", "float"): {"FMUL": 3},  # and a reciprocal of each divisor
    ("minimum", "float"): {"FSETP": 2, "FSEL": 1},
    ("maximum", "float"): {"FSETP": 2, "FSEL": 1},
    ("exp", "float"): {"FMUL": 1, "MUFU": 1},
    ("exp2", "float"): {"MUFU": 1},
    ("log", "float"): {"FMUL": 1, "MUFU": 1},
    ("log2", "float"): {"MUFU": 1},
    ("sqrt", "float"): {"FMUL": 2, "FSETP": 1, "MUFU": 1},
    ("rsqrt", "float"): {"FMUL": 2, "FSETP": 1, "MUFU": 1},
    ("sin", "float"): {"FMUL": 1, "MUFU": 1},
    ("cos", "float"): {"FMUL": 1, "MUFU": 1},
    ("expm1", "float"): {"FFMA": 7, "FMUL": 2, "FADD": 1, "FSETP": 1, "MUFU": 1},
    ("log1p", "float"): {"FFMA": 3, "FMUL": 4, "FADD": 2, "FSETP": 1, "MUFU": 2},
    ("erf", "float"): {
        "FFMA": 16,
        "FMUL": 8,
        "FADD": 2,
        "FSETP": 2,
        "FMNMX": 1,
        "FSEL": 1,
        "MUFU": 3,
    },
    ("gelu", "float"): {"FFMA": 10, "FMUL": 9, "FADD": 3, "FSETP": 1, "FMNMX": 1, "MUFU": 3},
    ("gelu_tanh", "float"): {"FFMA": 1, "FMUL": 6, "FADD": 1, "FSETP": 1, "MUFU": 2},
    ("silu", "float"): {"FMUL": 3, "FADD": 1, "FSETP": 1, "MUFU": 2},
    ("softplus", "float"): {"FFMA": 3, "FMUL": 5, "FADD": 3, "FSETP": 2, "MUFU": 3},
    ("floor", "float"): {"FRND": 1},
    ("ceil", "float"): {"FRND": 1},
    ("trunc", "float"): {"FRND": 2, "FSETP": 1},
    ("fmod", "float"): {"FSETP": 7, "FSEL": 5, "FADD": 6, "FFMA": 3, "LOP3": 3, "MUFU": 3},
    ("where", "float"): {"FSEL": 1},
    ("where", "int"): {"SEL": 1},
    ("mul", "int"): {"IMAD": 1},
    ("floordiv", "int"): {"IMAD": 2, "LEA": 1, "SHF": 1},
    ("truncdiv", "int"): {"IMAD": 2, "LEA": 1, "SHF": 1},
    ("mod", "int"): {"IMAD": 3, "LEA": 1, "SHF": 1},
    ("fmod", "int"): {"IMAD": 3, "LEA": 1, "SHF": 1},
    ("minimum", "int"): {"VIMNMX": 1},
    ("maximum", "int"): {"VIMNMX": 1},
    ("abs", "int"): {"IABS": 1},
    **{(op, "int"): {"LOP3": 1} for op in ("bit_and", "bit_or", "bit_xor", "bit_not")},
    **{(op, "int"): {"SHF": 1} for op in ("shl", "shr")},
    **{(op, "int"): {"ISETP": 1} for op in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{(op, "float"): {"FSETP": 1} for op in ("lt", "le", "gt", "ge", "eq", "ne")},
    ("to_int", "float"): {"F2I": 1},
    ("to_float", "int"): {"I2FP": 1},
    ("to_int", "bool"): {"SEL": 1},
    ("to_float", "bool"): {"FSEL": 1},
    # modifiers of the instruction that reads them, or predicates that comparisons take along
    **{(op, "float"): {} for op in ("neg", "abs")},
    **{(op, "bool"): {} for op in ("and", "or", "xor", "not", "eq", "ne", "where")},
}

# Functions of 2^exponent (variant/shared.py), alone and as one of neighbours that share a
# reciprocal; the exponent itself is one more instruction. "capped" is a number times tanh; `COARSE`
# is that by the unit's own tanh, of an argument that may be one more instruction.
ALONE: dict[str, Counts] = {
    "capped": {"FFMA": 1, "FADD": 1, "MUFU": 2},
    "tanh": {"FFMA": 1, "FADD": 1, "MUFU": 2},
    "sigmoid": {"FADD": 1, "MUFU": 2},
}
RECIPROCAL: dict[int, Counts] = {2: {"MUFU": 0.5}, 4: {"MUFU": 0.25, "FMUL": 0.75}}  # by how many
SHARED: dict[str, Counts] = {
    kind: Counter(counts) + Counter(RECIPROCAL[MOST["sigmoid" if kind == "sigmoid" else "tanh"]])
    for kind, counts in {
        "capped": {"FMNMX": 1, "FFMA": 2, "FADD": 0.5, "MUFU": 1},
        "tanh": {"FMNMX": 1, "FFMA": 2, "FADD": 0.5, "MUFU": 1},
        "sigmoid": {"FMNMX": 1, "FFMA": 1.5, "FADD": 0.5, "FMUL": 1, "MUFU": 1},
    }.items()
}
COARSE: Counts = {"MUFU": 1, "FMUL": 1}  # under a bounded softmax (kernels/sm90/bounded.py)
NEAR_ZERO: Counts = {"FMUL": 2, "FFMA": 1, "FSETP": 1}  # tanh's series, and the choice

# Not operations of a graph, but what the lowering makes beside them.
SCALED: Counts = {"FMUL": 1}  # a raw product times the scale
ADDED: Counts = {"FFMA": 1}  # something added to a product
DISTANCE: Counts = {"FADD": 1}  # a float that grows evenly with q and k (variant/distances.py)
# Of a row whose scores lack a base (kernels/sm90/units.py): that base, and its meetings with the
# maximum, as counted in the machine code.
BASE: Counts = {"FFMA": 1, "FMUL": 1, "FADD": 1.5}
POSITION: Counts = {"VIADD": 1}  # a position, or an integer at a fixed distance from another
DIVISOR: Counts = _RECIPROCAL
HIDDEN: Counts = {"FSEL": 1}  # -inf where a condition of the mask does not hold
INSIDE: Counts = {"ISETP": 1}  # whether a key lies within the sequence
# Where a mask is spans of keys (variant/spans.py): eight bits of a row as predicates, and the bits
# in front of an end of a span.
BITS: Counts = {"R2P": 1, "LOP3": 1}
BIT: Counts = {"LOP3": 1}  # of one element, where a function makes its score first
# A weight in fp16: its bit shifted into a mask, where there is a whole word of them; else selected.
HALF_OF_WORD: Counts = {"SHF": 1.4, "IMAD": 0.6, "LOP3": 1}
HALF: Counts = {"SEL": 1}
END_OF_SPAN: Counts = {"VIADD": 2, "SHF": 2, "LOP3": 3, "VIMNMX": 2, "ISETP": 1, "SEL": 1}
CLAMPED: Counts = {"VIADD": 1}  # an index of a captured tensor, its last addition included
LOADED: Counts = {"IMAD": 4, "LEA": 2, "SHF": 1, "LDG": 1}  # by 64-bit strides
LOADED_DENSE: Counts = {"IMAD": 1, "LDG": 1}
ADDRESS: Counts = {"IMAD": 1, "VIADD": 1}  # of what a tile reads evenly, at its first element
LOADED_BEHIND: Counts = {"LDG": 1}  # at a number behind that address
CLAMPED_PAIR: Counts = {"VIADD": 1, "ISETP": 1, "SEL": 1}
LOADED_PAIR: Counts = {"IMAD": 1, "LDG": 1}  # two keys at once (variant/pairs.py)
FIRST_OF_PAIR: Counts = {"FSEL": 1}  # if it is a float; of an integer a SEL
LIMITED: Counts = {"FMNMX": 1}  # the lesser or greater of a value and a number
KEPT_EARLY: Counts = {"ISETP": 1, "STS": 1}  # a sum that is held before a wait
WIDENED: Counts = {"IMAD": 1}  # bf16 or fp16 to fp32
NARROWED: Counts = {"SEL": 5, "ISETP": 6}  # int64 to what 32 bits hold


def clocks(counts: Counts, warps: int) -> dict[str, float]:
    """Clocks of an SM on each pipe, and of its schedulers under "issue", for `warps` warps.

    Units: `counts` are instructions of one warp.
    """
    found = dict.fromkeys((*PIPES, "issue"), 0.0)
    for family, count in counts.items():
        if family in FAMILIES:
            pipe, weight = FAMILIES[family]
            found[pipe] += count * weight * warps * LANES / PIPES[pipe]
        found["issue"] += count * warps / SCHEDULERS
    return found

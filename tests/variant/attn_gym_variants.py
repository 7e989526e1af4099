"""Every mask and score of the attn-gym package, as it comes, with inputs that it makes sense on.

`CASES` maps a name to a `Case`: a function of a device that makes the published functions, and a
problem to run them on. Nothing here rewrites or wraps what the package returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from cutedsl_fa3.variant import Variant

if find_spec("attn_gym"):  # else no case can be made, and tests marked `attn_gym` do not run
    import attn_gym.masks as masks
    import attn_gym.mods as mods
    from attn_gym.masks.document_mask import length_to_offsets
    from attn_gym.masks.vsa import generate_vsa_padding_mask_mod

Functions = dict[str, Callable[..., Any]]  # arguments of Variant: score, mask
LENGTHS = [70, 1, 40, 129, 16]  # of documents, 256 tokens in all


@dataclass(frozen=True)
class Case:
    """Published functions and the size of a problem for them."""

    functions: Callable[[str], Functions]
    seqlen_q: int = 256
    seqlen_k: int = 256
    heads: int = 4
    batch: int = 2
    exact: bool = True  # whether eager torch has one value for it, to the bit

    def variant(self, device: str = "cpu") -> Variant:
        return Variant(**self.functions(device))


def _mask(make: Callable[[], Callable[..., Any]]) -> Callable[[str], Functions]:
    return lambda device: {"mask": make()}


def _score(make: Callable[[], Callable[..., Any]]) -> Callable[[str], Functions]:
    return lambda device: {"score": make()}


def _random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def _whole(device: str, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-high, high + 1, shape, generator=generator).float().to(device)


def _documents(inner: Callable[[], Callable[..., Any]]) -> Callable[[str], Functions]:
    return lambda device: {
        "mask": masks.generate_doc_mask_mod(inner(), length_to_offsets(LENGTHS, device))
    }


def _packed_documents(device: str) -> Functions:
    return {"mask": masks.generate_packed_causal_doc_mask_mod(length_to_offsets(LENGTHS, device))}


def _shared_prefix(device: str) -> Functions:
    offsets = length_to_offsets([64, 32, 50, 40, 30, 40], device)
    prefixes = torch.tensor([0, 0, 0, 3, 3, 3], device=device)
    return {"mask": masks.generate_shared_prefix_mask_mod(offsets, prefixes)}


def _flamingo(device: str) -> Functions:
    intervals = torch.tensor([[0, 100], [20, 100], [100, 256], [90, 91]], device=device)
    return {"mask": masks.generate_vision_cross_attention_mask_mod(intervals, 48)}


def _global_window(device: str) -> Functions:
    is_global = torch.zeros(256, dtype=torch.bool, device=device)
    is_global[[0, 7, 100]] = True
    return {"mask": masks.generate_global_sliding_window(17, is_global)}


def _tree(device: str) -> Functions:
    parents = [-1, *(max(0, i // 2 - i % 3) for i in range(1, 40))]
    ancestors = masks.build_tree_ancestor_matrix(parents, device=device)
    return {"mask": masks.generate_jetspec_tree_causal_mask_mod(150, ancestors)}


def _tiles(device: str, top_k: int = 3) -> torch.Tensor:
    query, key = _random(device, 2, 4, 256, 8), _random(device, 2, 4, 256, 8).flip(2)
    return masks.compute_vsa_topk_indices(query, key, tile_numel=32, top_k=top_k)


def _sparse_video(device: str) -> Functions:
    return {"mask": masks.generate_vsa_mask_mod(_tiles(device), 32)}


def _sparse_video_with_edges(device: str) -> Functions:
    metadata = masks.create_vsa_tile_metadata((5, 7, 6), (4, 4, 2), device)
    sizes = metadata.variable_block_sizes[:8]
    return {"mask": masks.generate_vsa_mask_mod(_tiles(device, 8), 32, sizes)}


def _sparse_video_padding(device: str) -> Functions:
    sizes = torch.tensor([32, 31, 1, 0, 32, 16, 8, 32], device=device)
    return {"mask": generate_vsa_padding_mask_mod(sizes, 32)}


def _latent(made: Callable[..., torch.Tensor], dim: int) -> Callable[[str], Functions]:
    def functions(device: str) -> Functions:
        query, key = made(device, 2, 4, 256, dim), made(device, 2, 1, 256, dim)
        return {"score": mods.generate_mla_rope_score_mod(query, key, 4, scale=0.5)}

    return functions


def _graph(device: str) -> torch.Tensor:
    nodes = torch.arange(40, device=device)
    adjacency = torch.zeros(2, 40, 40, dtype=torch.bool, device=device)
    adjacency[:, nodes, (nodes + 1) % 40] = True
    adjacency[:, (nodes + 1) % 40, nodes] = True
    adjacency[1, 3, 30] = adjacency[1, 30, 3] = True
    return adjacency


def _graph_distances(device: str) -> Functions:
    distances = mods.shortest_path_distances(_graph(device), 6)
    return {"score": mods.generate_graphormer_spatial_bias(_random(device, 4, 8), distances)}


def _graph_edges(device: str) -> Functions:
    types = torch.arange(2 * 40 * 40, device=device).reshape(2, 40, 40) % 5
    paths = mods.shortest_path_edge_types(_graph(device), types, 3)
    return {"score": mods.generate_graphormer_edge_bias(_random(device, 4, 3, 5), *paths)}


def _activation(**options: Any) -> Callable[[str], Functions]:
    return _score(lambda: mods.generate_activation_score_mod(**options))


CASES: dict[str, Case] = {
    # masks
    "causal_mask": Case(_mask(lambda: masks.causal_mask)),
    "batchify_mask_mod": Case(_mask(lambda: masks.batchify_mask_mod(masks.causal_mask, 48))),
    "batchify_mask_mod of noop_mask": Case(_mask(lambda: masks.batchify_mask_mod(noop_mask, 100))),
    "generate_block_diffusion_mask": Case(
        _mask(lambda: masks.generate_block_diffusion_mask(128, 12))
    ),
    "generate_dilated_sliding_window": Case(
        _mask(lambda: masks.generate_dilated_sliding_window(40, 3))
    ),
    "generate_doc_mask_mod": Case(_documents(lambda: masks.causal_mask)),
    "generate_doc_mask_mod of noop_mask": Case(_documents(lambda: noop_mask)),
    "generate_doc_mask_mod of a window": Case(
        _documents(lambda: masks.generate_sliding_window(20))
    ),
    "generate_doc_mask_mod of a prefix": Case(_documents(lambda: masks.generate_prefix_lm_mask(9))),
    "generate_packed_causal_doc_mask_mod": Case(_packed_documents),
    "generate_vision_cross_attention_mask_mod": Case(_flamingo, seqlen_k=192),
    "generate_global_sliding_window": Case(_global_window),
    "generate_jetspec_tree_causal_mask_mod": Case(_tree, seqlen_q=40, seqlen_k=190),
    "generate_jetspec_training_mask_mod": Case(
        _mask(lambda: masks.generate_jetspec_training_mask_mod(100, 13)), seqlen_q=156
    ),
    "generate_natten": Case(_mask(lambda: masks.generate_natten(16, 16, 5, 7))),
    "generate_tiled_natten": Case(_mask(lambda: masks.generate_tiled_natten(16, 16, 5, 7, 4, 8))),
    "generate_morton_natten": Case(_mask(lambda: masks.generate_morton_natten(16, 16, 5, 7))),
    "generate_prefix_lm_mask": Case(_mask(lambda: masks.generate_prefix_lm_mask(50))),
    "generate_shared_prefix_mask_mod": Case(_shared_prefix),
    "generate_sliding_window": Case(_mask(lambda: masks.generate_sliding_window(33))),
    "generate_sta_mask_mod_2d": Case(
        _mask(lambda: masks.generate_sta_mask_mod_2d((12, 16), (6, 8), (3, 4), text_seq_len=40)),
        seqlen_q=240,
        seqlen_k=240,
    ),
    "generate_sta_mask_mod_3d": Case(
        _mask(
            lambda: masks.generate_sta_mask_mod_3d((4, 8, 6), (2, 8, 3), (2, 2, 3), text_seq_len=40)
        )
    ),
    "generate_spatial_head_mask_mod": Case(
        _mask(
            lambda: masks.generate_spatial_head_mask_mod(
                20, 8, 29, 2, attn_sink=True, round_width=16
            )
        )
    ),
    "generate_spatial_head_mask_mod as given": Case(
        _mask(lambda: masks.generate_spatial_head_mask_mod())
    ),
    "generate_temporal_head_mask_mod": Case(
        _mask(lambda: masks.generate_temporal_head_mask_mod(20, 8, 29, 2))
    ),
    "generate_vsa_mask_mod": Case(_sparse_video),
    "generate_vsa_mask_mod with edge tiles": Case(_sparse_video_with_edges),
    "generate_vsa_padding_mask_mod": Case(_sparse_video_padding),
    "and_masks": Case(
        _mask(lambda: and_masks(masks.causal_mask, masks.generate_dilated_sliding_window(64, 2)))
    ),
    "or_masks": Case(
        _mask(
            lambda: or_masks(masks.generate_sliding_window(10), masks.generate_natten(16, 16, 3, 3))
        )
    ),
    # scores
    "generate_alibi_bias": Case(_score(lambda: mods.generate_alibi_bias(4))),
    "generate_alibi_bias of 12 heads": Case(_score(lambda: mods.generate_alibi_bias(12)), heads=12),
    "generate_tanh_softcap": Case(_score(lambda: mods.generate_tanh_softcap(20))),
    "generate_tanh_softcap approx": Case(
        _score(lambda: mods.generate_tanh_softcap(20, approx=True))
    ),
    "generate_sandwich_bias": Case(
        lambda device: {"score": mods.generate_sandwich_bias(4, 256, device=device)}
    ),
    "generate_activation_score_mod": Case(_activation()),
    "generate_activation_score_mod of relu": Case(_activation(activation=F.relu, offset=0.5)),
    "generate_activation_score_mod of sigmoid": Case(_activation(activation=torch.sigmoid)),
    "generate_activation_score_mod of silu": Case(_activation(activation=F.silu)),
    "generate_activation_score_mod of softplus": Case(_activation(activation=F.softplus, offset=0)),
    "generate_activation_score_mod of elu": Case(_activation(activation=F.elu, offset=2.0)),
    "generate_mla_rope_score_mod": Case(
        _latent(lambda device, *shape: _whole(device, 3, *shape), 16)
    ),
    "generate_mla_rope_score_mod of any values": Case(_latent(_random, 64), exact=False),
    "generate_graphormer_spatial_bias": Case(_graph_distances, seqlen_q=40, seqlen_k=40),
    "generate_graphormer_edge_bias": Case(_graph_edges, seqlen_q=40, seqlen_k=40),
    # both
    "alibi and sliding window": Case(
        lambda device: {
            "score": mods.generate_alibi_bias(4),
            "mask": masks.generate_sliding_window(50),
        }
    ),
}

# What the package exports beside masks and scores, and what it is.
OTHERS: dict[str, str] = {
    "build_tree_ancestor_matrix": "makes a tensor for generate_jetspec_tree_causal_mask_mod",
    "length_to_offsets": "makes a tensor for the document masks",
    "generate_random_lengths": "makes lengths of documents",
    "create_causal_block_mask_fast": "makes a BlockMask, which no kernel here needs",
    "create_vsa_block_mask": "makes a BlockMask; generate_vsa_mask_mod says the same as a mask",
    "create_vsa_flash_block_mask": "makes a BlockMask; generate_vsa_mask_mod says the same",
    "create_vsa_tile_metadata": "makes tensors that reorder tokens",
    "tile_vsa_sequence": "reorders tokens",
    "untile_vsa_sequence": "reorders tokens",
    "pool_to_vsa_tiles": "averages tokens of a tile",
    "compute_vsa_tile_scores": "attention between tiles in torch",
    "compute_vsa_topk_indices": "makes a tensor for generate_vsa_mask_mod",
    "compute_vsa_coarse_attention": "attention between tiles in torch",
    "force_self_into_topk": "makes a tensor for generate_vsa_mask_mod",
    "lift_vsa_tile_output": "spreads a tile's output over its tokens",
    "validate_vsa_block_mask_inputs": "checks arguments",
    "vsa_additive_combine": "adds two outputs",
    "vsa_gated_mix": "mixes two outputs",
    "vsa_topk_from_sparsity": "counts tiles",
    "interleave_bits_32": "part of generate_morton_natten",
    "deinterleave_bits_32": "part of generate_morton_natten",
    "morton_encode": "part of generate_morton_natten",
    "morton_decode": "part of generate_morton_natten",
    "shortest_path_distances": "makes a tensor for generate_graphormer_spatial_bias",
    "shortest_path_edge_types": "makes tensors for generate_graphormer_edge_bias",
    "undo_softmax": "divides the softmax out again; Elementwise(f) needs none of it",
}

"""Tiny configurations of transformers' models, made by the names of their fields."""

from __future__ import annotations

import inspect
import re
from typing import Any

VOCABULARY = 128

DEPTHS: dict[str, int] = {
    r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers|first_k_dense_replace": 0,
    r"(num_|n_)?(\w+_)?(hidden_|encoder_|decoder_)?(layers|layer|blocks)": 2,
    r"\w*vocab_size\w*": VOCABULARY,
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts": 4,
}
"""Fields that can be made smaller without regard to anything else. The first pattern that fits a name counts."""

WIDTHS: dict[str, int] = {
    r"(mamba_|ssm_)(n_heads|num_heads)": 8,
    r"mamba_d_ssm|mamba_intermediate_size": 128,
    r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|emb_dim|embedding_size|d_embed|embedding_dim|word_embed_proj_dim"
    r"|dim_model|n_embed|rnn_hidden_size|attention_hidden_size|lru_width|text_width|rnn_width|d_inner_model": 64,
    r"(\w+_)?intermediate_size|(\w+_)?ffn_dim|d_ff|n_inner|ffn_hidden_size|\w*inner_dim|(dense_)?ffn_size|mlp_hidden_size": 128,
    r"(num_|n_)?(\w+_)?(key_value_heads|kv_heads)|num_kv_heads|n_head_kv|multi_query_group_num": 2,
    r"(\w+_)?head_dim|d_kv|attention_head_size|head_size|d_head|kv_channels|mamba_d_head|rotary_dim": 16,
    r"(num_|n_)?(\w+_)?(attention_)?(heads|head)": 4,
    r"\w*lora_rank": 32,
    r"num_experts_per_tok|moe_topk|num_experts_per_token|moe_k|top_k|moe_top_k|num_selected_experts": 2,
    r"n_group|topk_group|num_expert_group|n_groups|num_groups|mamba_n_groups": 1,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length": 64,
    r"max_(source|target)_positions": 64,
    r"image_size": 32,
    r"patch_size": 8,
    r"\w*state_size|mamba_d_state": 8,
    r"sliding_window|attention_window|attention_chunk_size|chunk_size|mamba_chunk_size|local_attention": 8,
}
"""Fields that have to fit together."""

DEEPER = {r"num_hidden_layers|n_layers?|num_layers": 6}
"""For patterns of layers in which two are not enough."""

ALL_HEADS = {r"num_key_value_heads": 4}
"""For attention in which keys have as many heads as queries, though its configuration has a field for them."""

MORE_HEADS = {r"num_heads": 8}
"""For state-space models, whose heads divide twice the width."""

LISTS = {r"depths|layer_depths|num_blocks": 1}
ABSENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 4,
    "default_language": "en_XX",
}
"""For fields without which a model cannot be built, though their default is None."""

EXACT = {"attention_types": [[["global", "local"], 1]]}
"""Fields whose form depends on the number of layers."""

DERIVED = re.compile(r"\w*layer_types|layers_block_type|indexer_types|mlp_layer_types|no_rope_layers|\w*_layer_idx\w*")
"""Lists with an entry per layer: left to the configuration's own defaults."""

TOKEN = re.compile(r"\w*(token_id|token_index|_token_idx|mask_index)")

Rules = dict[str, int]
SMALL = DEPTHS | WIDTHS
LEVELS: tuple[Rules, ...] = (
    SMALL,
    ALL_HEADS | SMALL,
    DEEPER | SMALL,
    ALL_HEADS | DEEPER | SMALL,
    MORE_HEADS | SMALL,
    DEPTHS,
    {},
)
"""From the smallest to the configuration as it is; the first that gives a running model is taken."""


def shrunk(config_class: Any, rules: Rules) -> Any:
    """Returns the configuration with the fields that ``rules`` name made small, and caches off."""
    fields = _fields(config_class().to_dict(), rules) if rules else {}
    accepted = inspect.signature(config_class).parameters
    config = config_class(**{name: value for name, value in fields.items() if name in accepted})
    if getattr(config, "use_cache", False):
        config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _fields(fields: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """Returns the fields to pass on, smaller. Fields that are not among them keep their defaults."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and value.get("model_type"):
            found[name] = _fields(value, rules) | {"model_type": value["model_type"]}
        elif name in EXACT:
            found[name] = EXACT[name]
        elif value is None and name in ABSENT:
            found[name] = ABSENT[name]
        elif isinstance(value, int) and not isinstance(value, bool) and TOKEN.fullmatch(name):
            found[name] = min(value, VOCABULARY - 1)
        elif isinstance(value, int) and not isinstance(value, bool) and (small := _rule(name, rules)) is not None:
            found[name] = min(small, value)
        elif isinstance(value, list) and not DERIVED.fullmatch(name) and (small := _rule(name, LISTS)) is not None:
            found[name] = [min(small, each) for each in value]
    return found


def _rule(name: str, rules: Rules) -> int | None:
    """Returns the size of the first pattern that fits the field's name; None if none fits."""
    return next((small for pattern, small in rules.items() if re.fullmatch(pattern, name)), None)

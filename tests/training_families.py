"""Training steps of model families of transformers, tiny and with random weights. Importing this adds them to ``STEPS``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training_models import STEPS
from training_steps import Compile, Step, rows, train

VOCABULARY, TOKENS = 32, (2, 8)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SPECIAL | {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
ENCODER = SPECIAL | {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}
BART = {
    f"{half}_{name}": value
    for half in ("encoder", "decoder")
    for name, value in {"layers": 1, "ffn_dim": 32, "attention_heads": 2}.items()
}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "use_cache": False}
TOWERS = {
    "text_config": ENCODER,
    "vision_config": IMAGES | {name: ENCODER[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    | {"num_hidden_layers": 1},
    "projection_dim": 16,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", DECODER),
    "gemma2": ("Gemma2ForCausalLM", DECODER | {"sliding_window": 4}),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 4, "output_router_logits": True}),
    "mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "bart": ("BartForConditionalGeneration", SPECIAL | BART | {"vocab_size": VOCABULARY, "d_model": 16}),
    "t5": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", IMAGES | {n: ENCODER[n] for n in ENCODER if "size" in n or n.startswith("num_")}),
    "swin": ("SwinForImageClassification", IMAGES | {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "clip": ("CLIPModel", TOWERS),
}
"""The model class of each, and what its configuration is made of."""


def family_step(class_name: str, fields: dict[str, Any]) -> Step:
    def run(compile_: Compile) -> list[Tensor]:
        import transformers

        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**fields)).train()
        labels = torch.randint(3, VOCABULARY, TOKENS)
        batch: dict[str, Any] = {"input_ids": labels, "labels": labels}
        if class_name.endswith("ImageClassification"):
            batch = {"pixel_values": rows(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
        elif class_name == "CLIPModel":
            batch = {"pixel_values": rows(2, 3, 16, 16), "input_ids": labels, "return_loss": True}
        return train(model, compile_(lambda: model(**batch).loss))

    return run


STEPS |= {name: family_step(*family) for name, family in FAMILIES.items()}

"""More training steps: types, transforms, whole models and families of them. Importing this adds them to ``STEPS``."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_steps import ROWS, STEPS, WIDTH, Compile, Step, layers, numbers, rows, simple, step, train


def autocast_step(dtype: torch.dtype) -> Step:
    def run(compile_: Compile) -> list[Tensor]:
        model = nn.Sequential(layers(), nn.LayerNorm(WIDTH), layers())
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
        compiled, losses = compile_(lambda x: model(x).exp().mean()), []
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                losses.append(compiled(rows()))
            scaler.scale(losses[-1]).backward()
            scaler.step(optimizer)
            scaler.update()
        return numbers(*losses, model, torch.tensor(scaler.get_scale()))

    return run


@step
def channels_last(compile_: Compile) -> list[Tensor]:
    convolutions = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 2, 2),
        nn.MaxPool2d(2),
    )
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, groups=4)).to(memory_format=torch.channels_last)
    x = rows(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    return train(model, compile_(lambda x: model(x).exp().mean()), x)


@step
def complex_numbers(compile_: Compile) -> list[Tensor]:
    """Rotary embeddings by complex products, a Fourier transform and a complex weight."""
    model, weight = layers(), nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2, dtype=torch.complex64) / 4)

    def loss(x: Tensor) -> Tensor:
        turned = torch.view_as_complex(model(x).view(ROWS, -1, 2)) * torch.polar(torch.ones(WIDTH // 2), torch.arange(8.0))
        hidden = torch.fft.ifft(torch.fft.fft(turned) @ weight)
        return model(torch.view_as_real(hidden).flatten(1)).exp().mean() + hidden.abs().mean()

    return [*train(model, compile_(loss), rows(gradient=True)), *numbers(weight)]


STEPS |= {
    "autocast_bfloat16": autocast_step(torch.bfloat16),
    "autocast_float16": autocast_step(torch.float16),
    "float64": simple(lambda: layers().double(), lambda m, x: m(x.double()).exp()),
}


@step
def mapped_over_a_batch(compile_: Compile) -> list[Tensor]:
    model = layers()
    row_by_row = torch.func.vmap(lambda row: model(model(row)).exp().softmax(-1) * row)
    return train(model, compile_(lambda x: row_by_row(x).exp().mean()), rows())


@step
def gradient_inside(compile_: Compile) -> list[Tensor]:
    """A penalty on the gradient of an energy: a backward through a gradient that torch traces."""
    model = layers()

    def loss(x: Tensor) -> Tensor:
        force = torch.func.grad(lambda y: model(y).exp().sum())(x)
        return force.square().mean() + model(x).mean()

    return train(model, compile_(loss), rows())


@step
def with_other_parameters(compile_: Compile) -> list[Tensor]:
    """One step of meta-learning: the loss after an inner update."""
    model = layers()

    def loss(x: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        inner = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).square().mean())(weights)
        weights = {name: weight - 0.1 * inner[name] for name, weight in weights.items()}
        return torch.func.functional_call(model, weights, (x.flip(0),)).exp().mean()

    return train(model, compile_(loss), rows())


@step
def recurrent_layers(compile_: Compile) -> list[Tensor]:
    model = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, bidirectional=True), nn.GRU(2 * WIDTH, WIDTH)])
    with torch._dynamo.config.patch(allow_rnn=True):  # else Dynamo leaves them out of its graphs
        return train(model, compile_(lambda x: model[1](model[0](x)[0])[0].exp().mean()), rows(5, 16, WIDTH, gradient=True))


class Experts(nn.Module):
    """Each row goes through the two experts that it prefers; how many rows an expert gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(layers(2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            result = result.index_add(0, row, expert(x[row]) * weights[row, place, None])
        return result


def experts_step(whole: bool) -> Step:
    """With the routing in one graph, or with a break at each expert."""

    def run(compile_: Compile) -> list[Tensor]:
        model = nn.Sequential(layers(1), Experts(), layers(1))
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=whole):
            return train(model, compile_(lambda x: model(x).exp().mean()), rows(gradient=True))

    return run


STEPS |= {"experts_whole": experts_step(True), "experts_broken": experts_step(False)}


@step
def two_towers(compile_: Compile) -> list[Tensor]:
    """Images and texts, each compared with all others, with dropout and a learned temperature."""
    image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.Linear(72, WIDTH))
    text = nn.Sequential(nn.Embedding(32, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True))
    temperature = nn.Parameter(torch.zeros(()))

    def loss(images: Tensor, tokens: Tensor) -> Tensor:
        a, b = F.normalize(image(images), dim=-1), F.normalize(text(tokens).mean(1), dim=-1)
        scores = a @ b.t() * temperature.exp()
        return F.cross_entropy(scores, torch.arange(4)) + F.cross_entropy(scores.t(), torch.arange(4))

    tokens = torch.randint(32, (4, 6))
    return [*train(nn.ModuleList([image, text]), compile_(loss), rows(4, 3, 15, 15), tokens), *numbers(temperature)]


@step
def language_model_with_cache(compile_: Compile) -> list[Tensor]:
    """A cache of keys and values is returned beside the loss, and fed to a second call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=True)).train()
    tokens, compiled = torch.randint(32, (2, 6)), compile_(model)
    first = compiled(input_ids=tokens, labels=tokens)
    second = compiled(input_ids=tokens, labels=tokens, past_key_values=first.past_key_values)
    (first.loss + second.loss).backward()
    return numbers(first.loss, second.loss, model)


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

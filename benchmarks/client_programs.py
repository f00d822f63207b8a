"""Training programs of other libraries, each as that library's users write it, with tiny models of random weights.

A program takes the name of a backend and trains three steps by SGD. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
BATCH, TOKENS, VOCABULARY = 8, 32, 128
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS,
}  # fmt: skip
"""Sizes of a language model of transformers."""


@dataclass(frozen=True)
class Client:
    """A program, the packages that it imports, and what it does other than to name the backend."""

    run: Callable[[str], None]
    packages: tuple[str, ...]
    needs: str = "unchanged"


CLIENTS: dict[str, Client] = {}


def client(name: str, *packages: str, needs: str = "unchanged") -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Returns a decorator that adds a program to ``CLIENTS``."""

    def add(run: Callable[[str], None]) -> Callable[[str], None]:
        CLIENTS[name] = Client(run, packages, needs)
        return run

    return add


def train(model: nn.Module, loss: Callable[..., Tensor], *batch: Any) -> None:
    """Trains on one batch. ``loss`` takes the batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape or (BATCH, TOKENS))


def text_batch() -> dict[str, Tensor]:
    return {"input_ids": (ids := tokens()), "labels": ids}


def transformers_model(name: str, **settings: Any) -> Any:
    """Returns the model of transformers called ``name``; its configuration has the same name with "Config"."""
    transformers = importlib.import_module("transformers")
    prefix = name.split("For")[0].removesuffix("Model")
    return getattr(transformers, name)(getattr(transformers, f"{prefix}Config")(**settings))


def train_transformers(backend: str, model: Any, batch: Mapping[str, Tensor]) -> None:
    """Compiles the model in place and trains it on the loss that it returns."""
    model.train()
    model.compile(backend=backend)
    train(model, lambda: model(**batch).loss)


@client("transformers, Llama", "transformers")
def llama(backend: str) -> None:
    train_transformers(backend, transformers_model("LlamaForCausalLM", **TEXT), text_batch())


@client("transformers, Llama with checkpointed layers", "transformers")
def llama_with_checkpoints(backend: str) -> None:
    model = transformers_model("LlamaForCausalLM", **TEXT)
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # of new and of earlier transformers
    next(getattr(model, name) for name in names if hasattr(model, name))()
    train_transformers(backend, model, text_batch())


@client("transformers, Gemma 2", "transformers")
def gemma(backend: str) -> None:
    train_transformers(backend, transformers_model("Gemma2ForCausalLM", **TEXT, head_dim=16), text_batch())


@client("transformers, Mixtral", "transformers")
def mixtral(backend: str) -> None:
    model = transformers_model("MixtralForCausalLM", **TEXT, num_local_experts=4)
    train_transformers(backend, model, text_batch())


@client("transformers, BERT with a mask", "transformers")
def bert(backend: str) -> None:
    sizes = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    batch = text_batch() | {"attention_mask": (torch.arange(TOKENS) < torch.randint(8, TOKENS, (BATCH, 1))).long()}
    train_transformers(backend, transformers_model("BertForMaskedLM", **sizes), batch)


@client("transformers, T5", "transformers")
def t5(backend: str) -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    model = transformers_model("T5ForConditionalGeneration", **sizes, decoder_start_token_id=0)
    train_transformers(backend, model, text_batch())


@client("transformers, Whisper", "transformers")
def whisper(backend: str) -> None:
    layers = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in (
        ("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    sizes = {"d_model": 64, "vocab_size": VOCABULARY, "num_mel_bins": 16, "max_source_positions": 32}
    model = transformers_model("WhisperForConditionalGeneration", **layers, **special, **sizes, max_target_positions=TOKENS)
    train_transformers(backend, model, {"input_features": torch.randn(BATCH, 16, 64), "labels": tokens()})


@client("transformers, Wav2Vec2", "transformers")
def wav2vec2(backend: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 32}
    convolutions = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
    model = transformers_model("Wav2Vec2ForCTC", **sizes, **convolutions, **positions)
    train_transformers(backend, model, {"input_values": torch.randn(4, 2000), "labels": torch.randint(1, 32, (4, 8))})


@client("transformers, ViT", "transformers")
def vit(backend: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers_model("ViTForImageClassification", **sizes, image_size=32, patch_size=8)
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(2, (BATCH,))}
    train_transformers(backend, model, batch)


@client("transformers, Mamba 2", "transformers")
def mamba(backend: str) -> None:
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16}
    model = transformers_model("Mamba2ForCausalLM", **sizes, vocab_size=VOCABULARY, num_hidden_layers=2)
    train_transformers(backend, model, text_batch())


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows of token ids, which are the labels too."""

    def __init__(self) -> None:
        self.ids = tokens(STEPS * BATCH, TOKENS)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@contextlib.contextmanager
def trainer_settings(backend: str) -> Iterator[dict[str, Any]]:
    """Yields arguments of Hugging Face's Trainer, and those of TRL that derive from it."""
    from autoremat.tools import integrations

    integrations.accept_in_accelerate()
    with tempfile.TemporaryDirectory() as folder:
        yield {
            "output_dir": folder, "torch_compile": True, "torch_compile_backend": backend, "max_steps": STEPS, "optim": "sgd",
            "learning_rate": 0.01, "per_device_train_batch_size": BATCH, "use_cpu": True, "report_to": [],
            "save_strategy": "no", "disable_tqdm": True, "bf16": False, "dataloader_pin_memory": False,
        }  # fmt: skip


@client("Hugging Face Trainer", "transformers", "accelerate", needs="`accept_in_accelerate()`")
def trainer(backend: str) -> None:
    from transformers import Trainer, TrainingArguments

    with trainer_settings(backend) as settings:
        model = transformers_model("LlamaForCausalLM", **TEXT)
        Trainer(model=model, args=TrainingArguments(**settings), train_dataset=Rows()).train()


@client("Accelerate", "accelerate", "transformers", needs="`accept_in_accelerate()`")
def accelerate(backend: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from autoremat.tools import integrations

    integrations.accept_in_accelerate()
    AcceleratorState._reset_state(reset_partial_state=True)  # which keeps the backend of an earlier program of this process
    accelerator = Accelerator(cpu=True, dynamo_backend=backend)
    model = transformers_model("LlamaForCausalLM", **TEXT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


@client("Lightning", "lightning", "transformers")
def lightning(backend: str) -> None:
    import lightning

    class LanguageModel(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = transformers_model("LlamaForCausalLM", **TEXT)
            self.network.compile(backend=backend)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Any:
            return self.network(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    run = lightning.Trainer(max_steps=STEPS, accelerator="cpu", **quiet)
    run.fit(LanguageModel(), torch.utils.data.DataLoader(Rows(), batch_size=BATCH))


@client("PEFT, LoRA", "peft", "transformers")
def lora(backend: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(transformers_model("LlamaForCausalLM", **TEXT), LoraConfig(r=4, task_type="CAUSAL_LM"))
    train_transformers(backend, model, text_batch())


def tokenizer() -> Any:
    """Returns a tokenizer of numbers, for trainers that do not work without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(index): index for index in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


@client("TRL, SFTTrainer with LoRA", "trl", "peft", "transformers", needs="`accept_in_accelerate()`")
def sft(backend: str) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"input_ids": Rows().ids.tolist()})
    with trainer_settings(backend) as settings:
        arguments = SFTConfig(**settings, max_length=TOKENS)
        model = transformers_model("LlamaForCausalLM", **TEXT)
        adapters = LoraConfig(r=4, task_type="CAUSAL_LM")
        SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer(), peft_config=adapters).train()


@client("TRL, DPOTrainer", "trl", "transformers", needs="`accept_in_accelerate()`")
def dpo(backend: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def texts(length: int) -> list[str]:
        return [" ".join(map(str, row)) for row in tokens(STEPS * BATCH, length).tolist()]

    rows = Dataset.from_dict({"prompt": texts(8), "chosen": texts(16), "rejected": texts(16)})
    with trainer_settings(backend) as settings:
        model, reference = (transformers_model("LlamaForCausalLM", **TEXT) for _ in range(2))
        arguments = DPOConfig(**settings, max_length=TOKENS)
        DPOTrainer(model, reference, arguments, train_dataset=rows, processing_class=tokenizer()).train()


@client("diffusers, UNet2DModel", "diffusers")
def unet(backend: str) -> None:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    channels = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}
    model = UNet2DModel(sample_size=16, **blocks, **channels)
    model.compile(backend=backend)
    images, times = torch.randn(4, 3, 16, 16), torch.arange(4)
    train(model, lambda: model(images, times).sample.square().mean())


@client("diffusers, Flux with blocks compiled one by one", "diffusers")
def flux(backend: str) -> None:
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
    model = FluxTransformer2DModel(
        in_channels=16, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6), **sizes
    )
    model.compile_repeated_blocks(backend=backend)
    inputs = {
        "hidden_states": torch.randn(4, 64, 16), "encoder_hidden_states": torch.randn(4, 16, 32),
        "pooled_projections": torch.randn(4, 32), "timestep": torch.rand(4), "img_ids": torch.randn(64, 3),
        "txt_ids": torch.zeros(16, 3),
    }  # fmt: skip
    train(model, lambda: model(**inputs).sample.square().mean())


@client("x-transformers", "x_transformers")
def x_transformers(backend: str) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_flash=True, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=layers))
    model.compile(backend=backend)
    train(model, model, tokens())


@client("PyG, two kinds of layers", "torch_geometric")
def graph_network(backend: str) -> None:
    from torch_geometric.nn import GATConv, GCNConv, Sequential

    layers = [(GCNConv(16, 64), "x, edges -> x"), nn.ReLU(), (GATConv(64, 16, heads=4), "x, edges -> x"), nn.Linear(64, 10)]
    model = Sequential("x, edges", layers)
    model.compile(backend=backend)
    nodes, edges, labels = torch.randn(256, 16), torch.randint(256, (2, 2048)), torch.randint(10, (256,))
    train(model, lambda: nn.functional.cross_entropy(model(nodes, edges), labels))


@client("timm, ConvNeXt", "timm", "torchvision")
def convnext(backend: str) -> None:
    import timm

    model = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), num_classes=10)
    model.compile(backend=backend)
    images, labels = torch.randn(BATCH, 3, 64, 64), torch.randint(10, (BATCH,))
    train(model, lambda: nn.functional.cross_entropy(model(images), labels))


@client("litgpt, GPT", "litgpt")
def litgpt(backend: str) -> None:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    model = GPT(Config(block_size=TOKENS, padded_vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=64))
    compiled, ids = torch.compile(model, backend=backend), tokens()
    train(model, lambda: chunked_cross_entropy(compiled(ids)[:, :-1], ids[:, 1:], chunk_size=0))


@client("torchtune, Llama 3 with blocks compiled one by one", "torchtune")
def torchtune(backend: str) -> None:
    from torchtune.models.llama3 import llama3
    from torchtune.training import compile_model

    sizes = {
        "vocab_size": VOCABULARY,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 64,
        "max_seq_len": TOKENS,
    }
    model, ids = llama3(**sizes), tokens()
    for module in model.layers:
        module.compile(backend=backend)
    assert callable(compile_model)
    train(model, lambda: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


@client("torchtitan, its apply_compile", "torchtitan", needs="`as_inductor()` where a model has FlexAttention")
def torchtitan(backend: str) -> None:
    from types import SimpleNamespace

    from torchtitan.config import CompileConfig
    from torchtitan.distributed.compile import apply_compile

    from autoremat.tools import integrations

    layers = {str(index): nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for index in range(2)}
    model = nn.Module()
    model.layers = nn.ModuleDict(layers)
    settings = CompileConfig(enable=True, backend="inductor")
    with integrations.as_inductor() if backend == "autoremat" else contextlib.nullcontext():
        apply_compile(model, compile_config=settings, parallel_dims=SimpleNamespace(tp_enabled=False))
    x = torch.randn(BATCH, TOKENS, 64)

    def loss() -> Tensor:
        hidden = x
        for layer in layers.values():
            hidden = layer(hidden)
        return hidden.square().mean()

    train(model, loss)

"""Hugging Face's Trainer: the name of the backend has the budget, as bytes ("autoremat:6GiB") or a share.

It needs no `activation_checkpointing` (formerly `gradient_checkpointing`) and no `use_cache=False`.
"""

import tempfile

from tiny_model import Tokens, tiny_llama
from transformers import Trainer, TrainingArguments

import autoremat

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        torch_compile_backend="autoremat:0.6",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,  # leave this out where there is an accelerator
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=Tokens())
    print(f"loss {trainer.train().training_loss:.4f}")
print(autoremat.reports()[-1].summary())

"""Hugging Face's Trainer, which passes only the backend's name.

It needs no `activation_checkpointing` (formerly `gradient_checkpointing`) and no `use_cache=False`.

The budget comes from `autoremat.configure`, or from AUTOREMAT_MEMORY_BUDGET.
"""

import tempfile

from tiny_model import Tokens, tiny_llama
from transformers import Trainer, TrainingArguments

import autoremat
from autoremat.tools import integrations

autoremat.configure(memory_budget=0.6)
integrations.accept_in_accelerate()  # which otherwise refuses the names of backends that it does not know
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        torch_compile=True,
        torch_compile_backend="autoremat",
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

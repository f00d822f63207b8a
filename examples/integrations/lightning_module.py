"""PyTorch Lightning: compile the module, and train as usual."""

import lightning
import torch
from tiny_model import Tokens, tiny_llama

import autoremat


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = tiny_llama()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.network(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    max_steps=2,
    accumulate_grad_batches=2,
    accelerator="cpu",  # leave this out where there is an accelerator
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = torch.compile(LanguageModel(), backend="autoremat", options={"memory_budget": 0.6})
trainer.fit(model, torch.utils.data.DataLoader(Tokens(), batch_size=4))
print(autoremat.reports()[-1].summary())

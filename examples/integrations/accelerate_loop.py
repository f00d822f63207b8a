"""Accelerate compiles the model that it prepares, with the options of its plugin."""

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from tiny_model import Tokens, tiny_llama

import autoremat

plugin = TorchDynamoPlugin(backend="autoremat", options={"memory_budget": 0.6})
accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, gradient_accumulation_steps=2)
model = tiny_llama()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Tokens(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
print(autoremat.reports()[-1].summary())

"""A plain training loop with bf16 autocast, gradient accumulation and clipping. The loop itself stays unchanged."""

import torch
from tiny_model import Tokens, tiny_llama

import autoremat

MICRO_BATCHES, STEPS = 2, 2

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
compiled = torch.compile(lambda batch: model(**batch).loss, backend="autoremat", options={"memory_budget": 0.6})
model.train()  # before or after compiling: the order does not matter

batches = iter(torch.utils.data.DataLoader(Tokens(), batch_size=4))
for step in range(STEPS):
    optimizer.zero_grad(set_to_none=True)
    for _ in range(MICRO_BATCHES):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(next(batches)) / MICRO_BATCHES
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {loss.item() * MICRO_BATCHES:.4f}")
print(autoremat.reports()[-1].summary())

"""LoRA with PEFT. Frozen weights have no gradients, so nothing is saved for them.

Recomputation needs neither `enable_input_require_grads` nor `prepare_model_for_kbit_training`.
"""

import torch
from peft import LoraConfig, get_peft_model
from tiny_model import Tokens, tiny_llama

import autoremat

model = get_peft_model(tiny_llama(), LoraConfig(r=4, task_type="CAUSAL_LM"))
compiled = torch.compile(lambda batch: model(**batch).loss, backend="autoremat", options={"memory_budget": 0.6})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for batch in torch.utils.data.DataLoader(Tokens(), batch_size=8):
    optimizer.zero_grad(set_to_none=True)
    loss = compiled(batch)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
print(autoremat.reports()[-1].summary())

"""A tiny language model in the style of nanoGPT: learning rate by hand, context for autocast, DDP if started so."""
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

batch_size = 8
block_size = 16
max_lr, min_lr, warmup = 1e-2, 1e-3, 4
dtype = "bfloat16"


class Text(Dataset):
    def __init__(self, text):
        self.ids = torch.tensor([ord(c) % 64 for c in text])

    def __len__(self):
        return (len(self.ids) - 1) // block_size

    def __getitem__(self, i):
        chunk = self.ids[i * block_size : (i + 1) * block_size + 1]
        return {"input_ids": chunk[:-1], "labels": chunk[1:]}


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids, labels=None):
        h = torch.cumsum(self.embed(input_ids), dim=1) / block_size
        logits = self.head(torch.tanh(self.mix(h)))
        loss = F.cross_entropy(logits.view(-1, 64).float(), labels.reshape(-1)) if labels is not None else None
        return logits, loss


def get_lr(it, total):
    if it < warmup:
        return max_lr * (it + 1) / warmup
    ratio = (it - warmup) / (total - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (max_lr - min_lr)


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    master_process = ddp_rank == 0
else:
    master_process = True

torch.manual_seed(1337)
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16)
dataset = Text("the quick brown fox jumps over the lazy dog. " * 23)
sampler = DistributedSampler(dataset, shuffle=False) if ddp else None
loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)
model = TinyGPT()
raw_model = model
optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)

iter_num = 0
epochs = 4
for epoch in range(epochs):
    for batch in loader:
        lr = get_lr(iter_num, epochs * len(loader))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        with ctx:
            logits, loss = model(batch["input_ids"], labels=batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % 5 == 0 and master_process:
            print(f"iter {iter_num}: loss {loss.item():.4f}, lr {lr:.5f}")
        iter_num += 1

items = [dataset[i] for i in range(len(dataset))]
with torch.no_grad():
    _, final = raw_model(torch.stack([b["input_ids"] for b in items]), torch.stack([b["labels"] for b in items]))
if master_process:
    print(f"final loss {final.item():.9f}")
if ddp:
    dist.destroy_process_group()

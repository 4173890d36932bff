"""A classifier with DistributedDataParallel, started with torchrun."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    g = torch.Generator().manual_seed(1)
    points = torch.randn(256, 12, generator=g)
    train_set = TensorDataset(points, (points.sum(1) > 0).long())
    # every process reads its own part
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=False)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, num_workers=0, pin_memory=False)

    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DDP(model, device_ids=[rank] if torch.cuda.is_available() else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(loader))

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if rank == 0 and i % 4 == 0:
                print(f"epoch {epoch} batch {i}/{len(loader)}: {loss.item():.4f}")
        dist.barrier()

    if rank == 0:
        os.makedirs("out", exist_ok=True)
        torch.save(model.module.state_dict(), "out/ddp.pt")
    model.eval()
    with torch.no_grad():
        final = F.cross_entropy(model(train_set.tensors[0].to(device)), train_set.tensors[1].to(device))
    if rank == 0:
        print(f"final loss {final.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

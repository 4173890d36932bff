"""DDP with accumulation: no_sync for all but the last batch."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup_distributed():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    return rank, local_rank, world_size


def train_one_epoch(model, criterion, optimizer, loader, accum_steps):
    total, count = 0.0, 0
    for i, (x, y) in enumerate(loader):
        if (i + 1) % accum_steps != 0:
            with model.no_sync():
                loss = criterion(model(x), y) / accum_steps
                loss.backward()
        else:
            loss = criterion(model(x), y) / accum_steps
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item() * accum_steps
        count += 1
    return total / count


def main():
    rank, local_rank, world_size = setup_distributed()
    torch.manual_seed(3)
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(6))
    dataset = TensorDataset(x, x.abs().sum(1, keepdim=True) / 10)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    criterion = nn.L1Loss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    accum_steps = 4
    for epoch in range(3):
        sampler.set_epoch(epoch)
        average = train_one_epoch(model, criterion, optimizer, loader, accum_steps)
        if rank == 0:
            print(f"epoch {epoch}: average {average:.5f}")
    with torch.no_grad():
        final = criterion(model.module(x), dataset.tensors[1]).item()
    if rank == 0:
        print(f"final loss {final:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

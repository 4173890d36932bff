"""A small regression with mp.spawn, as in the first tutorial of DDP."""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, n):
        self.x = torch.linspace(-3, 3, n).unsqueeze(1)
        self.y = torch.sin(self.x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(1, 24)
        self.act = nn.Tanh()
        self.net2 = nn.Linear(24, 1)

    def forward(self, x):
        return self.net2(self.act(self.net1(x)))


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("TEST_PORT", "29531")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(data.x), data.y).item()


def demo(rank, world_size, epochs):
    print(f"Running DDP example on rank {rank}.")
    setup(rank, world_size)
    torch.manual_seed(42)

    data = Waves(192)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01, momentum=0.9)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: {loss.item():.5f}")
    if rank == 0:
        print(f"final loss {evaluate(ddp_model.module, data):.9f}")
    cleanup()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(demo, args=(world_size, 6), nprocs=world_size, join=True)

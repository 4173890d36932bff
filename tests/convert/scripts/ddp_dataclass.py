"""A small convolutional net with DDP; the arguments are in a dataclass."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    batch_size: int = 16
    epochs: int = 3
    lr: float = 0.05


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def train(cfg: Config):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.rand(128, 1, 6, 6, generator=torch.Generator().manual_seed(5))
    train_ds = TensorDataset(images, (images.mean((1, 2, 3)) * 1000).long() % 3)
    sampler = DistributedSampler(train_ds, shuffle=False)
    train_loader = DataLoader(train_ds, cfg.batch_size, sampler=sampler)
    net = Net()
    net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2])
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for images_, labels in train_loader:
            loss = F.cross_entropy(net(images_), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    net.eval()
    with torch.no_grad():
        final = F.cross_entropy(net.module(images), train_ds.tensors[1]).item()
    if rank == 0:
        print(f"final loss {final:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Config())

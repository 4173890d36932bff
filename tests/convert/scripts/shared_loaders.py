"""One function makes the loaders for training and validation, and helpers ask for the rank."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_rank():
    if not is_dist_avail_and_initialized():
        return 0
    return dist.get_rank()


def is_main_process():
    return get_rank() == 0


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Spirals(Dataset):
    def __init__(self, count, seed):
        rng = np.random.RandomState(seed)
        turns = rng.rand(count) * 3 + 0.3
        kinds = np.arange(count) % 2
        angles = turns * 2 + kinds * np.pi
        self.x = torch.tensor(np.stack([turns * np.cos(angles), turns * np.sin(angles)], 1), dtype=torch.float32)
        self.y = torch.tensor(kinds)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build_loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, shuffle=False) if is_dist_avail_and_initialized() else None
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


class Runner:
    def __init__(self, hparams):
        self.hparams = hparams
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.train_loader = build_loader(Spirals(192, 0), hparams["batch_size"])
        self.valid_loader = build_loader(Spirals(64, 1), hparams["batch_size"])
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(self.device)
        self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=hparams["lr"], weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=hparams["lr"], epochs=hparams["epochs"], steps_per_epoch=len(self.train_loader)
        )
        self.criterion = nn.CrossEntropyLoss()

    def validate(self):
        self.model.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for inputs, targets in self.valid_loader:
                outputs = self.model(inputs.to(self.device))
                total += torch.tensor([self.criterion(outputs, targets).item() * len(targets), float(len(targets))])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def fit(self):
        for epoch in range(1, self.hparams["epochs"] + 1):
            self.train_loader.sampler.set_epoch(epoch)
            self.model.train()
            meter = 0.0
            for i, (inputs, targets) in enumerate(self.train_loader):
                inputs = inputs.to(self.device)
                targets = targets.to(self.device)
                outputs = self.model(inputs)
                loss = self.criterion(outputs, targets)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.hparams["clip"])
                self.optimizer.step()
                self.scheduler.step()
                meter += loss.item()
                if i == 0 and is_main_process():
                    print(f"epoch {epoch} lr {self.scheduler.get_last_lr()[0]:.5f}")
            valid = self.validate()
            if is_main_process():
                print(f"epoch {epoch}: train {meter / len(self.train_loader):.4f}, final loss {valid:.9f}")
            save_on_master(self.model.module.state_dict(), "last.pt")


def main():
    dist.init_process_group("gloo")
    seed_everything(4)
    hparams = {"batch_size": 12, "epochs": 3, "lr": 2e-2, "clip": 1.0}
    runner = Runner(hparams)
    try:
        runner.fit()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

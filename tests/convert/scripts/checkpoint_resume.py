"""Checkpoints of model, optimizer and schedule, and a resume by hand."""
import argparse
import os
import time

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data-size", type=int, default=128)
    p.add_argument("-b", "--batch_size", type=int, default=32)
    p.add_argument("--num-epochs", type=int, default=4)
    p.add_argument("--checkpoint", default="checkpoint.pth")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--max-norm", type=float, default=5.0)
    return p.parse_args()


def save_checkpoint(path, model, optimizer, scheduler, epoch):
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, path)


def main():
    args = parse_args()
    torch.manual_seed(31)
    g = torch.Generator().manual_seed(32)
    xs = torch.rand(args.data_size, 4, generator=g)
    ys = (xs**2).sum(1, keepdim=True)
    dataset = TensorDataset(xs, ys)
    dataloader = DataLoader(dataset, batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    start_epoch = 0
    if args.resume and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, args.num_epochs):
        started = time.time()
        losses = []
        for xb, yb in dataloader:
            pred = model(xb)
            loss = ((pred - yb) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            if args.max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        print(f"epoch {epoch}: {sum(losses) / len(losses):.6f} in {time.time() - started:.1f} s")
        save_checkpoint(args.checkpoint, model, optimizer, scheduler, epoch)
    print(f"final loss {sum(losses) / len(losses):.9f}")


if __name__ == "__main__":
    main()

"""DDP with three loaders; sums over all processes by all_reduce and all_gather."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main():
    return dist.get_rank() == 0


def make_loader(dataset, batch_size, train):
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False))


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    model.eval()
    stats = torch.zeros(3, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = model(x)
        stats[0] += criterion(out, y) * len(y)
        stats[1] += (out.argmax(1) == y).sum()
        stats[2] += len(y)
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group("gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0 + dist.get_rank() * 0)
    x = torch.randn(384, 10, generator=torch.Generator().manual_seed(17))
    y = (x[:, :3].sum(1) > x[:, 3:6].sum(1)).long()
    train_set, valid_set, test_set = (
        TensorDataset(x[:256], y[:256]),
        TensorDataset(x[256:320], y[256:320]),
        TensorDataset(x[320:], y[320:]),
    )
    train_loader = make_loader(train_set, 16, train=True)
    valid_loader = DataLoader(valid_set, batch_size=16, sampler=DistributedSampler(valid_set, shuffle=False))
    test_loader = DataLoader(test_set, batch_size=16, sampler=DistributedSampler(test_set, shuffle=False))
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 2)).to(device)
    model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    best = 0.0
    for epoch in range(3):
        train_loader.sampler.set_epoch(epoch)
        model.train()
        for x_, y_ in train_loader:
            x_, y_ = x_.to(device), y_.to(device)
            loss = criterion(model(x_), y_)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        valid_loss, accuracy = evaluate(model, valid_loader, criterion, device)
        reduced = loss.detach().clone()
        dist.all_reduce(reduced)
        reduced /= dist.get_world_size()
        if is_main():
            print(f"epoch {epoch}: train {reduced.item():.4f} valid {valid_loss:.4f} accuracy {accuracy:.3f}")
            if accuracy > best:
                torch.save(model.module.state_dict(), "best.pt")
        best = max(best, accuracy)
    test_loss, _ = evaluate(model, test_loader, criterion, device)
    if is_main():
        print(f"final loss {test_loss:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

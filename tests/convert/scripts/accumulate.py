"""Accumulation in one process, with the last batches of an epoch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accumulation_steps = 4


def get_data():
    g = torch.Generator().manual_seed(21)
    x = torch.randn(192, 10, generator=g)
    w = torch.randn(10, 3, generator=g)
    return x, (x @ w).argmax(1)


if __name__ == "__main__":
    torch.manual_seed(12)
    x, y = get_data()
    train_dataset = TensorDataset(x, y)
    train_loader = DataLoader(train_dataset, batch_size=12, shuffle=False)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(4):
        epoch_loss = 0.0
        opt.zero_grad()
        for i, batch in enumerate(train_loader):
            inputs, labels = batch
            out = net(inputs)
            loss = loss_fn(out, labels)
            loss = loss / accumulation_steps
            loss.backward()
            epoch_loss += loss.item() * accumulation_steps
            if (i + 1) % accumulation_steps == 0 or (i + 1) == len(train_loader):
                nn.utils.clip_grad_norm_(net.parameters(), max_norm=2.0)
                opt.step()
                opt.zero_grad()
        print(f"epoch {epoch} average {epoch_loss / len(train_loader):.6f}")
    print(f"final loss {epoch_loss / len(train_loader):.9f}")

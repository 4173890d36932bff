"""ReduceLROnPlateau on a validation loss, early stopping, the best weights kept."""
import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split


def validate(model, loader, criterion):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(criterion(model(x), y).item())
    return sum(losses) / len(losses)


def fit(model, train_loader, val_loader, epochs=8, patience=3):
    criterion = nn.HuberLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    best, bad, best_state = float("inf"), 0, None
    for epoch in range(epochs):
        model.train()
        train_loss, n = 0.0, 0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * x.size(0)
            n += x.size(0)
        val_loss = validate(model, val_loader, criterion)
        scheduler.step(val_loss)
        print(f"epoch {epoch}: train {train_loss / n:.6f} val {val_loss:.6f} lr {optimizer.param_groups[0]['lr']:.4f}")
        if val_loss < best:
            best, bad, best_state = val_loss, 0, copy.deepcopy(model.state_dict())
        else:
            bad += 1
            if bad >= patience:
                print("stop early")
                break
    model.load_state_dict(best_state)
    return validate(model, val_loader, criterion)


def main():
    torch.manual_seed(2)
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(3))
    y = torch.sin(x.sum(1, keepdim=True))
    full = TensorDataset(x, y)
    train_set, val_set = random_split(full, [180, 60], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, batch_size=36, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=60)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    print(f"final loss {fit(net, train_loader, val_loader):.9f}")


if __name__ == "__main__":
    main()

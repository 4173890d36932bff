"""Automatic mixed precision with a GradScaler, which is off on the CPU."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    use_amp = True
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(13))
    y = x[:, :4].argmax(1)
    train_ds = TensorDataset(x, y)
    train_dl = DataLoader(train_ds, batch_size=64)
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    for epoch in range(3):
        for xb, yb in train_dl:
            xb = xb.to(device)
            yb = yb.to(device)
            with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
                logits = model(xb)
                loss = F.cross_entropy(logits.float(), yb)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(f"epoch {epoch} grad norm {grad_norm:.4f}")
        checkpoint = {"model": model.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch}
        torch.save(checkpoint, "amp.pt")

    with torch.no_grad():
        final = F.cross_entropy(model(x.to(device)), y.to(device))
    print(f"final loss {final.item():.9f}")


if __name__ == "__main__":
    main()

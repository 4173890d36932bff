"""The smallest loop of Accelerate, with evaluation by gather_for_metrics."""
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    device = accelerator.device
    torch.manual_seed(0)
    points = torch.randn(192, 10, generator=torch.Generator().manual_seed(1))
    labels = (points.sum(1) > 0).long()
    train_dataset = TensorDataset(points[:128], labels[:128])
    eval_dataset = TensorDataset(points[128:], labels[128:])
    train_dataloader = DataLoader(train_dataset, shuffle=False, batch_size=16)
    eval_dataloader = DataLoader(eval_dataset, batch_size=16)

    model = torch.nn.Sequential(torch.nn.Linear(10, 24), torch.nn.GELU(), torch.nn.Linear(24, 2)).to(device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    for epoch in range(3):
        model.train()
        for batch in train_dataloader:
            inputs, targets = batch
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in eval_dataloader:
            inputs, targets = batch
            with torch.no_grad():
                outputs = model(inputs)
            each = F.cross_entropy(outputs, targets, reduction="none")
            losses.append(accelerator.gather_for_metrics(each))
        accelerator.print(f"epoch {epoch}: final loss {torch.cat(losses).mean().item():.9f}")


if __name__ == "__main__":
    main()

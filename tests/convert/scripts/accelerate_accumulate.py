"""Accelerate with accumulation, clipping, a schedule, trackers and saved states."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=4)
    lr, num_epochs, seed, batch_size = config["lr"], int(config["num_epochs"]), int(config["seed"]), config["batch_size"]
    set_seed(seed)
    points = torch.randn(256, 6, generator=torch.Generator().manual_seed(9))
    train_set = TensorDataset(points, points.prod(1, keepdim=True).tanh())
    train_dataloader = DataLoader(train_set, batch_size=batch_size, shuffle=False)
    model = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step = 0
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0
        for step, (x, y) in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                loss = criterion(model(x), y)
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
        accelerator.print(f"epoch {epoch}: {total_loss / len(train_dataloader):.6f}")
        accelerator.save_state(f"state_{epoch}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.eval()
    with torch.no_grad():
        final = criterion(unwrapped(points), train_set.tensors[1]).item()
    if accelerator.is_main_process:
        print(f"final loss {final:.9f}")
        accelerator.save(unwrapped.state_dict(), "model.pt")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--cpu", type=bool, default=True, help="If passed, will train on the CPU.")
    args = parser.parse_args()
    config = {"lr": 1e-2, "num_epochs": 3, "seed": 42, "batch_size": 8}
    training_function(config, args)


if __name__ == "__main__":
    main()

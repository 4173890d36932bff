"""One process; functions that use global variables, as in the first example for MNIST."""
from __future__ import print_function

import torch
import torch.nn.functional as F
import torch.optim as optim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3

torch.manual_seed(11)
x = torch.randn(320, 8, generator=torch.Generator().manual_seed(4))
y = (x[:, 0] * x[:, 1] > 0).long()
train_loader = DataLoader(TensorDataset(x[:256], y[:256]), batch_size=64, shuffle=False)
test_loader = DataLoader(TensorDataset(x[256:], y[256:]), batch_size=64)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(8, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(
                "Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(
                    epoch, batch_idx * len(data), len(train_loader.dataset), 100.0 * batch_idx / len(train_loader), loss.item()
                )
            )


def test():
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print("\nTest set: Accuracy: {}/{}, final loss {:.9f}\n".format(correct, len(test_loader.dataset), test_loss))


for epoch in range(1, EPOCHS + 1):
    train(epoch)
    test()

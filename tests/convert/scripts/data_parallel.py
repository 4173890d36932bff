"""DataParallel at the top level of a script, as in the oldest tutorial."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

input_size = 5
output_size = 2
batch_size = 30
data_size = 120

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(7)


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size, generator=torch.Generator().manual_seed(2))

    def __getitem__(self, index):
        return self.data[index], self.data[index, :2] * 2 - 1

    def __len__(self):
        return self.len


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input):
        return self.fc(input)


rand_loader = DataLoader(dataset=RandomDataset(input_size, data_size), batch_size=batch_size)
model = Model(input_size, output_size)
if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
    model = nn.DataParallel(model)
model.to(device)

criterion = nn.SmoothL1Loss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    running = 0.0
    for input, target in rand_loader:
        input, target = input.to(device), target.to(device)
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch}: {running / len(rand_loader):.5f}")
print(f"final loss {running / len(rand_loader):.9f}")

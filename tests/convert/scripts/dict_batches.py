"""A bag of words with a collate function and dicts as batches; the loss is a sum over the batch."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

CONFIG = {"batch_size": 20, "epochs": 4, "lr": 2e-3, "log_every": 3}

SENTENCES = ["good fine great", "bad awful", "great movie", "awful bad movie", "fine", "bad"] * 20


class Reviews(Dataset):
    def __init__(self, sentences):
        words = sorted({w for s in sentences for w in s.split()})
        self.vocab = {w: i + 1 for i, w in enumerate(words)}
        self.items = [([self.vocab[w] for w in s.split()], float("bad" in s or "awful" in s)) for s in sentences]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(samples):
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, (each, _) in enumerate(samples):
        ids[row, : len(each)] = torch.tensor(each)
    return {"ids": ids, "label": torch.tensor([label for _, label in samples])}


class BagOfWords(nn.Module):
    def __init__(self, vocab_size, dim=12):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.out = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.out(self.embedding(ids).sum(1)).squeeze(1)


def main(config):
    torch.manual_seed(23)
    dataset = Reviews(SENTENCES)
    loader = DataLoader(dataset, batch_size=config["batch_size"], shuffle=False, collate_fn=collate)
    model = BagOfWords(len(dataset.vocab) + 1)
    criterion = nn.BCEWithLogitsLoss(reduction="sum")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config["lr"])
    global_step = 0
    for epoch in range(config["epochs"]):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            logits = model(batch["ids"])
            loss = criterion(logits, batch["label"])
            loss.backward()
            optimizer.step()
            global_step += 1
            if global_step % config["log_every"] == 0:
                print(f"step {step} ({global_step}): {loss.item():.5f}")
    batch = collate([dataset[i] for i in range(len(dataset))])
    with torch.no_grad():
        print(f"final loss {criterion(model(batch['ids']), batch['label']).item() / len(dataset):.9f}")


if __name__ == "__main__":
    main(CONFIG)

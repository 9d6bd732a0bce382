"""A training script as users of torch write it, for torchrun: `torchrun --nproc-per-node 2 torch_script.py CHECKPOINT`.

It imports nothing of funccoll: `test_launchers.py` runs it as it is, and with one import changed.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # the wrapper broadcasts rank 0's parameters
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    random = torch.Generator().manual_seed(5)
    images = torch.randn(161, 1, 8, 8, generator=random)
    labels = (images[:, :, :4].mean((1, 2, 3)) > images[:, :, 4:].mean((1, 2, 3))).long()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y) / 2
            if number % 2 == 0:  # gradients of two batches are accumulated
                with model.no_sync():
                    loss.backward()
                continue
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item()!r}, accuracy {right.item()!r}", flush=True)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

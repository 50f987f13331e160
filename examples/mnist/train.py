"""Train a convolutional net on handwritten digits with DDP or FSDP, and test it after each epoch.

On two ranks of this machine, with the digits of scikit-learn or with MNIST's own files:

    torchrun --nproc_per_node=2 examples/mnist/train.py --sharding-strategy zero3
    torchrun --nproc_per_node=2 examples/mnist/train.py --sharding-strategy ddp --data path/to/mnist --epochs 2
"""

import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # examples/, where common.py is

import shardtrace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import common
from common import add_count
from digits import NOBODY, Digits, WrongData, load_digits
from net import Net


def main() -> None:
    args = parse_args()
    try:
        train_digits, test_digits = load_digits(args.data)
    except WrongData as error:
        sys.exit(f"no digits: {error}")
    if len(train_digits.labels) < args.batch_size:
        sys.exit(f"--batch-size {args.batch_size} is more than the {len(train_digits.labels)} digits to train on")
    device = common.pick_device(args.device)
    with common.process_group(device):
        torch.manual_seed(args.seed)  # every rank builds the same model
        model = Net()
        shardtrace.fsdp(
            model,
            sharding_strategy=args.sharding_strategy,
            bucketing_strategy=args.bucketing_strategy,
            mp_policy=args.mp_policy,
            init_policy=shardtrace.InitPolicy(device=device),
        )
        optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
        schedule = StepLR(optimizer, step_size=1, gamma=args.gamma)
        torch.manual_seed(args.seed + dist.get_rank())  # each rank drops out its own units

        begin = time.perf_counter()
        rows: list[tuple[object, ...]] = [("epoch", "train loss", "test loss", "test accuracy", "seconds")]
        train_loader, test_loader = load(train_digits, args), load_all(test_digits, args)
        for epoch in range(args.epochs):
            train_loss = train(model, optimizer, train_loader, epoch, device)
            test_loss, accuracy = test(model, test_loader, device)
            schedule.step()
            rows.append((epoch + 1, train_loss, test_loss, f"{accuracy:.2%}", f"{time.perf_counter() - begin:.1f}"))
        if common.is_main():
            print(f"\n{common.table(rows)}")
        if args.save_model:
            save(model, args.save_model)


def train(model: Module, optimizer: Optimizer, loader: DataLoader, epoch: int, device: torch.device) -> float:
    """Trains for one epoch. Returns the mean loss over all ranks."""
    model.train()
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
    total = torch.zeros((), device=device)
    for images, labels in common.progress(loader, desc=f"epoch {epoch + 1}", unit="step"):
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return common.mean_over_ranks([total / len(loader)])[0]


@torch.no_grad()
def test(model: Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy on the whole test set. Each rank tests its share, and the counts are summed."""
    model.eval()
    loss, right, seen = (torch.zeros((), device=device) for _ in range(3))
    for images, labels in loader:
        output, labels = model(images.to(device)), labels.to(device)
        loss += F.nll_loss(output, labels, ignore_index=NOBODY, reduction="sum")
        right += (output.argmax(dim=1) == labels).sum()
        seen += (labels != NOBODY).sum()
    loss_sum, n_right, n_seen = common.sum_over_ranks([loss, right, seen])
    return loss_sum / n_seen, n_right / n_seen


# All batches have the same shape, because each shape is traced anew. Training drops the last digits of an epoch if they
# do not fill a batch. The test set is padded with blank images, which are not counted.


def load(digits: Digits, args: Namespace) -> DataLoader:
    """This rank's share of each training batch."""
    dataset = digits.dataset()
    sampler: Sampler[int] = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    return DataLoader(dataset, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)


def load_all(digits: Digits, args: Namespace) -> DataLoader:
    """This rank's share of the test set."""
    dataset = digits.filled_up(args.test_batch_size).dataset()
    sampler: Sampler[int] = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, args.test_batch_size // dist.get_world_size(), sampler=sampler)


def save(model: Module, path: Path) -> None:
    """Writes the whole model. A single process loads it by ``Net().load_state_dict(torch.load(path))``."""
    state = shardtrace.full_state_dict(model, rank0_only=True, cpu=True)  # every rank sends its shards
    if common.is_main():
        torch.save(state, path)
        print(f"\nsaved {path}")


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--data",
        type=common.folder,
        metavar="DIR",
        help="folder of MNIST's idx files, compressed or not; default: scikit-learn's digits",
    )
    add_count(parser, "--epochs", 6, "training epochs")
    add_count(parser, "--batch-size", 64, "digits in a step, over all ranks")
    add_count(parser, "--test-batch-size", 300, "digits in a test batch, over all ranks")
    add("--lr", type=common.non_negative, default=1.0, help="learning rate of Adadelta; default: %(default)s")
    add(
        "--gamma",
        type=common.non_negative,
        default=0.7,
        help="factor by which each epoch multiplies the learning rate; default: %(default)s",
    )
    add_count(parser, "--seed", 1, "seed of the model, the order and the dropout", at_least=0)
    common.add_device(parser)
    add(
        "--save-model",
        type=common.new_file,
        metavar="FILE",
        nargs="?",
        const=Path("mnist.pt"),
        help="save the trained model; default of FILE: mnist.pt",
    )
    common.add_sharding(parser)
    args = parser.parse_args()
    common.check_batch(args.batch_size)
    common.check_batch(args.test_batch_size, "--test-batch-size")
    return args


if __name__ == "__main__":
    main()

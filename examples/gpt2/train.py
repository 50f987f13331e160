"""Train a byte-level GPT-2 on any number of ranks with any strategy, then print a sample of text.

On two ranks of this machine:

    torchrun --nproc_per_node=2 examples/gpt2/train.py --model tiny --sharding-strategy zero3

With checkpoints. If a rank dies, only the steps since the last checkpoint are repeated:

    torchrun --nproc_per_node=2 --max-restarts=3 examples/gpt2/train.py --checkpoint-dir checkpoints --resume
"""

from argparse import Namespace

import shardtrace

from torch.distributed.fsdp import CPUOffloadPolicy

from trainer import OPTIMIZERS, Checkpoints, add_checkpoints, arguments, start


def main() -> None:
    args = parse_args()
    checkpoints = Checkpoints.of(args)
    with start(args) as trainer:
        model = trainer.build_model()
        shardtrace.fsdp(
            model,
            sharding_strategy=args.sharding_strategy,
            bucketing_strategy=args.bucketing_strategy,
            mp_policy=args.mp_policy,
            init_policy=shardtrace.InitPolicy(device=trainer.device),
            offload_policy=CPUOffloadPolicy() if args.cpu_offload else None,
            compile={"executors": args.executors} if args.executors else True,
        )
        optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        trainer.run(model, optimizer, checkpoints=checkpoints)


def parse_args() -> Namespace:
    parser = arguments(__doc__, sharding=True)
    parser.set_defaults(sample_bytes=128)
    what = "Thunder's executors, separated by commas, in order of preference"
    parser.add_argument("--executors", type=lambda names: names.split(","), metavar="NAMES", help=what)
    what = "keep shards, gradients and optimizer state in host memory (CUDA only)"
    parser.add_argument("--cpu-offload", action="store_true", help=what)
    add_checkpoints(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()

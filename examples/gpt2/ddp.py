"""Train GPT-2 with data parallelism: each rank holds the whole model, and gradients are averaged over ranks.

On two ranks of this machine:

    torchrun --nproc_per_node=2 examples/gpt2/ddp.py --model tiny --steps 200
"""

import shardtrace

from trainer import OPTIMIZERS, arguments, start


def main() -> None:
    args = arguments(__doc__).parse_args()
    with start(args) as trainer:
        model = trainer.build_model()
        shardtrace.ddp(model, init_policy=shardtrace.InitPolicy(device=trainer.device))
        optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        trainer.run(model, optimizer)


if __name__ == "__main__":
    main()

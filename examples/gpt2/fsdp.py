"""Train GPT-2 with fully sharded data parallelism (ZeRO-3): each rank holds a slice of every parameter.

On two ranks of this machine:

    torchrun --nproc_per_node=2 examples/gpt2/fsdp.py --model tiny --steps 200
"""

import shardtrace

from trainer import OPTIMIZERS, arguments, start


def main() -> None:
    args = arguments(__doc__).parse_args()
    with start(args) as trainer:
        model = trainer.build_model()
        shardtrace.fsdp(model, sharding_strategy="zero3", init_policy=shardtrace.InitPolicy(device=trainer.device))
        optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        trainer.run(model, optimizer)


if __name__ == "__main__":
    main()

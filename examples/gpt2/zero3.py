"""Train GPT-2 with ZeRO-3 over whole tensors: each parameter has one rank that owns it.

Before use a parameter is broadcast by its owner, and its gradient is reduced to the owner, which alone has optimizer
state for it.

    torchrun --nproc_per_node=2 examples/gpt2/zero3.py --model tiny --steps 200
"""

import shardtrace  # before thunder: makes it importable on the newest torch

import thunder

from trainer import OPTIMIZERS, arguments, start


def main() -> None:
    args = arguments(__doc__).parse_args()
    with start(args) as trainer:
        model = trainer.build_model()
        shardtrace.fsdp(model, sharding_strategy="owner", device=trainer.device)
        cmodel = thunder.jit(model)
        optimizer = OPTIMIZERS[args.optimizer](cmodel.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        trainer.run(cmodel, optimizer)


if __name__ == "__main__":
    main()

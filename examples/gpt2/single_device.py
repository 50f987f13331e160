"""Train GPT-2 on one device with plain thunder.jit: the reference for the other scripts.

In one process:

    python examples/gpt2/single_device.py --model tiny --steps 200
"""

import shardtrace  # noqa: F401  before thunder: makes it importable on the newest torch

import thunder

from trainer import OPTIMIZERS, arguments, start


def main() -> None:
    args = arguments(__doc__).parse_args()
    with start(args, most_ranks=1) as trainer:
        model = trainer.build_model()
        cmodel = thunder.jit(model.to(trainer.device))
        optimizer = OPTIMIZERS[args.optimizer](cmodel.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        trainer.run(cmodel, optimizer)


if __name__ == "__main__":
    main()

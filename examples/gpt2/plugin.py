"""Train GPT-2 with thunder.compile: a recipe of Thunder fuses, a plugin shards.

On two ranks of this machine:

    torchrun --nproc_per_node=2 examples/gpt2/plugin.py --model tiny --steps 200
"""

import shardtrace  # before thunder: makes it importable on the newest torch

import thunder
from thunder.recipes import BaseRecipe

from trainer import OPTIMIZERS, arguments, start


def main() -> None:
    parser = arguments(__doc__, sharding=True)
    parser.add_argument("--fuser", choices=["torch.compile", "nvfuser"], default="torch.compile", help="of the recipe")
    args = parser.parse_args()
    with start(args) as trainer:
        plugin = shardtrace.FSDP(
            sharding_strategy=args.sharding_strategy,
            bucketing_strategy=args.bucketing_strategy,
            mp_policy=args.mp_policy,
            init_policy=shardtrace.InitPolicy(device=trainer.device),
        )
        cmodel = thunder.compile(trainer.build_model(), recipe=BaseRecipe(fuser=args.fuser), plugins=[plugin])
        optimizer = OPTIMIZERS[args.optimizer](cmodel.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        trainer.run(cmodel, optimizer)


if __name__ == "__main__":
    main()

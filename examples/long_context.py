"""Train on sequences that are split over ranks: context parallelism beside ZeRO-3.

On four ranks of this machine, two for data and two for context:

    torchrun --nproc_per_node=4 examples/long_context.py

With --context 4, all four ranks share each sequence. The losses are those of whole sequences on as many data ranks.
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

import shardtrace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import common

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs transformers: pip install 'shardtrace[examples]'")


def main() -> None:
    args = parse_args()
    device = common.pick_device(args.device)
    with common.process_group(device):
        ranks = dist.get_world_size()
        if ranks % args.context:
            sys.exit(f"--context {args.context} does not divide the {ranks} ranks")
        mesh = init_device_mesh(device.type, (ranks // args.context, args.context), mesh_dim_names=("data", "context"))
        torch.manual_seed(0)  # every rank builds the same model
        model = LlamaForCausalLM(config(args.seq_len))
        shardtrace.fsdp(
            model,
            mesh=mesh,
            context_parallel=shardtrace.ContextParallel("context", returns="part"),
            init_policy=shardtrace.InitPolicy(device=device),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        numbers = torch.Generator().manual_seed(mesh.get_local_rank("data"))  # the same batch along "context"
        for step in range(args.steps):
            tokens = batch(args.batch_size, args.seq_len, numbers).to(device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}")
        if dist.get_rank() == 0:
            kinds = ("_parts", "_heads", "_positions")
            sent = [row for row in shardtrace.collectives(model) if row.kind.endswith(kinds)]
            print(f"{len(sent)} collectives of sequences, {sum(row.bytes for row in sent) / 1e6:.1f} MB for each step")


def config(length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )


def batch(size: int, length: int, numbers: torch.Generator) -> torch.Tensor:
    """Sequences that repeat a random phrase of 16 tokens: to predict them, a model has to look back."""
    phrases = torch.randint(64, (size, 16), generator=numbers)
    return phrases.repeat(1, -(-length // 16))[:, :length]


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2, metavar="N", help="ranks that share a sequence (2)")
    parser.add_argument("--seq-len", type=int, default=512, metavar="N", help="tokens of a sequence (512)")
    parser.add_argument("--batch-size", type=int, default=2, metavar="N", help="sequences of a data rank (2)")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    parser.add_argument("--lr", type=float, default=3e-3, metavar="X")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    return parser.parse_args()


if __name__ == "__main__":
    main()

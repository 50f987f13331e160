"""Train a small Llama, or adapters of it, by the Trainer of Hugging Face. It takes the Trainer's own arguments:

    torchrun --nproc_per_node=2 examples/trainers/hf_trainer.py --output_dir out --use_cpu --max_steps 20
    torchrun --nproc_per_node=2 examples/trainers/hf_trainer.py --output_dir out --use_cpu --max_steps 40 \
        --resume_from_checkpoint out/checkpoint-20 --lora

Its files are those of a single process, which continues from them, and from whose files the ranks continue.
"""

import sys
from dataclasses import dataclass, field

import shardtrace  # before thunder: makes it importable on the newest torch

import torch

from windows import VOCABULARY, Windows

try:
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ImportError:
    sys.exit("this example needs transformers, accelerate and peft: pip install 'shardtrace[examples]'")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass
class Options:
    layers: int = field(default=1, metadata={"help": "layers of the model"})
    lora: bool = field(default=False, metadata={"help": "train adapters by peft, beside a frozen model"})


def main() -> None:
    args, options = HfArgumentParser((TrainingArguments, Options)).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)  # every rank builds the same model
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers, use_cache=False, **SMALL)
    model = LlamaForCausalLM(config)
    if options.lora:
        model = with_adapters(model)
    if args.world_size > 1:
        model = shardtrace.fsdp(model)  # the line that is added; one process trains as it is
    trainer = Trainer(model=model, args=args, train_dataset=Windows(64), eval_dataset=Windows(16, first=64))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


def with_adapters(model: LlamaForCausalLM) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


if __name__ == "__main__":
    main()

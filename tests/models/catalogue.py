"""The families of models of the sweep."""

from __future__ import annotations

import faults
import hugging_face
import libraries
import typed_in
from case import Case

FAMILIES: list[str] = [*hugging_face.MAPPINGS, *libraries.FAMILIES, "typed-in"]

TYPED = {"typed-in": typed_in.MODELS, "faults": faults.MODELS}

# A short run that has every construct: tied weights, experts, state spaces, convolutions, BatchNorm, writes in place,
# complex numbers, random numbers, caches, encoders with decoders, a list of tensors, recurrent layers.
QUICK: list[tuple[str, str]] = [
    ("hf-causal", "llama"),
    ("hf-causal", "gpt2"),
    ("hf-causal", "mixtral"),
    ("hf-causal", "mamba2"),
    ("hf-causal", "gemma3_text"),
    ("hf-causal", "deepseek_v3"),
    ("hf-masked", "modernbert"),
    ("hf-seq2seq", "t5"),
    ("hf-image", "swin"),
    ("typed-in", "llama_complex"),
    ("typed-in", "mamba"),
    ("typed-in", "dit"),
    ("typed-in", "efficientnet"),
    ("typed-in", "densenet"),
    ("typed-in", "lstm"),
]


def names(family: str) -> list[str]:
    """The models of a family."""
    if family in hugging_face.MAPPINGS:
        return hugging_face.names(family)
    return list(TYPED[family]) if family in TYPED else libraries.names(family)


def build(family: str, name: str) -> Case:
    """A model of a family, with its batch."""
    if family in hugging_face.MAPPINGS:
        return hugging_face.build(family, name)
    return TYPED[family][name]() if family in TYPED else libraries.build(family, name)

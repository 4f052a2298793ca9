"""Tiny drafters for the tests: random ones, and ones that are right as often as a test wants."""

import functools
from collections.abc import Callable

import torch
from transformers.generation.utils import GenerationMixin

from dflash_hf import DFlashConfig, DFlashDraftModel
from targets import HIDDEN, MASK, NUM_LAYERS, VOCAB

BLOCK = 4


def drafter_config(**overrides) -> DFlashConfig:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "num_target_layers": NUM_LAYERS,
        "target_layer_ids": [1, 3, 4],
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }
    return DFlashConfig(**settings | overrides)


def make_drafter(seed: int = 0, cls=DFlashDraftModel, own_tensors=None, **overrides) -> DFlashDraftModel:
    """A random drafter whose norms and biases are random too, so that forgetting one of them shows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = cls(drafter_config(**overrides), own_tensors=own_tensors).eval()
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif "bias" in name:
                torch.nn.init.uniform_(parameter, -1, 1)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # cycles can be counted
    return drafter


class OracleDrafter(DFlashDraftModel):
    """Drafts the known continuation at the positions that `hit` names, and another token elsewhere.

    The real forward runs too, so context features, cache and positions are exercised as always.
    """

    text: list[int]  # the whole expected sequence, padding left out
    hit: Callable[[int], bool]

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        self.block_positions = position_ids[0, -noise_embeds.shape[1] :].tolist()
        return super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)

    def compute_logits(self, hidden, target_head, vocab_size):
        logits = super().compute_logits(hidden, target_head, vocab_size)
        first = self.config.block_size - self.config.num_drafts
        for slot in range(logits.shape[1]):
            position = self.block_positions[first + slot]
            if position < len(self.text):
                right = self.text[position]
                token = right if self.hit(position) else (right + 1) % vocab_size
                logits[:, slot, token] = 1e4
        return logits


HITS = {
    "always": lambda position: True,
    "sometimes": lambda position: (position * 2654435761) % 97 > 35,  # about two in three, no period in sight
    "never": lambda position: False,
}


def oracle(text, hit: str, **overrides) -> OracleDrafter:
    drafter = make_drafter(cls=OracleDrafter, **overrides)
    drafter.text, drafter.hit = list(text), HITS[hit]
    return drafter


def transformers_loop(drafter):
    """For `custom_generate=`: transformers' own assisted loop with this drafter's candidate generator."""
    return functools.partial(GenerationMixin._assisted_decoding.__wrapped__, assistant_model=drafter)

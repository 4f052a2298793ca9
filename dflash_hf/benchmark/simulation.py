"""A drafter that is right as often as asked, to price the loop without a trained drafter."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch

from .statistics import acceptance_for_tau


def simulated_drafter(drafter, tau: float, seed: int = 0):
    """A drafter with the weights of `drafter` (shared, not copied) whose drafts are right as often as `tau` asks.

    The model: every slot is right independently with the probability a for which the full block gives `tau`
    (1 + a + ... + a^g = tau). The real passes of drafter and head still run and cost what they cost; their logits are
    then overwritten, with a top probability of a at every slot: the confidence of a calibrated drafter that cannot
    tell slots apart. Whether a position is drafted rightly is drawn once per (seed, prompt, position), so that all
    block lengths and schedules meet the same luck.

    The text must be known: call `simulated.set_texts(keys, texts)` before each greedy generate call.

    Raises:
        ValueError: `tau` is outside [1, num_drafts + 1].

    Example:
        >>> simulated = simulated_drafter(drafter, tau=6.0)                                    # doctest: +SKIP
        >>> simulated.set_texts([0], [target.generate(ids)[0].tolist()])                       # doctest: +SKIP
        >>> target.generate(ids, assistant_model=simulated)                                    # doctest: +SKIP
    """
    acceptance = acceptance_for_tau(tau, drafter.config.num_drafts)
    simulated = copy.copy(drafter)
    simulated.__class__ = type("SimulatedDrafter", (_SimulatedDrafts, type(drafter)), {})
    simulated.generation_config = copy.deepcopy(drafter.generation_config)
    simulated.acceptance, simulated.simulation_seed = acceptance, seed
    simulated.block = SimpleNamespace()  # what the pass is about; loops may run it through another object
    return simulated


class _SimulatedDrafts:
    """What a simulated drafter does otherwise; loops call embed_block, forward and compute_logits in this order."""

    acceptance: float
    simulation_seed: int
    block: SimpleNamespace

    def set_texts(self, keys: list[int], texts: list[list[int]]) -> None:
        """The texts to come: whole sequences without padding, a row of the batch each; `keys` number the prompts."""
        self.texts = texts
        self.hits = [
            np.random.default_rng([self.simulation_seed, key]).random(len(text)) < self.acceptance
            for key, text in zip(keys, texts, strict=True)
        ]

    def embed_block(self, ids, target_embeddings):
        self.block.ids = ids
        return super().embed_block(ids, target_embeddings)

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        self.block.positions = position_ids[:, -noise_embeds.shape[1] :]
        return super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)

    def compute_logits(self, hidden, target_head, vocab_size):
        logits = super().compute_logits(hidden, target_head, vocab_size)
        anchors, positions = self.block.ids[:, 0].tolist(), self.block.positions.tolist()
        first = self.config.block_size - self.config.num_drafts
        num_slots = logits.shape[1]
        tokens = []
        rows = _rows_in_batch(self.texts, [p[0] for p in positions], anchors)
        for row, block in zip(rows, positions, strict=True):
            text, hits = self.texts[row], self.hits[row]
            for position in block[first : first + num_slots]:
                inside = position < len(text)
                tokens.append((text[position] + (not hits[position])) % vocab_size if inside else 0)
        tokens = torch.tensor(tokens, device=logits.device).view(len(rows), num_slots, 1)
        confidence = min(max(self.acceptance, 2 / vocab_size), 1 - 1e-4)
        top = math.log((vocab_size - 1) * confidence / (1 - confidence))
        return logits.zero_().scatter_(-1, tokens, top)


def _rows_in_batch(texts: list[list[int]], positions: list[int], anchors: list[int]) -> list[int]:
    """Which text each row of the batch is: rows keep their order, and finished ones may have left.

    Of all choices in order the one whose anchors agree most with the texts.
    """
    n, m = len(positions), len(texts)
    if n == m:
        return list(range(n))
    agree = [[p < len(t) and t[p] == a for t in texts] for p, a in zip(positions, anchors, strict=True)]
    # best[j][i]: most agreements of rows j.. among texts i..
    best = [[-math.inf] * (m + 1) for _ in range(n)] + [[0] * (m + 1)]
    for j in reversed(range(n)):
        for i in reversed(range(m)):
            best[j][i] = max(best[j][i + 1], agree[j][i] + best[j + 1][i + 1])
    rows, i = [], 0
    for j in range(n):
        while best[j][i] == best[j][i + 1]:
            i += 1
        rows.append(i)
        i += 1
    return rows

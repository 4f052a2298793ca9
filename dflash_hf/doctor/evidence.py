"""What the doctor measures on: a target's own greedy answers, and the hidden states that it had while giving them.

Answers and hidden states are computed once. How a drafter does on them, under any reading of its config, then takes
one drafter pass for each answer: a block at every anchor, compared with what the answer says there (teacher forcing).
"""

import itertools
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..training.features import target_features
from ..training.objective import IGNORE, pack, visibility

JUDGED = 7  # first slots of a block whose likelihood counts; layers off by one show in the later ones, too
ROWS = 8  # prompts that are answered together
ROWS_IN_HEAD = 256  # drafts whose logits are there at a time
LEAST_LOG_LIKELIHOOD = -12.0  # of a token: one that is ruled out altogether must not outweigh all others


@dataclass
class Score:
    """How a drafter did, by anchor (N of them).

    Attributes:
        accepted: `[N]` float32, drafts that are right before the first wrong one.
        likelihood: `[N]` float32, mean log-likelihood of the right tokens at the first seven slots, in nats. It shows
            a change long before drafts become right.
        right: `[K]` float32, how often the draft at each slot was accepted.
    """

    accepted: torch.Tensor
    likelihood: torch.Tensor
    right: torch.Tensor

    @property
    def tau(self) -> float:
        """Tokens a cycle commits, were every anchor as likely: accepted drafts and the bonus token."""
        return 1 + self.accepted.mean().item()

    @property
    def first(self) -> float:
        """How often the first draft is right."""
        return self.right[0].item()


@dataclass
class Evidence:
    """A target's answers and its hidden states.

    Attributes:
        target: the model.
        sequences: token ids of each prompt with its answer, `[S]` long.
        starts: where each answer starts.
        anchors: of each sequence.
        states: of each sequence, `[S, D_t]` after the layers that were asked for so far, by the layer's number.
    """

    target: PreTrainedModel
    sequences: list[torch.Tensor]
    starts: list[int]
    anchors: list[list[int]] = field(repr=False)
    states: list[dict[int, torch.Tensor]] = field(repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(ids) for ids in self.sequences)

    def thinned(self, count: int) -> "Evidence":
        """The same with about `count` of the anchors, of as few answers as have four each: contexts cost, too."""
        answers = max(1, min(count // 4, len(self.anchors)))
        stride = len(self.anchors) // answers
        anchors: list[list[int]] = [[] for _ in self.anchors]
        for n in range(0, answers * stride, stride):
            every = max(1, len(self.anchors[n]) * answers // count)
            anchors[n] = self.anchors[n][n % every :: every]
        return Evidence(self.target, self.sequences, self.starts, anchors, self.states)

    def fresh(self) -> "Evidence":
        """The same without anchors whose next token has followed that one before.

        Text that repeats itself is easy for any drafter, so it says little where answers are not the same.
        """
        anchors = []
        for sequence, of in zip(self.sequences, self.anchors, strict=True):
            ids = sequence.tolist()
            pairs = list(itertools.pairwise(ids))
            anchors.append([anchor for anchor in of if pairs[anchor] not in pairs[:anchor]] or of[:1])
        return Evidence(self.target, self.sequences, self.starts, anchors, self.states)

    def features(self, n: int, layers: list[int]) -> torch.Tensor:
        """Context features `[S, F * D_t]` of a sequence; the target runs again where a layer is new."""
        there = self.states[n]
        if missing := sorted(set(layers) - set(there)):
            found, _ = target_features(self.target, self.sequences[n][None], missing)
            there.update(zip(missing, found[0].chunk(len(missing), dim=-1), strict=True))
        return torch.cat([there[layer] for layer in layers], dim=-1)


def gather(
    target, prompts: list[list[int]], *, num_drafts: int, max_new_tokens: int = 64, anchors: int = 256
) -> Evidence:
    """Let a target answer, and choose anchors in its answers.

    Args:
        target: a causal LM.
        prompts: token ids.
        num_drafts: of the drafter's blocks; anchors have as many tokens behind them where the answer is long.
        max_new_tokens: of an answer, greedy.
        anchors: how many to spread over all answers.

    Raises:
        ValueError: no answer has the three tokens that one anchor needs.
    """
    eos = target.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    sequences, starts = [], []
    for first in range(0, len(prompts), ROWS):
        some = prompts[first : first + ROWS]
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in some], device=target.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in some], device=target.device)
        options = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
        new = target.generate(ids, attention_mask=mask, **options)[:, longest:]
        for row, answer in zip(some, new.tolist(), strict=True):
            answer = answer[: next((n + 1 for n, token in enumerate(answer) if token in ends), len(answer))]
            if len(answer) >= 3:
                sequences.append(torch.tensor(row + answer, device=target.device))
                starts.append(len(row))
    if not sequences:
        raise ValueError(
            "Every answer ended within two tokens, too short to draft anything: pass prompts that are answered at "
            "length, or a larger max_new_tokens."
        )
    each = -(-anchors // len(sequences))
    spread = [_spread(start, len(ids), num_drafts, each) for start, ids in zip(starts, sequences, strict=True)]
    return Evidence(target, sequences, starts, spread, [{} for _ in sequences])


def _spread(start: int, stop: int, num_drafts: int, count: int) -> list[int]:
    """At most `count` anchors at even distances, each with `num_drafts` tokens behind it where the answer is long."""
    end = max(stop - num_drafts, start + 1)
    count = min(count, end - start)
    return [start + (end - start) * n // count for n in range(count)]


@torch.no_grad()
def score(drafter, evidence: Evidence) -> Score:
    """How a drafter does at the anchors of an evidence.

    Args:
        drafter: one that fits the evidence's target. Its weights are read, and nothing is changed.
    """
    table, head = evidence.target.get_input_embeddings(), evidence.target.get_output_embeddings()
    found = [_states(drafter, evidence, n, table) for n, of in enumerate(evidence.anchors) if of]
    states = torch.cat([states for states, _ in found])  # [N, K, D]
    labels = torch.cat([labels for _, labels in found])  # [N, K]
    N, K = labels.shape
    there = (labels != IGNORE).cpu()
    judged = there & (torch.arange(K) < JUDGED)
    likelihoods = torch.full((N, K), float("nan"))
    likelihoods[judged], correct = _judge(drafter, head, states, labels, judged)
    right = torch.zeros(N, K, dtype=torch.bool)
    right[judged] = correct
    for slot in range(JUDGED, K):  # these only count where every draft before was right
        rows = there & (torch.arange(K) == slot) & right[:, :slot].all(1, keepdim=True)
        if not rows.any():
            break
        right[rows] = _judge(drafter, head, states, labels, rows)[1]
    alive = right.long().cumprod(1)
    return Score(alive.sum(1).float(), likelihoods.nanmean(1), alive.sum(0) / there.sum(0).clamp(min=1))


def _judge(drafter, head, states, labels, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the drafts at `where` (bool `[N, K]`): log-likelihoods of the right tokens, and whether the drafts are right.

    Many rows go through the LM head together, as reading its weights costs as much as multiplying with them.
    """
    states, labels = states[where.to(states.device)], labels[where.to(labels.device)]
    likelihoods, right = [], []
    for rows, wanted in zip(states.split(ROWS_IN_HEAD), labels.split(ROWS_IN_HEAD), strict=True):
        logits = drafter.compute_logits(rows[:, None], head, drafter.config.vocab_size)[:, 0].float()
        wanted = wanted.to(logits.device)
        likelihood = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)
        likelihoods.append(likelihood.clamp(min=LEAST_LOG_LIKELIHOOD).cpu())
        right.append((logits.argmax(-1) == wanted).cpu())
    return torch.cat(likelihoods), torch.cat(right)


def _states(drafter, evidence: Evidence, n: int, table) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one answer: the states `[n, K, D]` that draft at its anchors, and what they should say `[n, K]`.

    This is the drafter's forward pass with another mask. It is written out because a mask that is handed over counts
    for all layers alike, and here each layer has its own rule.
    """
    config, device = drafter.config, drafter.device
    ids = evidence.sequences[n].to(device)
    item = {"ids": ids, "spans": [(evidence.starts[n], len(ids))]}
    blocks = pack([item], [evidence.anchors[n]], config)
    features = evidence.features(n, config.target_layer_ids)[None].to(device, drafter.dtype)
    context = drafter.hidden_norm(drafter.fc(features))
    block = drafter.embed_block(blocks.block_ids, table)
    visible = {}

    def masks(causal: bool, window: int | None, num_keys: int) -> torch.Tensor:
        if (causal, window) not in visible:
            mask = visibility(blocks.visible, config.block_size, 0, len(ids), causal=causal, window=window)
            visible[causal, window] = mask[None, None]
        return visible[causal, window]

    position_embeddings = drafter.rotary_emb(block, blocks.position_ids)
    for layer in drafter.layers:
        block = layer(block, context=context, position_embeddings=position_embeddings, masks=masks, cache=None)
    states = drafter.norm(block).view(-1, config.block_size, block.shape[-1])
    return states[:, config.block_size - config.num_drafts :], blocks.labels

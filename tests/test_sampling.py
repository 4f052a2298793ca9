"""Sampling keeps the target's distribution: chi-square of many tokens against the exact one.

The target looks at its last token only (its attention adds nothing), so a text is a Markov chain whose transitions
are known exactly; the drafter sees the whole text and is often wrong. Counted are triples of tokens, which a mistake
in accepting or in replacing a draft shifts wherever in a block it happens.
"""

import functools

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import LogitsProcessor

from dflash_hf import DFlashConfig, DFlashDraftModel
from drafters import transformers_loop

V, PROMPT = 4, [1, 2, 0, 3]
ROWS, NEW = 24, 150


@functools.cache
def markov_target():
    sizes = dict(vocab_size=V, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(
            **sizes, num_hidden_layers=2, initializer_range=0.5, eos_token_id=None, bos_token_id=None,
            max_position_embeddings=4096,
        )  # fmt: skip
        target = LlamaForCausalLM(config).eval()
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return target


def random_drafter(own_tensors=None, way="rejection", **options):
    """A drafter that is always asked, so that the figures have something to count."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = DFlashConfig(
            vocab_size=V, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, num_hidden_layers=1, target_layer_ids=[0, 1], initializer_range=0.5,
            dflash_config={"block_size": 3, "mask_token_id": 3} | options,
        )  # fmt: skip
        drafter = DFlashDraftModel(config, own_tensors=own_tensors).eval()
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_sampling = way
    return drafter


# Warpers by hand, on the probabilities of one token [V] in float64.
def nucleus(p, mass):
    """The likeliest tokens up to the first that brings them to `mass`."""
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    return torch.zeros_like(p).index_put_((order,), torch.where(before < mass, p[order], 0))


def typical(p, mass):
    """As above, ordered by how close a token's surprise is to the mean surprise."""
    surprise = -p.log()
    order = (surprise - (p * surprise).sum()).abs().argsort()
    before = p[order].cumsum(0) - p[order]
    return torch.zeros_like(p).index_put_((order,), torch.where(before < mass, p[order], 0))


def heat(p, temperature):
    p = p ** (1 / temperature)
    return p / p.sum()


def at_least(p, share):
    return torch.where(p >= share * p.max(), p, 0)


def tilted(p, factors):
    return p * torch.tensor(factors, dtype=p.dtype)


class AvoidRepeats(LogitsProcessor):
    """A user's own: it may keep state for all that we know, so drafts do not pass through it."""

    def __call__(self, input_ids, scores):
        return scores - 1.5 * torch.nn.functional.one_hot(input_ids[:, -1], V)


def not_again(p, a):
    return tilted(p, [torch.e**-1.5 if b == a else 1.0 for b in range(V)])


# name -> arguments of generate(), and what they do to the probabilities p of the token behind token a
CASES = {
    "temperature 1": ({}, lambda p, a: p),
    "temperature and top-p": ({"temperature": 0.7, "top_p": 0.9}, lambda p, a: nucleus(heat(p, 0.7), 0.9)),
    "top-k": ({"top_k": 2}, lambda p, a: torch.where(p >= p.sort().values[-2], p, 0)),
    "min-p, hot": ({"temperature": 2.0, "min_p": 0.3}, lambda p, a: at_least(heat(p, 2.0), 0.3)),
    "typical, hot": ({"temperature": 2.0, "typical_p": 0.8}, lambda p, a: typical(heat(p, 2.0), 0.8)),
    # Slot by slot: the token before decides.
    "sequence bias": (
        {"sequence_bias": [[[0, 1], 2.0], [[2, 2], -3.0]]},
        lambda p, a: tilted(p, [1, torch.e**2, 1, 1] if a == 0 else [1, 1, torch.e**-3, 1] if a == 2 else [1] * V),
    ),
    "bad words, hot": (
        {"bad_words_ids": [[3, 3], [1, 2]], "temperature": 2.0},
        lambda p, a: heat(tilted(p, [1, 1, a != 1, a != 3]), 2.0),
    ),
}
# Of a batch the user's processor may look at all rows, so it is only drafted for in a single one.
CASES_OF_ONE_ROW = {"a processor of the user's": ({"logits_processor": [AvoidRepeats()]}, not_again)}
CASES |= CASES_OF_ONE_ROW


def p_value(drafter, case, num_rows=ROWS, num_new=NEW, custom_generate=None, low=1.1, high=2.9):
    settings, warp = CASES[case]
    target = markov_target()
    with torch.no_grad():
        raw = target(torch.arange(V)[:, None]).logits[:, -1].double().softmax(-1)
    exact = torch.stack([warp(row, a) for a, row in enumerate(raw)])
    exact = exact / exact.sum(-1, keepdim=True)

    by = {"assistant_model": drafter} if custom_generate is None else {"custom_generate": custom_generate}
    torch.manual_seed(11)
    ids, settings = torch.tensor([PROMPT] * num_rows), {"top_k": 0, "pad_token_id": 0} | settings
    texts = target.generate(ids, do_sample=True, max_new_tokens=num_new, **by, **settings)
    assert texts.shape[1] == len(PROMPT) + num_new
    assert low < drafter.last_run.tau < high  # drafts are taken, and refused
    triples = texts[:, len(PROMPT) - 1 :].unfold(1, 3, 1).reshape(-1, 3).T
    counts = torch.zeros(V, V, V, dtype=torch.double)
    counts.index_put_(tuple(triples), torch.ones(triples.shape[1], dtype=torch.double), accumulate=True)
    expected = counts.sum(-1, keepdim=True) * exact
    assert counts[expected == 0].sum() == 0
    seen = (expected >= 2) & (exact < 1)
    statistic = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = (seen.sum(-1) - 1).clamp_min(0).sum()
    assert freedom >= V  # something is left to draw
    return chi2.sf(float(statistic), int(freedom))


@pytest.mark.parametrize("way", ["rejection", "coupled"])
@pytest.mark.parametrize("case", CASES)
def test_the_text_follows_the_targets_distribution(case, way):
    one_row = {"num_rows": 1, "num_new": 1000} if case in CASES_OF_ONE_ROW else {}
    assert p_value(random_drafter(way=way), case, **one_row) > 0.001


def test_a_confidence_threshold_keeps_the_distribution():
    drafter = random_drafter()
    drafter.generation_config.assistant_confidence_threshold = 0.4
    assert p_value(drafter, "temperature 1") > 0.001
    assert drafter.last_run.offered[1] < drafter.last_run.offered[0]


@pytest.mark.parametrize("case", ["temperature 1", "top-k", "min-p, hot", "sequence bias"])
def test_a_draft_vocabulary_that_misses_a_token(case):
    drafter = random_drafter(own_tensors={"lm_head.weight": [3, 16], "d2t": [3]})
    drafter.d2t.copy_(torch.tensor([0, 1, 1]))  # target ids 0, 2, 3
    assert p_value(drafter, case) > 0.001


def test_the_anchors_slot_samples_too():
    assert p_value(random_drafter(sample_from_anchor=True), "temperature 1") > 0.001


def test_transformers_own_loop_keeps_the_distribution_too():
    drafter = random_drafter()
    loop = transformers_loop(drafter)
    assert p_value(drafter, "temperature 1", num_rows=1, num_new=1000, custom_generate=loop) > 0.001


def test_accepting_every_possible_draft_is_seen(monkeypatch):
    monkeypatch.setattr(torch, "rand", torch.zeros)
    assert p_value(random_drafter(), "temperature 1", high=3.1) < 1e-6


def test_drafts_that_were_not_drawn_from_their_logits_are_seen(monkeypatch):
    multinomial = torch.multinomial

    def likeliest_of_two(probs, *args, **kwargs):
        """A single row, as the target's, is drawn; the two of a block are not."""
        return probs.argmax(-1, keepdim=True) if len(probs) == 2 else multinomial(probs, *args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", likeliest_of_two)
    assert p_value(random_drafter(), "temperature 1", num_rows=1, num_new=1000) < 1e-6

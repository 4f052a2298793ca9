"""Sampling keeps the target's distribution: chi-square of generated pairs against the exact product."""

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.drafter import decoding
from drafters import transformers_loop

V, RUNS, PROMPT = 4, 1500, [[1, 2, 0]]


def tiny_pair():
    sizes = dict(vocab_size=V, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        target = LlamaForCausalLM(
            LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.5, eos_token_id=None, bos_token_id=None)
        ).eval()
        drafter = DFlashDraftModel(
            DFlashConfig(
                **sizes,
                head_dim=8,
                num_hidden_layers=1,
                target_layer_ids=[0, 1],
                block_size=3,
                mask_token_id=3,
                initializer_range=0.5,
            )
        ).eval()
    return target, drafter


def warp(logits, temperature=1.0, top_p=1.0):
    """Temperature and nucleus by hand: the likeliest tokens up to the first that brings the mass to top_p."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    kept = torch.zeros_like(probs)
    kept[order] = torch.where(before < top_p, probs[order], 0)
    return kept / kept.sum()


def exact_pairs(target, **settings):
    """P(second token, third token): the first comes from the prefill, the others from drafting and verifying."""

    def step(ids):
        with torch.no_grad():
            return warp(target(torch.tensor([ids])).logits[0, -1], **settings)

    pairs = torch.zeros(V, V, dtype=torch.double)
    for a, p_a in enumerate(step(PROMPT[0])):
        for b, p_b in enumerate(step([*PROMPT[0], a])):
            pairs[b] += p_a * p_b * step([*PROMPT[0], a, b])
    return pairs.flatten()


def p_value(target, drafter, custom_generate=None, **settings):
    torch.manual_seed(11)
    by = {"assistant_model": drafter} if custom_generate is None else {"custom_generate": custom_generate}
    counts = torch.zeros(V * V, dtype=torch.double)
    ids = torch.tensor(PROMPT)
    for _ in range(RUNS):
        out = target.generate(ids, do_sample=True, max_new_tokens=4, top_k=0, **by, **settings)
        counts[out[0, 4] * V + out[0, 5]] += 1
    expected = exact_pairs(target, **settings) * RUNS
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    statistic = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    return chi2.sf(float(statistic), int(seen.sum()) - 1)


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_pairs_follow_the_targets_distribution(settings):
    target, drafter = tiny_pair()
    assert p_value(target, drafter, **settings) > 0.001


def test_a_confidence_threshold_keeps_the_distribution():
    target, drafter = tiny_pair()
    drafter.generation_config.assistant_confidence_threshold = 0.4
    assert p_value(target, drafter, temperature=1.0) > 0.001


def test_a_wrong_acceptance_rule_is_seen(monkeypatch):
    def accept_everything(logits, drafts, draft_logits, ids, processors, do_sample, ends):
        return torch.cat([drafts, torch.multinomial(logits[-1].softmax(-1), 1)]), logits

    monkeypatch.setattr(decoding, "verify", accept_everything)
    target, drafter = tiny_pair()
    assert p_value(target, drafter, temperature=1.0) < 1e-6


def test_transformers_own_loop_keeps_the_distribution_too():
    target, drafter = tiny_pair()
    assert p_value(target, drafter, temperature=1.0, custom_generate=transformers_loop(drafter)) > 0.001

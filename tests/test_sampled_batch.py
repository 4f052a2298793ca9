"""Sampling several rows, and with noise that drafter and target share."""

import pytest
import torch
from scipy.stats import chi2

from dflash_hf.drafter import decoding
from drafters import make_drafter
from targets import PAD, make_target, prompt_ids
from test_batch import left_padded
from test_sampling import V, markov_target, random_drafter

LONG = 600  # tokens of a row whose transitions are counted
SAMPLED = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": PAD}


def p_value_of_rows(drafter):
    """Chi-square of all transitions in four texts of one call against the target's own probabilities."""
    target = markov_target()
    with torch.no_grad():
        exact = target(torch.arange(V)[:, None]).logits[:, -1].double().softmax(-1)
    torch.manual_seed(4)
    ids = torch.tensor([[1, 2, 0, 3]])
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": LONG, "num_return_sequences": 4}
    texts = target.generate(ids, **settings, assistant_model=drafter)
    assert texts.shape == (4, 4 + LONG) and len(set(map(tuple, texts.tolist()))) == 4
    counts = torch.zeros(V, V, dtype=torch.double)
    for text in texts[:, 3:]:
        counts.index_put_((text[:-1], text[1:]), torch.ones(LONG, dtype=torch.double), accumulate=True)
    expected = counts.sum(-1, keepdim=True) * exact
    return chi2.sf(float(((counts - expected) ** 2 / expected).sum()), V * (V - 1))


@pytest.mark.parametrize("way", ["rejection", "coupled"])
def test_rows_follow_the_targets_distribution(way):
    drafter = random_drafter(way=way)
    assert p_value_of_rows(drafter) > 0.001
    assert sum(drafter.last_run.accepted) > 100


def test_accepting_whatever_the_drafter_says_is_seen(monkeypatch):
    monkeypatch.setattr(decoding, "_probability", lambda p, ids, tokens: torch.ones(tokens.shape))
    assert p_value_of_rows(random_drafter()) < 1e-6


OPTIONS = {
    "temperature": {"top_k": 0, "temperature": 0.7},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9},
    "repetition": {"top_k": 0, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_coupled_text_is_the_same_in_any_blocks_and_batch(options):
    target, inputs = make_target("llama"), left_padded((9, 3, 14))
    texts = []
    for most, schedule in ((None, "constant"), (1, "constant"), (2, "constant"), (None, "adaptive")):
        drafter = make_drafter()
        drafter.generation_config.assistant_sampling = "coupled"
        drafter.generation_config.num_assistant_tokens = most
        drafter.generation_config.num_assistant_tokens_schedule = schedule
        torch.manual_seed(8)
        texts.append(target.generate(**inputs, **SAMPLED, **options, assistant_model=drafter))
    torch.manual_seed(8)
    alone = target.generate(inputs["input_ids"][:1, 5:], **SAMPLED, **options, assistant_model=drafter)
    assert all(text.tolist() == texts[0].tolist() for text in texts)
    assert alone[0].tolist() == texts[0][0, 5:].tolist()


def test_a_seed_gives_the_same_text_again():
    target, ids = make_target("qwen3"), prompt_ids(2)
    for way in (None, "rejection", "coupled"):
        drafter = make_drafter()
        drafter.generation_config.num_assistant_tokens_schedule = None
        drafter.generation_config.assistant_sampling = way
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append(target.generate(ids, **SAMPLED, assistant_model=drafter).tolist())
        assert texts[0] == texts[1] != texts[2]

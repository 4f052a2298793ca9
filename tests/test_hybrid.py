"""Targets whose recurrent layers cannot be cropped: rejected drafts are undone by running the accepted ones again."""

import pytest
import torch
import transformers
from transformers import DynamicCache

from drafters import BLOCK, HITS, make_drafter, oracle
from targets import COMMON, NUM_LAYERS, prompt_ids

MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
DELTA = {
    "head_dim": 16,
    "layer_types": MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
HYBRIDS = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**MAMBA, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "attention", "mamba"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 16,
        },
    ),
    "lfm2": (  # convolutions only: transformers crops them
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
}


def hybrid(family):
    config_name, model_name, options = HYBRIDS[family]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = getattr(transformers, config_name)(**COMMON | options)
        return getattr(transformers, model_name)._from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_ids_equal_plain_generate(family, hit):
    target = hybrid(family)
    assert target.config.num_hidden_layers == NUM_LAYERS
    for length in (1, 3, 21):
        ids = prompt_ids(length=length)
        text = target.generate(ids, do_sample=False, max_new_tokens=22)
        drafter = oracle(text[0].tolist(), hit)
        out = target.generate(ids, do_sample=False, max_new_tokens=22, assistant_model=drafter)
        assert out.tolist() == text.tolist()
        if hit == "always":
            assert drafter.last_run.cycles == -(-21 // BLOCK)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_a_second_turn(family):
    target, ids = hybrid(family), prompt_ids(length=9)
    texts = []
    for drafted in (False, True):
        cache, text = DynamicCache(config=target.config), ids
        for turn in range(2):
            drafter = None
            if drafted:
                drafter = oracle(texts[0].tolist(), "sometimes")
            text = target.generate(text, cache=cache, do_sample=False, max_new_tokens=12, assistant_model=drafter)
            if turn == 0:
                text = torch.cat([text, prompt_ids(length=4, seed=3)], dim=1)
        texts.append(text[0])
    assert texts[0].tolist() == texts[1].tolist()


@pytest.mark.parametrize("at", range(2, 7))
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_a_pass_or_replay_that_breaks_off_leaves_a_usable_cache(family, at):
    target, ids = hybrid(family), prompt_ids(length=9)
    text = target.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0].tolist()
    cache, calls = DynamicCache(config=target.config), []

    def break_off(*_):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    hook = target.model.layers[0].register_forward_hook(break_off)
    options = {"do_sample": False, "pad_token_id": 0, "cache": cache}
    with pytest.raises(KeyboardInterrupt):
        target.generate(ids, max_new_tokens=24, assistant_model=oracle(text, "sometimes"), **options)
    hook.remove()
    known = cache.get_seq_length() + 1
    out = target.generate(torch.tensor([text[:known]]), max_new_tokens=len(text) - known, **options)
    assert out[0].tolist() == text


def test_several_rows_and_other_states_are_refused():
    with pytest.raises(ValueError, match="one sequence at a time here, got 2"):
        hybrid("qwen3_5").generate(prompt_ids(2), max_new_tokens=4, assistant_model=make_drafter())
    config = transformers.BambaConfig(**COMMON, attn_layer_indices=[1, 3], **MAMBA)
    bamba = transformers.BambaForCausalLM._from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match=r"BambaForCausalLM keeps a recurrent state.*qwen3_next"):
        bamba.generate(prompt_ids(), max_new_tokens=4, assistant_model=make_drafter())

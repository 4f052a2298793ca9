"""The drafter's forward against independent truths: a reference written from the rules, and PyPI dflash 0.1.0."""

import importlib.util

import pytest
import torch
from transformers import Qwen3Config
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashConfig
from dflash_hf.drafter.cache import DFlashContextCache
from drafters import drafter_config, make_drafter
from reference import reference_block_embeds, reference_draft_hidden, reference_logits, target_layer_ids
from targets import HIDDEN, MASK, VOCAB, make_target, prompt_ids

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
# name -> overrides of the config
VARIANTS = {
    "full": {},
    "biases": {"attention_bias": True},
    "sliding causal": {"layer_types": [SLIDING, SLIDING], "sliding_window": 6},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 6},
    "sliding, is_causal false": {"layer_types": [SLIDING, SLIDING], "sliding_window": 6, "is_causal": False},
    "sliding, nested causal false": {
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 3,
        "dflash_config": {"causal": False},
    },
    "full, is_causal true": {"is_causal": True},
    "swa_window_size wins": {
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 99,
        "dflash_config": {"swa_window_size": 5},
    },
    "use_swa": {"sliding_window": 3, "dflash_config": {"use_swa": True}},
    "use_swa causal": {"sliding_window": 5, "dflash_config": {"use_swa": True, "causal": True}},
    "use_swa beside layer types": {
        "layer_types": [FULL, SLIDING],
        "sliding_window": 5,
        "dflash_config": {"use_swa": True},
    },
    "sinks": {"dflash_config": {"attention_sink_bias": True}},
    "sinks where sliding": {
        "layer_types": [SLIDING, FULL],
        "sliding_window": 5,
        "dflash_config": {"add_swa_attention_sink_bias": True},
    },
    "interleaved rope": {"is_neox_style": False},
    "rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "yarn": {"rope_parameters": YARN},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
}


def random_features(length, config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, len(config.target_layer_ids) * config.target_hidden_size, generator=generator)


def walk(drafter, features, block_embeds, cuts, cache):
    """Feed the context in pieces that end at `cuts`, one drafter pass each; the last block's hidden states."""
    start = 0
    for stop in cuts:
        if isinstance(cache, DFlashCache) and start:
            cache.crop(-len(block_embeds))
        if cache is not None:
            cache.set_previous_accepted_tokens(stop - start)
        positions = torch.arange(start, stop + len(block_embeds))[None]
        with torch.no_grad():
            hidden = drafter(
                noise_embeds=block_embeds[None],
                context_hidden_states=features[None, start:stop],
                position_ids=positions,
                cache=cache,
            ).last_hidden_state[0]
        start = stop
    return hidden


def expected_hidden(drafter, features, block_embeds):
    n = len(features)
    return reference_draft_hidden(
        drafter.state_dict(), drafter.config.to_dict(), features, block_embeds,
        torch.arange(n), torch.arange(n, n + len(block_embeds)),
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_equal_the_reference(variant, implementation):
    drafter = make_drafter(block_size=6, **VARIANTS[variant])
    drafter.set_attn_implementation(implementation)
    features, block = random_features(23, drafter.config), torch.randn(6, HIDDEN)
    expected = expected_hidden(drafter, features, block)
    caches = {
        "one pass": (None, [23]),
        "own cache": (DFlashContextCache(2), [9, 10, 10, 16, 23]),  # a cut of no new context among them
        "stock cache": (DFlashCache(config=drafter.config), [9, 10, 16, 23]),
    }
    if isinstance(caches["stock cache"][0], DFlashCache):
        caches["stock cache"][0].activate_past_recording()
    for name, (cache, cuts) in caches.items():
        torch.testing.assert_close(walk(drafter, features, block, cuts, cache), expected, atol=1e-5, rtol=0, msg=name)


# A wrong reading of each variant, as somebody could make it: the reference must see it.
WRONG = [
    ("full", {"is_causal": True}),
    ("biases", {"attention_bias": False}),
    ("sliding causal", {"sliding_window": 7}),
    ("sliding causal", {"is_causal": False}),
    ("mixed", {"layer_types": [FULL, SLIDING]}),
    ("sliding, is_causal false", {"is_causal": None}),
    ("sliding, nested causal false", {"dflash_config": {}}),
    ("full, is_causal true", {"is_causal": None}),
    ("swa_window_size wins", {"dflash_config": {"swa_window_size": 99}}),
    ("use_swa", {"dflash_config": {}}),
    ("use_swa", {"dflash_config": {"use_swa": True, "causal": True}}),
    ("sinks", {"dflash_config": {}}),
    ("interleaved rope", {"is_neox_style": True}),
    ("rope base", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ("yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
]


@pytest.mark.parametrize("variant, wrong", WRONG)
def test_a_wrong_reading_is_seen(variant, wrong):
    right = make_drafter(block_size=6, **VARIANTS[variant])
    features, block = random_features(23, right.config), torch.randn(6, HIDDEN)
    expected = expected_hidden(right, features, block)
    misread = make_drafter(block_size=6, **VARIANTS[variant] | wrong)
    misread.load_state_dict(right.state_dict(), strict=False)
    assert (walk(misread, features, block, [23], None) - expected).abs().max() > 1e-3


def test_logits_and_embeddings_equal_the_reference():
    table, head = torch.randn(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    embeddings = torch.nn.Embedding(VOCAB, HIDDEN, _weight=table)
    embeddings.embed_scale = torch.tensor(5.0)  # as Gemma's: the drafter takes the raw table all the same
    draft_vocab = 20
    cases = [
        ({}, None),
        ({"dflash_config": {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}}, None),
        ({"dflash_config": {"input_embedding_scale": 6.0}}, None),
        ({}, {"lm_head.weight": [VOCAB, HIDDEN], "embed_tokens.weight": [VOCAB, HIDDEN]}),
        ({"draft_vocab_size": draft_vocab}, {"lm_head.weight": [draft_vocab, HIDDEN], "d2t": [draft_vocab]}),
    ]
    for overrides, own in cases:
        drafter = make_drafter(own_tensors=own, **overrides)
        if own and "d2t" in own:
            drafter.d2t.copy_(torch.arange(draft_vocab) * 2)  # draft id i is target id 3 i
        for mask_embedding in (None, torch.randn(HIDDEN)):
            drafter.mask_embedding = mask_embedding
            state, config = drafter.state_dict(), drafter.config.to_dict() | {"vocab_size": VOCAB}
            ids, hidden = torch.tensor([[9, MASK, MASK]]), torch.randn(1, 3, HIDDEN)
            with torch.no_grad():
                embeds = drafter.embed_block(ids, embeddings)[0]
                logits = drafter.compute_logits(hidden, head, VOCAB)[0]
            torch.testing.assert_close(embeds, reference_block_embeds(state, config, table, ids[0], mask_embedding))
            torch.testing.assert_close(logits, reference_logits(state, config, hidden[0], head.weight.data))
            assert logits.shape == (3, VOCAB)


def test_config_spellings():
    nested = {"mask_token_id": 5, "block_size": 8, "target_layer_ids": [1, 2]}
    for raw in (
        {"dflash_config": nested},
        nested,
        nested | {"dflash_config": {"mask_token_id": 5}, "mask_token_id": 9},
    ):
        config = DFlashConfig.from_dict(dict(raw))
        assert (config.mask_token_id, config.block_size, config.target_layer_ids) == (5, 8, [1, 2])
        again = DFlashConfig.from_dict(config.to_dict())
        assert again.to_dict() == config.to_dict()
    for layers in (1, 3, 5, 8):
        for target_layers in (12, 30, 36, 64):
            config = drafter_config(num_hidden_layers=layers, num_target_layers=target_layers, target_layer_ids=None)
            raw = {"num_hidden_layers": layers, "num_target_layers": target_layers}
            assert config.target_layer_ids == target_layer_ids(raw)
    for rope in ({"rope_theta": 7000.0}, {"rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}}):
        assert DFlashConfig.from_dict(dict(rope)).rope_parameters["rope_theta"] == 7000.0
    old = DFlashConfig.from_dict({"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert old.rope_parameters == {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}
    assert DFlashConfig.from_dict(old.to_dict()).rope_parameters == old.rope_parameters
    raw_window = DFlashConfig.from_dict({"num_hidden_layers": 1, "layer_types": [SLIDING], "sliding_window": 9})
    assert raw_window.layer_windows == [9]  # use_sliding_window is false and has no say


@pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None, reason="needs PyPI dflash 0.1.0 (pip install --no-deps)"
)
@pytest.mark.parametrize(
    "variant",
    ["full", "biases", "sliding causal", "mixed", "sliding, is_causal false", "full, is_causal true", "yarn"],
)
def test_parity_with_pypi_dflash(variant):
    from dflash import DFlashDraftModel as Peer

    ours = make_drafter(block_size=6, **VARIANTS[variant])
    raw = ours.config.to_dict() | {"use_sliding_window": True}
    for name in ("auto_map", "architectures", "rope_scaling", "rope_theta", "dtype", "is_neox_style"):
        raw.pop(name, None)
    peer_config = Qwen3Config.from_dict(raw)
    peer_config._attn_implementation = "sdpa"
    peer = Peer(peer_config).eval()
    peer.load_state_dict(ours.state_dict())
    features, block = random_features(23, ours.config), torch.randn(6, HIDDEN)
    with torch.no_grad():
        expected = peer(
            position_ids=torch.arange(29)[None], noise_embedding=block[None], target_hidden=features[None]
        )[0]
    torch.testing.assert_close(walk(ours, features, block, [23], None), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_stock_dflash_generation_drafts_the_same(family):
    """On targets with unscaled embeddings: the same drafts, so the same cycles, under transformers' own generator."""
    target, drafter, ids = make_target(family), make_drafter(initializer_range=0.6), prompt_ids(length=9)
    drafted = {"ours": [], "stock": []}
    for name, extra in (("ours", {}), ("stock", {"speculation_type": "dflash"})):
        seen = []
        hook = target.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].tolist()),
            with_kwargs=True,
        )
        target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter, **extra)
        hook.remove()
        drafted[name] = seen
    # Near the end ours offers only what the length leaves room for; stock drafts full blocks to the last.
    size = drafter.config.block_size
    full = {name: [ids[0] for ids in passes if len(ids[0]) == size] for name, passes in drafted.items()}
    assert len({tuple(block[1:]) for block in full["ours"]}) > 3
    assert full["stock"][: len(full["ours"])] == full["ours"]


def test_sample_from_anchor_offers_a_whole_block():
    target, ids = make_target("llama"), prompt_ids(length=9)
    drafter = make_drafter(dflash_config={"sample_from_anchor": True})
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)
    out = target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter)
    assert out.tolist() == expected.tolist() and len(drafter.last_run.offered) == drafter.config.block_size


@pytest.mark.parametrize("nested", [True, False])
def test_target_of_another_width(nested):
    """Own table and head, a target twice as wide: the features' projection takes the target's width."""
    where = {"dflash_config": {"target_hidden_size": 32}} if nested else {"target_hidden_size": 32}
    own = {"embed_tokens.weight": [64, 16], "lm_head.weight": [64, 16]}
    drafter = make_drafter(hidden_size=16, own_tensors=own, **where)
    assert drafter.fc.in_features == 3 * 32
    assert drafter.config.to_dict()["dflash_config"]["target_hidden_size"] == 32
    target, ids = make_target("llama"), prompt_ids(length=9)
    expected = target.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=drafter), expected)


def test_positions_follow_on_by_themselves():
    drafter, cache = make_drafter(), DFlashContextCache(2)
    generator = torch.Generator().manual_seed(0)
    done = 0
    for count in (5, 2, 3):
        context, block = torch.randn(1, count, 96, generator=generator), torch.randn(1, 4, 32, generator=generator)
        cache.set_previous_accepted_tokens(count)
        out = drafter(block, context, cache=cache).last_hidden_state
        positions = torch.arange(done, done + count + 4)[None]
        again = drafter(block, context, position_ids=positions, cache=cache).last_hidden_state
        torch.testing.assert_close(out, again)
        done += count

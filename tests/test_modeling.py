"""The drafter's forward against independent truths: a reference written from the rules, and PyPI dflash 0.1.0."""

import importlib.util

import pytest
import torch
from transformers import Qwen3Config
from transformers.cache_utils import DFlashCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from dflash_hf import DFlashConfig
from dflash_hf.drafter.cache import DFlashContextCache
from drafters import drafter_config, make_drafter
from reference import reference_block_embeds, reference_draft_hidden, reference_logits, target_layer_ids
from targets import HIDDEN, MASK, PAD, VOCAB, make_target, prompt_ids

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
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
    "llama3 rope": {"rope_parameters": LLAMA3},
    "longrope, short": {"rope_parameters": LONGROPE},
    "longrope, long": {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}},
    "dynamic rope, short": {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
    "dynamic rope, long": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}
# Their frequencies change when the text outgrows the trained length; keys that are cached by then keep the old ones,
# in the drafter as in transformers' models, so only one pass over everything has a closed form.
OUTGROWN = ("longrope, long", "dynamic rope, long")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_features(length, config):
    return random(length, len(config.target_layer_ids) * config.target_hidden_size)


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
    features, block = random_features(23, drafter.config), random(6, HIDDEN, seed=1)
    expected = expected_hidden(drafter, features, block)
    caches = {
        "one pass": (None, [23]),
        "own cache": (DFlashContextCache(2), [9, 10, 10, 16, 23]),  # a cut of no new context among them
        "stock cache": (DFlashCache(config=drafter.config), [9, 10, 16, 23]),
    }
    caches["stock cache"][0].activate_past_recording()
    for name in ["one pass"] if variant in OUTGROWN else caches:
        cache, cuts = caches[name]
        torch.testing.assert_close(walk(drafter, features, block, cuts, cache), expected, atol=1e-5, rtol=0, msg=name)


PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Wrong readings of every variant, as somebody could make them: the reference must see each.
WRONG = {
    "full": [{"is_causal": True}, {"layer_types": [SLIDING, SLIDING], "sliding_window": 23, "is_causal": False}],
    "biases": [{"attention_bias": False}],
    "sliding causal": [{"sliding_window": 7}, {"sliding_window": 5}, {"is_causal": False}, {"layer_types": None}],
    "mixed": [
        {"layer_types": [FULL, SLIDING]}, {"layer_types": [SLIDING, SLIDING]}, {"is_causal": True},
        {"is_causal": False}, {"sliding_window": 7},
    ],
    "sliding, is_causal false": [{"is_causal": None}, {"sliding_window": 5}, {"sliding_window": 7}],
    "sliding, nested causal false": [{"dflash_config": {}}, {"sliding_window": 4}, {"sliding_window": 2}],
    "full, is_causal true": [{"is_causal": None}],
    "swa_window_size wins": [{"dflash_config": {}}, {"dflash_config": {"swa_window_size": 6}}],
    "use_swa": [{"dflash_config": {}}, {"dflash_config": {"use_swa": True, "causal": True}}, {"sliding_window": 4}],
    "use_swa causal": [{"dflash_config": {"use_swa": True}}, {"dflash_config": {"causal": True}}],
    "use_swa beside layer types": [{"layer_types": [SLIDING, SLIDING]}, {"layer_types": None}, {"is_causal": False}],
    "sinks": [{"dflash_config": {}}],
    "sinks where sliding": [{"dflash_config": {}}, {"dflash_config": {"attention_sink_bias": True}}],
    "interleaved rope": [{"is_neox_style": True}],
    "rope base": [PLAIN_ROPE],
    "yarn": [PLAIN_ROPE, {"rope_parameters": YARN | {"attention_factor": 1.0}}],
    "linear rope": [PLAIN_ROPE],
    "llama3 rope": [PLAIN_ROPE, {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.5}}],
    "longrope, short": [PLAIN_ROPE, {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}}],
    "longrope, long": [PLAIN_ROPE, {"rope_parameters": LONGROPE}],
    "dynamic rope, short": [{"rope_parameters": DYNAMIC | {"rope_type": "linear"}}, {"max_position_embeddings": 16}],
    "dynamic rope, long": [PLAIN_ROPE, {"max_position_embeddings": 64}],
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_wrong_readings_are_seen(variant):
    right = make_drafter(block_size=6, **VARIANTS[variant])
    features, block = random_features(23, right.config), random(6, HIDDEN, seed=1)
    expected = expected_hidden(right, features, block)
    for wrong in WRONG[variant]:
        misread = make_drafter(block_size=6, **VARIANTS[variant] | wrong)
        misread.load_state_dict(right.state_dict(), strict=False)
        assert (walk(misread, features, block, [23], None) - expected).abs().max() > 1e-3, wrong


SCALE = HIDDEN**0.5
# name -> options, own tensors, and options or changes of the drafter that misread them
ENDS = {
    "plain": ({}, None, [{"input_embedding_scale": SCALE}]),
    "embedding scale": ({"input_embedding_scale": 6.0}, None, [{}, {"input_embedding_scale": 6.0 / SCALE}]),
    "output multiplier": ({"output_multiplier": 0.5}, None, [{}, {"output_multiplier": 2.0}]),
    "softcap": ({"final_logit_softcapping": 3.0}, None, [{}]),
    "multiplier and softcap": (
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}, None,
        [{"output_multiplier": 0.5}, {"final_logit_softcapping": 3.0},
         {"output_multiplier": 0.5, "final_logit_softcapping": 1.5}],
    ),
    "own table and head": ({}, {"lm_head.weight": [VOCAB, HIDDEN], "embed_tokens.weight": [VOCAB, HIDDEN]}, [None]),
    "reduced vocabulary": ({}, {"lm_head.weight": [20, HIDDEN], "d2t": [20]}, ["ids for offsets"]),
}  # fmt: skip


def ends(drafter, embeddings, head):
    with torch.no_grad():
        embeds = drafter.embed_block(torch.tensor([[9, MASK, MASK]]), embeddings)[0]
        return embeds, drafter.compute_logits(random(1, 3, HIDDEN, seed=2) * 3, head, VOCAB)[0]


def differ(a, b):
    return not all(torch.allclose(x, y, atol=1e-3) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", ENDS)
def test_logits_and_embeddings_equal_the_reference(case, masked):
    options, own, misreadings = ENDS[case]
    table, head = random(VOCAB, HIDDEN, seed=3), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data = random(VOCAB, HIDDEN, seed=4)
    embeddings = Gemma3TextScaledWordEmbedding(VOCAB, HIDDEN, PAD, embed_scale=SCALE)
    embeddings.weight.data = table
    drafter = make_drafter(own_tensors=own, dflash_config=options)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(20) * 2)  # draft id i is target id 3 i
    drafter.mask_embedding = random(HIDDEN, seed=5) if masked else None
    state, config = drafter.state_dict(), drafter.config.to_dict()
    expected = (
        reference_block_embeds(state, config, table, torch.tensor([9, MASK, MASK]), drafter.mask_embedding),
        reference_logits(state, config, random(3, HIDDEN, seed=2) * 3, head.weight.data),
    )
    torch.testing.assert_close(ends(drafter, embeddings, head), expected)
    assert expected[1].shape == (3, VOCAB)

    for wrong in misreadings:
        if wrong == "ids for offsets":
            misread = make_drafter(own_tensors=own)
            misread.load_state_dict(state)
            misread.d2t -= torch.arange(20)
        else:  # None: the drafter's own table and head are overlooked
            misread = make_drafter(own_tensors=own if wrong is not None else None, dflash_config=wrong)
            misread.load_state_dict(state, strict=False)
        misread.mask_embedding = drafter.mask_embedding
        assert differ(ends(misread, embeddings, head), expected), wrong
    if masked:
        drafter.mask_embedding = None
        assert differ(ends(drafter, embeddings, head), expected)


class PackedScaled(torch.nn.Module):
    """A scaled embedding whose table only the module itself can read, as a quantized Gemma's."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("weight", table.to(torch.int8))
        self.embed_scale = torch.tensor(SCALE)

    def forward(self, ids):
        return self.weight[ids].float() * self.embed_scale


def test_raw_rows_of_a_scaled_table_that_is_packed():
    table = (random(VOCAB, HIDDEN) * 20).round()
    embeds = make_drafter().embed_block(torch.tensor([[9, MASK]]), PackedScaled(table))
    torch.testing.assert_close(embeds[0], table[[9, MASK]])


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama"])
def test_generate_hands_the_drafter_raw_rows(family):
    target, drafter, seen = make_target(family), make_drafter(), []
    drafter.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["noise_embeds"][0]), with_kwargs=True
    )
    out = target.generate(prompt_ids(length=9), do_sample=False, max_new_tokens=6, assistant_model=drafter)
    table = target.get_input_embeddings().weight
    for embeds in seen:
        assert torch.equal(embeds[1:], table[[MASK] * (len(embeds) - 1)])
        assert any(torch.equal(embeds[0], table[token]) for token in out[0, 9:])


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


needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None, reason="needs PyPI dflash 0.1.0 (pip install --no-deps)"
)


def peer_of(ours):
    """PyPI dflash's drafter with the same config and weights."""
    from dflash import DFlashDraftModel as Peer

    raw = ours.config.to_dict() | {"use_sliding_window": True}
    for name in ("auto_map", "architectures", "rope_scaling", "rope_theta", "dtype", "is_neox_style"):
        raw.pop(name, None)
    config = Qwen3Config.from_dict(raw)
    config._attn_implementation = "sdpa"
    peer = Peer(config).eval()
    peer.load_state_dict(ours.state_dict())
    return peer


@needs_peer
@pytest.mark.parametrize(
    "variant",
    ["full", "biases", "sliding causal", "mixed", "sliding, is_causal false", "full, is_causal true", "rope base",
     "yarn", "linear rope", "llama3 rope", "longrope, short", "longrope, long", "dynamic rope, long"],
)  # fmt: skip
def test_parity_with_pypi_dflash(variant):
    ours = make_drafter(block_size=6, **VARIANTS[variant])
    features, block = random_features(23, ours.config), random(6, HIDDEN, seed=1)
    with torch.no_grad():
        expected = peer_of(ours)(
            position_ids=torch.arange(29)[None], noise_embedding=block[None], target_hidden=features[None]
        )[0]
    torch.testing.assert_close(walk(ours, features, block, [23], None), expected, atol=1e-5, rtol=0)


@needs_peer
@pytest.mark.parametrize("case", [name for name, (_, own, _) in ENDS.items() if own is None])
def test_parity_with_pypi_dflash_at_both_ends(case):
    from dflash.model import _draft_value, _raw_input_embeddings

    target, ours = make_target("gemma3"), make_drafter(dflash_config=ENDS[case][0])
    peer, ids, hidden = peer_of(ours), torch.tensor([[9, MASK, MASK]]), random(1, 3, HIDDEN, seed=2) * 3
    embeddings, head = target.get_input_embeddings(), target.get_output_embeddings()
    with torch.no_grad():
        scale = float(_draft_value(peer.config, "input_embedding_scale", 1.0))
        torch.testing.assert_close(ours.embed_block(ids, embeddings), _raw_input_embeddings(target, ids, scale))
        torch.testing.assert_close(ours.compute_logits(hidden, head, VOCAB), peer.compute_logits(hidden, head))


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


@pytest.mark.parametrize("variant", ["full", "sliding causal", "use_swa", "full, is_causal true", "sinks"])
def test_flash_attention_is_refused_where_a_mask_is_needed(variant, monkeypatch):
    drafter, asked = make_drafter(**VARIANTS[variant]), []

    def kernel(module, q, k, v, mask, **kwargs):  # the real one needs a GPU
        asked.append(mask)
        return torch.zeros_like(q).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", kernel)
    drafter.config._attn_implementation = "flash_attention_2"
    features, block = random_features(9, drafter.config), random(4, HIDDEN)
    if variant == "full":
        walk(drafter, features, block, [9], None)
        assert asked == [None, None]
    else:
        message = r'Layer 0 .* mask or a sink, which flash_attention_2 cannot take.*attn_implementation="sdpa"'
        with pytest.raises(ValueError, match=message):
            walk(drafter, features, block, [9], None)
        assert not asked


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

"""The hook into generate(): reversible, shared by copies of the code, invisible to every other way of assisting."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CpmAntConfig, CpmAntForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.generation.utils import GenerationMixin

from dflash_hf.drafter import dispatch
from drafters import make_drafter
from targets import HIDDEN, NUM_LAYERS, VOCAB, make_target, prompt_ids

NAMES = ("_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding")
OURS = "dflash_hf.drafter.modeling_dflash"


@pytest.fixture
def unhooked():
    """Transformers as it came; the hook is put back afterwards."""
    state = GenerationMixin.__dict__[dispatch._STATE]
    owners = set(state["owners"])
    for owner in owners:
        dispatch.remove(owner)
    yield dict(state["originals"])
    for name, original in state["originals"].items():
        setattr(GenerationMixin, name, original)
    if dispatch._STATE in GenerationMixin.__dict__:
        delattr(GenerationMixin, dispatch._STATE)
    for owner in owners:
        dispatch.install(owner)


def methods():
    return {name: GenerationMixin.__dict__[name] for name in NAMES}


def second_copy():
    """The dispatch file once more, as trust_remote_code would load it."""
    spec = importlib.util.spec_from_file_location("remote_copy.dispatch", Path(dispatch.__file__))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_removing_restores_transformers(unhooked):
    assert methods() == unhooked
    dispatch.install("a")
    hooked = methods()
    assert all(hooked[name] is not unhooked[name] for name in NAMES)
    dispatch.install("a")
    assert methods() == hooked
    dispatch.remove("a")
    dispatch.remove("a")
    assert methods() == unhooked


@pytest.mark.parametrize("first_out", ["a", "b"])
def test_two_copies_share_one_hook(unhooked, first_out):
    copy = second_copy()
    dispatch.install("a")
    hooked = methods()
    copy.install("b")
    assert methods() == hooked
    target, drafter, ids = make_target("llama"), make_drafter(), prompt_ids(length=6)
    {"a": dispatch, "b": copy}[first_out].remove(first_out)
    assert methods() == hooked
    target.generate(ids, do_sample=False, max_new_tokens=4, assistant_model=drafter)
    assert drafter.last_run.tokens == 4
    {"a": copy, "b": dispatch}[first_out].remove({"a": "b", "b": "a"}[first_out])
    assert methods() == unhooked


def test_a_newer_copy_takes_over(unhooked):
    copy = second_copy()
    dispatch.install("old")
    copy.PROTOCOL = dispatch.PROTOCOL + 1
    asked = []
    copy._HANDLERS = {
        name: (lambda original, *args, _name=name, **kwargs: (asked.append(_name), original(*args, **kwargs))[1])
        for name in NAMES
    }
    copy.install("new")
    make_target("llama").generate(prompt_ids(length=6), do_sample=False, max_new_tokens=2, prompt_lookup_num_tokens=2)
    assert set(asked) == set(NAMES)
    dispatch.remove("old")
    copy.remove("new")
    assert methods() == unhooked


def test_somebody_elses_wrapper_on_top_is_left_alone(unhooked):
    dispatch.install("a")
    ours = GenerationMixin._get_candidate_generator

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    GenerationMixin._get_candidate_generator = theirs
    dispatch.remove("a")
    assert GenerationMixin._get_candidate_generator is theirs
    target, ids = make_target("llama"), prompt_ids(length=6)
    expected = target.generate(ids, do_sample=False, max_new_tokens=8)
    out = target.generate(ids, do_sample=False, max_new_tokens=8, prompt_lookup_num_tokens=3)
    assert out.tolist() == expected.tolist()
    dispatch.install("a")  # alive again through the same wrapper
    drafter = make_drafter()
    target.generate(ids, do_sample=False, max_new_tokens=8, assistant_model=drafter)
    assert drafter.last_run.tokens == 8


def other_assistants():
    small = make_target("llama", seed=1, num_hidden_layers=2)
    return {
        "small model": {"assistant_model": small},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "early exit": {"assistant_early_exit": 3},
        "native dflash": {"assistant_model": make_drafter(), "speculation_type": "dflash"},
    }


@pytest.mark.parametrize("kind", ["small model", "prompt lookup", "early exit", "native dflash"])
def test_other_assistants_behave_as_before(unhooked, kind):
    """The same passes of the target on the same tokens, with the hook and without."""
    target, ids = make_target("llama"), prompt_ids(length=9)
    traces = []
    for hooked in (False, True):
        if hooked:
            dispatch.install("a")
        seen = []
        hook = target.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].tolist()),
            with_kwargs=True,
        )
        out = target.generate(ids, do_sample=False, max_new_tokens=16, **other_assistants()[kind])
        hook.remove()
        traces.append((out.tolist(), seen))
    assert traces[0] == traces[1]


def test_prompt_lookup_and_early_exit_take_precedence():
    target, ids = make_target("llama"), prompt_ids(length=9)
    for extra in ({"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 3}):
        drafter = make_drafter()
        target.generate(ids, do_sample=False, max_new_tokens=6, assistant_model=drafter, **extra)
        assert drafter.last_run is None


def test_mtp_takes_precedence(monkeypatch):
    class Asked(Exception):
        pass

    def mtp(main_model, **kwargs):
        raise Asked

    monkeypatch.setattr(transformers.generation.utils, "MTPCandidateGenerator", mtp)
    target, drafter = make_target("llama"), make_drafter()
    with pytest.raises(Asked):
        target.generate(
            prompt_ids(length=9), do_sample=False, max_new_tokens=6, assistant_model=drafter, use_mtp=True
        )
    assert drafter.last_run is None


def encoder_decoder():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def knob(**settings):
    def build():
        drafter = make_drafter()
        for name, value in settings.items():
            setattr(drafter.generation_config, name, value)
        return drafter

    return build


ids = prompt_ids(length=6)
REFUSED = {
    "vocabulary": (lambda: make_drafter(vocab_size=65), {}, "65 tokens, the target has 64"),
    "width": (lambda: make_drafter(hidden_size=64), {}, "width 64, the target's are 32"),
    "layers": (lambda: make_drafter(target_layer_ids=[1, NUM_LAYERS]), {}, f"layers 0 to {NUM_LAYERS - 1}"),
    "borrowed width": (
        lambda: make_drafter(hidden_size=64, dflash_config={"target_hidden_size": 32}), {}, "must ship them"),
    "guidance": (make_drafter, {"guidance_scale": 2.0}, "guidance_scale=2.0"),
    "schedule": (knob(num_assistant_tokens_schedule="heuristic"), {}, '"constant", "adaptive" or None.*heuristic'),
    "way of sampling": (knob(assistant_sampling="gumbel"), {}, '"rejection", "coupled" or None.*gumbel'),
    "beams": (make_drafter, {"num_beams": 2}, "ask for beam_search"),
    "no cache": (make_drafter, {"use_cache": False}, "needs the target's cache"),
    "no drafts": (knob(num_assistant_tokens=0), {}, "num_assistant_tokens must be a whole number from 1 on.*got 0"),
    "half drafts": (knob(num_assistant_tokens=2.5), {}, "num_assistant_tokens must be a whole number.*got 2.5"),
    "confidence": (knob(assistant_confidence_threshold=2), {}, "must be a probability from 0 to 1.*got 2"),
    "tokenizer": (make_drafter, {"assistant_tokenizer": 1, "tokenizer": 2}, "leave out `assistant_tokenizer`"),
    "one tokenizer": (make_drafter, {"assistant_tokenizer": 1}, "leave out `assistant_tokenizer`"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_before_any_token(case):
    build, kwargs, message = REFUSED[case]
    target, drafter = make_target("llama"), build()
    passes = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=message):
        target.generate(ids, max_new_tokens=4, assistant_model=drafter, **kwargs)
    assert not passes


def test_encoder_decoder_targets_are_refused():
    with pytest.raises(ValueError, match="decoder-only targets"):
        encoder_decoder().generate(ids, max_new_tokens=4, assistant_model=make_drafter())


NO_CACHE = {
    "no cache object": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 5}),
    "no cache at all": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 5}),
}


@pytest.mark.parametrize("case", NO_CACHE)
def test_targets_without_a_cache_are_refused(case):
    config_name, model_name, sizes = NO_CACHE[case]
    config = getattr(transformers, config_name)(vocab_size=64, **sizes)
    target = getattr(transformers, model_name)(config).eval()
    with pytest.raises(ValueError, match=r"cache.*without assistant_model"):
        target.generate(ids, do_sample=False, max_new_tokens=4, assistant_model=make_drafter())


def test_targets_that_lengthen_the_prompt_are_refused():
    """CPM-Ant puts learnt positions before it, which are in its cache and in no ids."""
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 64}
    config = CpmAntConfig(vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS, prompt_types=4, prompt_length=4, **sizes)
    target = CpmAntForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"own before a prompt \(13 for 9 tokens\).*without assistant_model"):
        target.generate(prompt_ids(length=9), max_new_tokens=4, assistant_model=make_drafter(), pad_token_id=0)


def test_features_narrower_than_the_hidden_size():
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=5, num_attention_heads=4
    )  # its last hidden state is projected down for the head
    target = transformers.OPTForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"reads 96 context features a position.*give 80"):
        target.generate(ids, do_sample=False, max_new_tokens=4, assistant_model=make_drafter())


def test_the_drafter_as_the_main_model_says_what_to_do():
    with pytest.raises(AttributeError, match=r"target\.generate\(\.\.\., assistant_model=drafter\)"):
        make_drafter().generate(ids)
    assert not hasattr(make_drafter(), "generate")


def test_no_head_to_borrow():
    target = make_target("llama")
    target.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="get_output_embeddings"):
        target.generate(ids, max_new_tokens=4, assistant_model=make_drafter())
    own = make_drafter(own_tensors={"lm_head.weight": [64, 32]})
    expected = target.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=own), expected)

"""generate(assistant_model=drafter) against plain generate(), on tiny random targets."""

import functools
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, WatermarkingConfig, pipeline
from transformers.generation import LogitsProcessor, StoppingCriteria, stopping_criteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashConfig
from dflash_hf.drafter.candidates import top_probability
from dflash_hf.drafter.configuration_dflash import OPTIONS
from dflash_hf.drafter.passes import why_not_slots
from drafters import BLOCK, HITS, make_drafter, oracle, transformers_loop
from targets import BOS, EOS, FAMILIES, PAD, VLM_FAMILIES, VOCAB, WINDOW, make_target, prompt_ids, vlm_inputs

NEW = 24


def plain(target, inputs, **kwargs):
    return target.generate(**inputs, do_sample=False, **kwargs)


@functools.cache
def target_of(family):
    """Shared between tests, which leave it as it is."""
    return make_target(family)


def prompts(family):
    """One token, and more than every window; where the family sees, images in two prompts instead."""
    yield {"input_ids": prompt_ids(length=1)}
    if family in VLM_FAMILIES:
        yield vlm_inputs(target_of(family), length=2, grid=(2, 2))
        yield vlm_inputs(target_of(family), length=20, grid=(4, 6))
    else:
        yield {"input_ids": prompt_ids(length=WINDOW + 2 * BLOCK)}


@functools.cache
def greedy_texts(family):
    return [plain(target_of(family), inputs, max_new_tokens=NEW)[0].tolist() for inputs in prompts(family)]


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_plain_generate(family, hit):
    target, ended = target_of(family), set()
    for inputs, text in zip(prompts(family), greedy_texts(family), strict=True):
        length, drafter = inputs["input_ids"].shape[1], oracle(text, hit)
        for new in (1, BLOCK - 1, BLOCK, BLOCK + 1, NEW):
            out = plain(target, inputs, max_new_tokens=new, assistant_model=drafter)
            assert out[0].tolist() == text[: length + new]
            run = drafter.last_run
            assert run.tokens == new
            if hit == "always":  # the prefill's token, then a full block every cycle, the last one clipped
                assert run.cycles == -(-(new - 1) // BLOCK)
            if hit == "never":
                assert run.cycles == new - 1
        # EOS as the prefill's token and at every slot of a block that is accepted in full; once each is enough.
        for at in range(length, length + NEW):
            slot = "prefill" if at == length else (at - length - 1) % BLOCK
            if slot not in ended and text[at] not in text[length:at]:
                stop = dict(eos_token_id=[EOS, text[at]], pad_token_id=PAD)
                out = plain(target, inputs, max_new_tokens=NEW, assistant_model=drafter, **stop)
                assert out[0].tolist() == text[: at + 1]
                ended.add(slot)
    assert ended == {"prefill", *range(BLOCK)}


@pytest.mark.parametrize("hit", HITS)
def test_max_length_counts_the_prompt(hit):
    text = greedy_texts("llama")[1]
    length, drafter = len(text) - NEW, oracle(text, hit)
    for new in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        ids = torch.tensor([text[:length]])
        out = plain(target_of("llama"), {"input_ids": ids}, max_length=length + new, assistant_model=drafter)
        assert out[0].tolist() == text[: length + new]


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("seconds", [0.5, 3.5, 10.5])
def test_max_time_ends_the_text_in_the_pass_that_exceeds_it(seconds, hit, monkeypatch):
    clock = SimpleNamespace(now=0.0, time=lambda: clock.now)
    monkeypatch.setattr(stopping_criteria, "time", clock)
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=64)[0].tolist()
    target.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 1))  # a pass takes a second
    expected = plain(target, {"input_ids": ids}, max_new_tokens=64, max_time=seconds)
    assert expected.shape[1] == 9 + int(seconds + 1)
    drafter = oracle(text, hit)
    out = plain(target, {"input_ids": ids}, max_new_tokens=64, max_time=seconds, assistant_model=drafter)[0].tolist()
    assert drafter.last_run.target_passes == int(seconds + 1)
    assert out == text[: len(out)] and len(out) == 9 + drafter.last_run.tokens
    if hit == "always":
        assert len(out) > 9 + BLOCK * (int(seconds + 1) - 2)
    if hit == "never":
        assert out == expected[0].tolist()


def offered(target, drafter, inputs, **kwargs):
    """The generated ids, and what the target was asked to verify: anchor and drafts of every cycle."""
    blocks = []
    hook = target.register_forward_pre_hook(
        lambda _, args, kwargs: blocks.append(kwargs["input_ids"]), with_kwargs=True
    )
    out = plain(target, inputs, max_new_tokens=NEW, assistant_model=drafter, **kwargs)
    hook.remove()
    blocks = [block[0].tolist() for block in blocks[-drafter.last_run.cycles :]]
    # Drafts that hang on the context as they should are no few constants.
    assert len({tuple(block[1:]) for block in blocks}) > len(blocks) / 3 > 5
    return out[0, -NEW:].tolist(), blocks


def documented(heading):
    """The cells of the table under this heading of docs/compatibility.md, without its first two lines."""
    text = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text().split(f"## {heading}\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_documented_families_are_those_of_the_tests():
    facts = []
    for family in FAMILIES:
        target = target_of(family)
        cache = DynamicCache(config=target.config)
        slides = [layer.is_sliding for layer in cache.layers]
        facts.append([
            f"`{family}`", type(target).__name__, "all" if all(slides) else "some" if any(slides) else "none",
            "yes" if why_not_slots(target, cache) is None else "no",
            "text and images" if family in VLM_FAMILIES else "text",
        ])  # fmt: skip
    assert documented("Targets") == facts


def test_every_option_of_a_drafter_is_documented():
    names = {name for row in documented("Options of a drafter") for name in re.findall(r"`(\w+)`", row[0])}
    assert names >= set(OPTIONS)
    older = {"rope_scaling", "rope_theta"}
    assert all(hasattr(DFlashConfig, name) for name in names - set(OPTIONS) - older)


class NoSeven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 7 + input_ids.shape[1] % 3 :: 5] -= 2.0
        return scores


GREEDY_OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[9], [11, 12], [20]]},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(8 + len(ids) % 2, VOCAB, 2))},
    "custom_processor": {"logits_processor": [NoSeven()]},
    "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": [13, 21, 30], "pad_token_id": PAD},
    "suppress": {"suppress_tokens": [9, 10, 11, 12, 13, 14, 15]},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[30], -8.0]]},
}


@pytest.mark.parametrize("option", GREEDY_OPTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_options_that_change_greedy_text(family, option):
    target, ids = make_target(family), prompt_ids(length=9)
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW, **GREEDY_OPTIONS[option])
    for hit in HITS:
        drafter = oracle(expected[0].tolist(), hit)
        out = plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter, **GREEDY_OPTIONS[option])
        assert out.tolist() == expected.tolist()
        if hit == "always":
            assert drafter.last_run.tau > 2  # the drafts went through the processors, or were not hurt by them


@pytest.mark.parametrize("hit", HITS)
def test_transformers_own_loop_gives_the_same_text_in_the_same_passes(hit):
    target, ids = make_target("llama"), prompt_ids(length=9)
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW)
    drafter = oracle(expected[0].tolist(), hit)
    plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
    ours = drafter.last_run
    out = plain(target, {"input_ids": ids}, max_new_tokens=NEW, custom_generate=transformers_loop(drafter))
    assert out.tolist() == expected.tolist()
    assert (drafter.last_run.tokens, drafter.last_run.accepted) == (ours.tokens, ours.accepted)
    assert drafter.last_run is not ours


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("length", range(10, 10 + 2 * BLOCK))
def test_a_stopping_criterion_ends_the_text_where_plain_generate_does(hit, length):
    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= length)

    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    tokens = Tokens()
    out = plain(
        target,
        {"input_ids": ids},
        max_new_tokens=NEW,
        stopping_criteria=[StopAt()],
        assistant_model=oracle(text, hit),
        streamer=tokens,
    )
    assert out[0].tolist() == text[:length] == tokens.seen


@pytest.mark.parametrize("hit", HITS)
def test_stop_strings_end_the_text_inside_a_block(hit, byte_tokenizer):
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    for at in range(12, 12 + BLOCK):
        stop = dict(stop_strings=byte_tokenizer.decode(text[at - 1 : at + 1]), tokenizer=byte_tokenizer)
        expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW, **stop)
        assert expected.shape[1] <= at + 1
        seen = []

        def note(ids, scores, seen=seen):
            seen.append(ids.shape[1])
            return scores

        out = plain(
            target,
            {"input_ids": ids},
            max_new_tokens=NEW,
            assistant_model=oracle(text, hit),
            logits_processor=[note],
            **stop,
        )
        assert out.tolist() == expected.tolist()
        assert seen == list(range(9, out.shape[1]))  # a processor is not shown what lies behind the end


class Tokens(BaseStreamer):
    """Everything that was streamed, the prompt too, one token a put after it."""

    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        assert not self.seen or value.shape == (1,)
        self.seen += value.flatten().tolist()

    def end(self):
        self.ended += 1


def turns(target, drafter, how, cache):
    """A second turn on the cache of a first: its ids given in full, or only the new ones under the full mask."""
    first = prompt_ids(length=9)
    text = plain(target, {"input_ids": first}, max_new_tokens=10, cache=cache, assistant_model=drafter)
    full = torch.cat([text, prompt_ids(length=5, seed=3)], dim=1)
    if how == "full ids":
        inputs = {"input_ids": full}
    else:
        inputs = {"input_ids": full[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(full)}
    return full, inputs


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mistral"])
@pytest.mark.parametrize("how", ["full ids", "new ids"])
def test_a_cache_from_an_earlier_turn(family, how, recwarn):
    target = target_of(family)
    cache, drafter = DynamicCache(config=target.config), make_drafter(initializer_range=0.6)
    full, inputs = turns(target, drafter, how, cache)
    fresh = offered(target, drafter, {"input_ids": full})
    assert fresh[0] == plain(target, {"input_ids": full}, max_new_tokens=NEW)[0, -NEW:].tolist()
    assert offered(target, drafter, inputs, cache=cache) == fresh  # the context reaches back to the first turn
    assert cache.get_seq_length() == full.shape[1] + NEW - 1
    assert not [w for w in recwarn if "earlier turn" in str(w.message)]


def test_a_third_turn_after_new_ids(recwarn):
    target = target_of("llama")
    cache, drafter = DynamicCache(config=target.config), make_drafter(initializer_range=0.6)
    full, inputs = turns(target, drafter, "new ids", cache)
    text = plain(target, inputs, max_new_tokens=6, cache=cache, assistant_model=drafter)
    full = torch.cat([full, text[:, inputs["input_ids"].shape[1] :], prompt_ids(length=4, seed=8)], dim=1)
    warm = offered(target, drafter, {"input_ids": full}, cache=cache)
    assert warm == offered(target, drafter, {"input_ids": full})
    assert warm[0] == plain(target, {"input_ids": full}, max_new_tokens=NEW)[0, -NEW:].tolist()
    assert not [w for w in recwarn if "earlier turn" in str(w.message)]


@pytest.mark.parametrize("how", ["full ids", "new ids"])
def test_a_cache_that_the_drafter_did_not_see(how):
    target, cache = make_target("llama"), DynamicCache()
    full, inputs = turns(target, None, how, cache)
    expected = plain(target, {"input_ids": full}, max_new_tokens=NEW)
    drafter = oracle(expected[0].tolist(), "sometimes")
    with pytest.warns(UserWarning, match="earlier turn") as caught:
        out = plain(target, inputs, max_new_tokens=NEW, cache=cache, assistant_model=drafter)
    assert len([w for w in caught if "earlier turn" in str(w.message)]) == 1
    assert out[0, -NEW:].tolist() == expected[0, -NEW:].tolist()
    # The oracle drafts by position: with true positions it is right as often as in a fresh run.
    run = drafter.last_run
    plain(target, {"input_ids": full}, max_new_tokens=NEW, assistant_model=drafter)
    assert run.accepted == drafter.last_run.accepted


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_embedded_prompts(family, padding):
    target, ids = make_target(family), prompt_ids(length=9)
    padded = torch.cat([torch.full((1, padding), PAD), ids], dim=1)
    inputs = {
        "inputs_embeds": target.get_input_embeddings()(padded),
        "attention_mask": (torch.arange(9 + padding) >= padding).long()[None],
    }
    expected = plain(target, inputs, max_new_tokens=NEW)
    wants = dict(return_dict_in_generate=True, output_hidden_states=True)
    states = plain(target, inputs, max_new_tokens=NEW, **wants).hidden_states
    shapes = [[state.shape for state in step] for step in states]
    for hit in HITS:
        drafter = oracle([0] * 9 + expected[0].tolist(), hit)
        out = plain(target, inputs, max_new_tokens=NEW, assistant_model=drafter)
        assert out.tolist() == expected.tolist()
        full = plain(target, inputs, max_new_tokens=NEW, assistant_model=drafter, **wants)
        assert [[state.shape for state in step] for step in full.hidden_states] == shapes
        if hit == "always":
            assert drafter.last_run.cycles == -(-(NEW - 1) // BLOCK)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("chunk", [1, 4, 9, 50])
def test_prompts_in_chunks(family, chunk):
    target, drafter = target_of(family), make_drafter(initializer_range=0.6)
    inputs = {"input_ids": prompt_ids(length=21)}
    whole = offered(target, drafter, inputs)
    assert whole[0] == plain(target, inputs, max_new_tokens=NEW)[0, -NEW:].tolist()
    assert offered(target, drafter, inputs, prefill_chunk_size=chunk) == whole  # with the features of all chunks


def test_processors_see_committed_text_only_and_each_length_once():
    class Noting(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids[0].tolist())
            return scores

    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    for hit in HITS:
        noting = Noting()
        plain(
            target,
            {"input_ids": ids},
            max_new_tokens=NEW,
            assistant_model=oracle(text, hit),
            logits_processor=[noting],
        )
        assert noting.seen == [text[:n] for n in range(9, 9 + NEW)]


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("at", range(10, 10 + BLOCK))
def test_nothing_sees_what_lies_behind_the_end(hit, at):
    """A grammar is asked once for every token that is committed, and never after the end."""
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    text = text[: text.index(text[at], 9) + 1]  # up to its first occurrence
    seen = []

    def allowed(batch, sentence):
        seen.append(len(sentence))
        return list(range(VOCAB)) if len(sentence) < len(text) else []

    settings = dict(eos_token_id=text[-1], pad_token_id=PAD, prefix_allowed_tokens_fn=allowed)
    out = plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=oracle(text, hit), **settings)
    assert out[0].tolist() == text and seen == list(range(9, len(text)))


def test_a_draft_vocabulary_of_which_nothing_is_allowed():
    target, ids = make_target("llama"), prompt_ids(length=9)
    own = {"lm_head.weight": [8, 32], "d2t": [8]}
    drafter = make_drafter(own_tensors=own)
    drafter.d2t += 8  # the draft vocabulary: ids 8 to 15
    for do_sample in (True, False):
        for extra in ({}, {"repetition_penalty": 1.2}):
            out = target.generate(
                ids, do_sample=do_sample, max_new_tokens=NEW, assistant_model=drafter,
                suppress_tokens=list(range(8, 16)), **extra,
            )  # fmt: skip
            assert out.shape == (1, 9 + NEW) and not torch.isin(out[0, 9:], torch.arange(8, 16)).any()
            assert not drafter.last_run.offered


def test_watermarks_are_those_of_plain_generate():
    target, ids = make_target("llama"), prompt_ids(length=9)
    mark = dict(watermarking_config=WatermarkingConfig(greenlist_ratio=0.5, bias=2.0, context_width=1))
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW, **mark)
    for hit in HITS:
        drafter = oracle(expected[0].tolist(), hit)
        assert plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter, **mark).tolist() == (
            expected.tolist()
        )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_static_caches(family):
    target, ids = make_target(family), prompt_ids(length=9)
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW)
    for hit in HITS:
        drafter = oracle(expected[0].tolist(), hit)
        out = plain(
            target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter, cache_implementation="static"
        )
        assert out.tolist() == expected.tolist()


def test_a_cache_that_cannot_be_cropped_is_refused():
    target, ids = make_target("mistral"), prompt_ids(length=30)  # longer than its window
    with pytest.raises(ValueError, match="cannot be cropped"):
        plain(
            target, {"input_ids": ids}, max_new_tokens=4, assistant_model=make_drafter(), cache_implementation="static"
        )


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_left_padding_leaves_text_and_drafts_as_they_are(family):
    target, ids, drafter = target_of(family), prompt_ids(length=9), make_drafter(initializer_range=0.6)
    padded = {
        "input_ids": torch.cat([torch.full((1, 4), PAD), ids], dim=1),
        "attention_mask": (torch.arange(13) >= 4).long()[None],
    }
    expected = offered(target, drafter, {"input_ids": ids})
    assert offered(target, drafter, padded, pad_token_id=PAD) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_everything_that_return_dict_holds(family):
    target, ids = make_target(family, attn_implementation="eager"), prompt_ids(length=9)
    wants = dict(
        max_new_tokens=10, return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    expected = plain(target, {"input_ids": ids}, **wants)
    out = plain(
        target,
        {"input_ids": ids},
        assistant_model=oracle(expected.sequences[0].tolist(), "sometimes"),
        **wants,
    )
    assert out.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(getattr(out, name)), torch.stack(getattr(expected, name)), atol=1e-4, rtol=1e-4
        )
    assert len(out.hidden_states) == len(out.attentions) == 10
    for step, expected_step in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert len(step) == len(expected_step)
        for layer, expected_layer in zip(step, expected_step, strict=True):
            torch.testing.assert_close(layer, expected_layer, atol=1e-4, rtol=1e-4)


def test_knobs_on_the_generation_config():
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)
    for drafts in (1, 2, BLOCK - 1, 50):
        drafter = oracle(text[0].tolist(), "always")
        drafter.generation_config.num_assistant_tokens = drafts
        assert plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter).tolist() == text.tolist()
        assert drafter.last_run.cycles == -(-(NEW - 1) // (min(drafts, BLOCK - 1) + 1))

    class Unsure(type(drafter)):
        """Sure of slot 0 alone: flat logits behind it."""

        def compute_logits(self, hidden, target_head, vocab_size):
            logits = super().compute_logits(hidden, target_head, vocab_size)
            logits[:, 1:] = 0
            return logits

    drafter = make_drafter(cls=Unsure)
    drafter.text, drafter.hit = text[0].tolist(), HITS["always"]
    drafter.generation_config.assistant_confidence_threshold = 0.5
    assert plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter).tolist() == text.tolist()
    assert len(drafter.last_run.offered) == 1 and drafter.last_run.acceptance_by_position == [1.0]
    drafter.generation_config.assistant_confidence_threshold = None
    plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
    assert len(drafter.last_run.offered) == BLOCK - 1


def test_drafter_in_another_dtype():
    target, ids = make_target("llama"), prompt_ids(length=9)
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW)
    drafter = make_drafter().to(torch.bfloat16)
    assert plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter).tolist() == expected.tolist()


def test_only_the_needed_hidden_states_are_captured():
    target, ids = make_target("llama"), prompt_ids(length=9)
    seen, forward = [], type(target).forward

    def spy(*args, **kwargs):
        out = forward(target, *args, **kwargs)
        seen.append([state is not None for state in out.hidden_states])
        return out

    target.forward = spy
    plain(target, {"input_ids": ids}, max_new_tokens=6, assistant_model=make_drafter())
    assert seen and all(row == [False, False, True, False, True, True] for row in seen)


def test_the_target_is_asked_once_a_cycle_and_the_drafter_too():
    target, ids = make_target("llama"), prompt_ids(length=9)
    drafter = make_drafter()
    passes = {"target": 0, "drafter": 0}
    for name, model in (("target", target), ("drafter", drafter)):
        model.register_forward_pre_hook(lambda *_, name=name: passes.__setitem__(name, passes[name] + 1))
    plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
    run = drafter.last_run
    # The last token has no room for drafts behind it, so its cycle may go without a drafter pass.
    assert passes["target"] == run.target_passes and run.cycles - 1 <= passes["drafter"] <= run.cycles


class Words:
    """The least of a tokenizer that streamers need."""

    def decode(self, ids, **kwargs):
        return "".join(f"{int(i)} " for i in ids)


def test_streamers_get_every_token_once_in_order(capsys):
    target, ids = make_target("llama"), prompt_ids(length=9)
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0, 9:].tolist()
    drafter = oracle(plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist(), "sometimes")
    plain(
        target,
        {"input_ids": ids},
        max_new_tokens=NEW,
        assistant_model=drafter,
        streamer=TextStreamer(Words(), skip_prompt=True),
    )
    assert capsys.readouterr().out.split() == [str(i) for i in expected]
    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    worker = threading.Thread(
        target=lambda: plain(
            target, {"input_ids": ids}, max_new_tokens=NEW - 3, assistant_model=drafter, streamer=streamer
        )
    )
    worker.start()
    assert "".join(streamer).split() == [str(i) for i in expected[:-3]]
    worker.join()
    assert drafter.last_run.tokens == NEW - 3  # the newest, although this thread has one of its own


def test_two_threads_share_one_drafter():
    target, drafter = make_target("llama"), make_drafter()
    prompts = [prompt_ids(length=9 + i, seed=i) for i in range(4)]
    expected = [plain(target, {"input_ids": p}, max_new_tokens=NEW).tolist() for p in prompts]
    results, tokens = [None] * 4, [None] * 4

    def work(i):
        results[i] = plain(target, {"input_ids": prompts[i]}, max_new_tokens=NEW - i, assistant_model=drafter).tolist()
        tokens[i] = drafter.last_run.tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[row[: len(row) - i] for row in e] for i, e in enumerate(expected)]
    assert tokens == [NEW, NEW - 1, NEW - 2, NEW - 3]


def test_figures_add_up():
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    drafter = oracle(text, "sometimes")
    plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
    run = drafter.last_run
    # Counted by hand from the known hits: a cycle takes drafts up to the first miss, and one token more.
    position, cycles, accepted = 10, 0, [0] * (BLOCK - 1)
    while position < 9 + NEW:
        room = min(BLOCK - 1, 9 + NEW - position - 1)
        hits = 0
        while hits < room and drafter.hit(position + hits):
            accepted[hits] += 1
            hits += 1
        position, cycles = position + hits + 1, cycles + 1
    assert run.cycles == cycles and run.accepted == accepted
    assert run.tau == pytest.approx((NEW - 1) / cycles)
    assert "tau" in str(run)
    assert make_drafter().last_run is None


def test_times_are_those_of_the_parts():
    target, ids = make_target("llama"), prompt_ids(length=9)
    drafter = oracle(plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist(), "sometimes")
    naps = {"target": 0.02, "drafter": 0.01}
    for name, model in (("target", target), ("drafter", drafter)):
        model.register_forward_hook(lambda *_, name=name: time.sleep(naps[name]))
    started = time.perf_counter()
    plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
    wall, run = time.perf_counter() - started, drafter.last_run
    # time.sleep never sleeps less than asked; at most the last cycle goes without a drafter pass
    assert run.prefill_s >= naps["target"]
    assert run.verifying_s >= run.cycles * naps["target"]
    assert run.drafting_s >= (run.cycles - 1) * naps["drafter"]
    assert run.prefill_s + run.drafting_s + run.verifying_s <= wall


@pytest.mark.parametrize("same_special_ids", [True, False])
def test_a_streamer_in_a_pipeline(same_special_ids, capsys, byte_tokenizer):
    target, ids = target_of("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    # The pipeline compares these ids; where they differ it asks for a tokenizer, which is the target's.
    special = dict(bos_token_id=BOS, pad_token_id=PAD) if same_special_ids else {}
    extra = {} if same_special_ids else {"assistant_tokenizer": byte_tokenizer}
    drafter = oracle(text, "sometimes", **special)
    chat = pipeline("text-generation", model=target, tokenizer=byte_tokenizer, assistant_model=drafter, **extra)
    streamer = TextStreamer(byte_tokenizer, skip_prompt=True)
    out = chat(byte_tokenizer.decode(ids[0]), do_sample=False, max_new_tokens=NEW, streamer=streamer)
    assert out[0]["generated_text"] == byte_tokenizer.decode(text)
    assert capsys.readouterr().out.strip() == byte_tokenizer.decode(text[9:])
    assert drafter.last_run.tokens == NEW and drafter.last_run.tau > 1.5


def test_a_useless_drafter_is_named_once(caplog):
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = plain(target, {"input_ids": ids}, max_new_tokens=80)[0].tolist()
    for hit, warnings in (("never", 1), ("always", 0)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            transformers.utils.logging.enable_propagation()
            plain(target, {"input_ids": ids}, max_new_tokens=80, assistant_model=oracle(text, hit))
            transformers.utils.logging.disable_propagation()
        assert sum("Likely causes" in record.message for record in caplog.records) == warnings


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.8},
        {"repetition_penalty": 1.3, "temperature": 1.5}, {"no_repeat_ngram_size": 2}, {"epsilon_cutoff": 0.02},
    ],
)  # fmt: skip
def test_sampling_runs_and_repeats_with_its_seed(sampling):
    target, ids, drafter = make_target("llama"), prompt_ids(length=9), make_drafter()
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(
            target.generate(ids, do_sample=True, max_new_tokens=NEW, assistant_model=drafter, **sampling).tolist()
        )
    assert outs[0] == outs[1] and len(outs[0][0]) == 9 + NEW


class Stop(Exception):
    pass


class StopsAt(StoppingCriteria, LogitsProcessor, BaseStreamer):
    """Breaks off at its nth call, whatever it is called as."""

    def __init__(self, at):
        self.left = at

    def tick(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise Stop

    def __call__(self, input_ids, scores):
        self.tick()
        return scores

    def put(self, value):
        self.tick()

    def end(self):
        pass


class NeverDone(StopsAt):
    def __call__(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(1, dtype=torch.bool)


BREAKS = [(where, at) for where in ("criterion", "processor", "streamer", "target", "drafter") for at in (2, 3, 5)]


@pytest.mark.parametrize(("where", "at"), [("criterion", 1), ("processor", 1), *BREAKS])  # 1: no token has come
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_turn_that_breaks_off_leaves_the_cache_usable(family, where, at):
    target, ids = make_target(family, dtype=torch.float64), prompt_ids(length=21)
    text = plain(target, {"input_ids": ids}, max_new_tokens=NEW)[0].tolist()
    for hit in HITS:
        drafter, cache = oracle(text, hit), DynamicCache(config=target.config)
        extra = {
            "criterion": {"stopping_criteria": [NeverDone(at)]},
            "processor": {"logits_processor": [StopsAt(at)]},
            "streamer": {"streamer": StopsAt(at)},
        }
        # In the middle of a pass some layers have the block in their cache and others do not.
        layer = {"target": target.model.layers[2], "drafter": drafter.layers[0]}
        hook = layer[where].register_forward_hook(StopsAt(at).tick) if where in layer else None
        with pytest.raises(Stop):
            plain(
                target,
                {"input_ids": ids},
                max_new_tokens=NEW,
                cache=cache,
                assistant_model=drafter,
                **extra.get(where, {}),
            )
        if hook is not None:
            hook.remove()
        kept = cache.get_seq_length()
        assert kept >= 21 and all(layer.get_seq_length() == kept for layer in cache.layers)
        new = torch.tensor([text[: kept + 1]])
        assistant = drafter if at % 2 else None
        out = plain(
            target, {"input_ids": new}, max_new_tokens=20 + NEW - kept, cache=cache, assistant_model=assistant
        )
        assert out[0].tolist() == text


def test_a_turn_in_inference_mode_and_one_outside():
    target, ids = make_target("llama"), prompt_ids(length=9)
    cache, drafter = DynamicCache(config=target.config), make_drafter()
    with torch.inference_mode():
        first = plain(target, {"input_ids": ids}, max_new_tokens=4, cache=cache, assistant_model=drafter)
    full = torch.cat([first.clone(), prompt_ids(length=3, seed=1)], dim=1)
    # The target's own cache is made of inference tensors too; DynamicCache only reads them.
    out = plain(target, {"input_ids": full}, max_new_tokens=8, cache=cache, assistant_model=drafter)
    assert out.tolist() == plain(target, {"input_ids": full}, max_new_tokens=8).tolist()


def test_attentions_asked_of_a_backend_that_has_none():
    target, ids = make_target("llama", attn_implementation="sdpa"), prompt_ids(length=9)
    wants = dict(max_new_tokens=6, return_dict_in_generate=True, output_attentions=True)
    expected = plain(target, {"input_ids": ids}, **wants)
    out = plain(target, {"input_ids": ids}, assistant_model=oracle(expected.sequences[0].tolist(), "always"), **wants)
    assert out.attentions == expected.attentions
    assert out.sequences.tolist() == expected.sequences.tolist()


class PackedEmbedding(torch.nn.Module):
    """An embedding whose table is not a plain float matrix, as quantized ones are."""

    def __init__(self, embedding):
        super().__init__()
        weight = embedding.weight.detach()
        self.scale = weight.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8))

    def forward(self, ids):
        return self.weight[ids] * self.scale[ids]


class PackedLinear(PackedEmbedding):
    def forward(self, x):
        return x @ (self.weight * self.scale).T


def quantized(family):
    target = make_target(family)
    target.set_input_embeddings(PackedEmbedding(target.get_input_embeddings()))
    target.set_output_embeddings(PackedLinear(target.get_output_embeddings()))
    return target


def offloaded(family):
    from accelerate import cpu_offload

    return cpu_offload(make_target(family), execution_device="cpu")


def on_disk(family, folder):
    from transformers import AutoModelForCausalLM

    make_target(family).save_pretrained(folder / "target")
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(5)}
    return AutoModelForCausalLM.from_pretrained(
        folder / "target", device_map=device_map, offload_folder=folder / "offload", dtype=torch.float32
    )


def mixed(family):
    target = make_target(family)
    target.get_output_embeddings().to(torch.float64)
    target.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].double(),))
    return target


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "on disk", "mixed dtype"])
def test_targets_whose_weights_are_elsewhere_or_otherwise(kind, tmp_path):
    build = {
        "quantized": quantized, "offloaded": offloaded, "mixed dtype": mixed,
        "on disk": lambda family: on_disk(family, tmp_path),
    }  # fmt: skip
    target, ids = build[kind]("llama"), prompt_ids(length=9)
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW)
    for hit in HITS:
        drafter = oracle(expected[0].tolist(), hit)
        out = plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
        assert out.tolist() == expected.tolist()
    # What is borrowed is what the target computes with: the drafts are those of plain matrices of the same values.
    whole = make_target("llama")
    if kind == "quantized":
        for get in ("get_input_embeddings", "get_output_embeddings"):
            packed = getattr(target, get)()
            getattr(whole, get)().weight.data = packed.weight * packed.scale
    drafter, runs = make_drafter(initializer_range=0.6), []
    for model in (target, whole):
        plain(model, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=drafter)
        runs.append(drafter.last_run.accepted)
    assert runs[0] == runs[1]


def test_wearing_an_adapter():
    """A LoRA on the target changes its text, one on the drafter its drafts; both go through generate() as they are."""
    peft = pytest.importorskip("peft")

    def wear(model):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
            return peft.get_peft_model(model, config)

    ids = prompt_ids(length=9)
    bare = plain(make_target("llama"), {"input_ids": ids}, max_new_tokens=NEW)
    target = wear(make_target("llama"))
    expected = plain(target, {"input_ids": ids}, max_new_tokens=NEW)
    assert expected.tolist() != bare.tolist()
    for hit in HITS:
        drafter = oracle(expected[0].tolist(), hit)
        for assistant in (drafter, wear(drafter)):
            out = plain(target, {"input_ids": ids}, max_new_tokens=NEW, assistant_model=assistant)
            assert out.tolist() == expected.tolist() and assistant.last_run.tokens == NEW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_confidence_is_exact_in_any_dtype(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(2, 7, 50) * 4).to(dtype)
    expected = logits.double().softmax(-1).amax(-1).float()
    torch.testing.assert_close(top_probability(logits), expected, rtol=0, atol=1e-6)


def test_a_drafter_of_nan_costs_nothing_but_time():
    target, drafter, ids = make_target("llama"), make_drafter(), prompt_ids(length=9)
    with torch.no_grad():
        drafter.fc.weight.fill_(float("nan"))
    expected = target.generate(ids, do_sample=False, max_new_tokens=40)
    for schedule in ("adaptive", "constant"):
        drafter.generation_config.num_assistant_tokens_schedule = schedule
        assert torch.equal(target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=40), expected)
    assert top_probability(torch.full((1, 2, 5), float("nan"))).tolist() == [[0.0, 0.0]]
    drafter.generation_config.assistant_sampling = "rejection"
    assert target.generate(ids, assistant_model=drafter, do_sample=True, max_new_tokens=40).shape == (1, 49)

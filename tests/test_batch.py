"""Several rows in one generate() call: each gets the ids that it gets alone and without a drafter."""

import functools

import peft
import pytest
import torch
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria, LogitsProcessor, MaxLengthCriteria

from dflash_hf.drafter import passes
from dflash_hf.drafter.passes import why_not_slots
from drafters import BLOCK, HITS, OracleDrafter, make_drafter
from targets import PAD, TEXT_FAMILIES, VOCAB, WINDOW, make_target, prompt_ids, vlm_inputs

NEW = 20
SETTINGS = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": PAD}


class BatchOracle(OracleDrafter):
    """Knows the text of every row; rows that leave keep the others' order."""

    texts: list[list[int]]

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        self.positions = position_ids[:, -noise_embeds.shape[1] :].tolist()
        return super(OracleDrafter, self).forward(noise_embeds, context_hidden_states, position_ids, **kwargs)

    def embed_block(self, ids, target_embeddings):
        self.anchors = ids[:, 0].tolist()
        return super().embed_block(ids, target_embeddings)

    def compute_logits(self, hidden, target_head, vocab_size):
        logits = super(OracleDrafter, self).compute_logits(hidden, target_head, vocab_size)
        texts = iter(self.texts)
        for row, (positions, anchor) in enumerate(zip(self.positions, self.anchors, strict=True)):
            text = next(t for t in texts if len(t) > positions[0] and t[positions[0]] == anchor)
            for slot in range(logits.shape[1]):
                if (position := positions[1 + slot]) < len(text):
                    right = text[position]
                    logits[row, slot, right if self.hit(position + row) else (right + 1) % vocab_size] = 1e4
        return logits


def batch_oracle(rows, hit, schedule="constant"):
    drafter = make_drafter(cls=BatchOracle)
    drafter.texts, drafter.hit = rows, HITS[hit]
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    return drafter


def left_padded(lengths, seed=0):
    """Prompts of these lengths: input_ids and attention_mask `[B, max]`."""
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = prompt_ids(length=length, seed=seed + row)[0]
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(target, inputs, **kwargs):
    """Each row by itself, without padding and without a drafter: lists of ids."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        rows.append(target.generate(ids[mask.bool()][None], **SETTINGS | kwargs)[0].tolist())
    return rows


def without_padding(ids, inputs, rows):
    """Each row of a batch's output, cut to where the row ends when alone; what is behind must be padding."""
    width, cut = inputs["input_ids"].shape[1], []
    for row, text, mask in zip(ids.tolist(), rows, inputs["attention_mask"], strict=True):
        text_end = width - int(mask.sum()) + len(text)
        assert set(row[text_end:]) <= {PAD}
        cut.append(row[width - int(mask.sum()) : text_end])
    return cut


LENGTHS = {1: (WINDOW + 5,), 3: (2, WINDOW + 3 * BLOCK, 7), 8: (1, 5, 30, 12, 9, 3, 17, 8)}


@functools.cache
def stopped_alone(family, num_rows):
    """Rows by themselves, stopped by tokens that they hold, so that they end at different places of a block."""
    target, inputs = make_target(family), left_padded(LENGTHS[num_rows])
    rows = alone(target, inputs)
    stop = {"eos_token_id": [rows[0][-9], rows[-1][-4]]}
    ends = [[i for i, token in enumerate(row) if i >= n and token in stop["eos_token_id"]] for row, n in
            zip(rows, LENGTHS[num_rows], strict=True)]  # fmt: skip
    return inputs, [row[: end[0] + 1] if end else row for row, end in zip(rows, ends, strict=True)], stop


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_rows_equal_themselves_alone(family, hit):
    target = make_target(family)
    for num_rows in (1, 3, 8):
        inputs, rows, stop = stopped_alone(family, num_rows)
        drafter = batch_oracle(rows, hit)
        ids = target.generate(**inputs, **SETTINGS | stop, assistant_model=drafter)
        assert without_padding(ids, inputs, rows) == rows
        run = drafter.last_run
        assert run.rows == num_rows
        assert run.tokens == sum(map(len, rows)) - sum(LENGTHS[num_rows])
        if hit == "always":
            needed = [-(-(len(row) - n - 1) // BLOCK) for row, n in zip(rows, LENGTHS[num_rows], strict=True)]
            assert run.row_cycles <= sum(needed) + 2  # the oracle may take one row for another that looks like it


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_backends(attention):
    target = make_target("gemma3", attn_implementation=attention)
    inputs = left_padded(LENGTHS[3])
    rows = alone(target, inputs)
    ids = target.generate(**inputs, **SETTINGS, assistant_model=batch_oracle(rows, "sometimes"))
    assert without_padding(ids, inputs, rows) == rows


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_adaptive_lengths_change_no_text(family):
    target = make_target(family)
    inputs = left_padded(LENGTHS[8])
    rows = alone(target, inputs, max_new_tokens=60)
    for hit in HITS:
        drafter = batch_oracle(rows, hit, "adaptive")
        ids = target.generate(**inputs, **SETTINGS | {"max_new_tokens": 60}, assistant_model=drafter)
        assert without_padding(ids, inputs, rows) == rows


ROW_OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[9], [11, 12], [20]]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(8, 40))},
    "stop at many": {"eos_token_id": list(range(8, 20))},
}


@pytest.mark.parametrize("options", ROW_OPTIONS.values(), ids=ROW_OPTIONS)
def test_options_of_rows(options):
    target, inputs = make_target("qwen3"), left_padded((9, 4, 6))
    expected = target.generate(**inputs, **SETTINGS | options)
    rows = [row[mask.bool()].tolist() for row, mask in zip(expected[:, :9], inputs["attention_mask"], strict=True)]
    rows = [row + text for row, text in zip(rows, expected[:, 9:].tolist(), strict=True)]
    ids = target.generate(**inputs, **SETTINGS | options, assistant_model=batch_oracle(rows, "sometimes"))
    assert ids.tolist() == expected.tolist()


class OfTheBatch(LogitsProcessor):
    """Forbids another word for each row of the batch."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[range(len(scores)), [20 + i for i in range(len(scores))]] = -torch.inf
        return scores


def test_what_looks_at_the_whole_batch_is_decoded_plainly():
    target, ids = make_target("llama"), prompt_ids(3, 9)
    allowed = lambda row, text: list(range(8 + row, VOCAB, 3))  # noqa: E731
    for odd in ({"logits_processor": [OfTheBatch()]}, {"prefix_allowed_tokens_fn": allowed}):
        expected = target.generate(ids, **SETTINGS, **odd)
        with pytest.warns(UserWarning, match="without the drafter: .*may look at all of the batch"):
            out = target.generate(ids, **SETTINGS, **odd, assistant_model=make_drafter())
        assert out.tolist() == expected.tolist()


def test_scores_of_rows():
    target, inputs = make_target("llama"), left_padded(LENGTHS[3])
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 1.0}
    expected = target.generate(**inputs, **SETTINGS, **options)
    rows = alone(target, inputs)
    out = target.generate(**inputs, **SETTINGS, **options, assistant_model=batch_oracle(rows, "sometimes"))
    assert out.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = torch.stack(getattr(out, name)), torch.stack(getattr(expected, name))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_the_cache_that_comes_back(family):
    """A cache passed in is filled in place: the same keys as plain generate() leaves, row by row up to its end."""
    target, inputs = make_target(family), left_padded(LENGTHS[3])
    rows = alone(target, inputs)
    caches = []
    for drafter in (None, batch_oracle(rows, "sometimes")):
        caches.append(DynamicCache(config=target.config))
        target.generate(**inputs, **SETTINGS, cache=caches[-1], assistant_model=drafter)
    plain, ours = caches
    assert ours.get_seq_length() == plain.get_seq_length() == max(LENGTHS[3]) + NEW - 1
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        shown = torch.cat([inputs["attention_mask"], torch.ones(3, NEW - 1)], 1)[:, -theirs.keys.shape[2] :].bool()
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            a, b = a.transpose(1, 2)[shown], b.transpose(1, 2)[shown]
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_target_that_rows_cannot_share():
    target = make_target("llama", attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="one sequence at a time here, got 2: flex_attention takes no masks"):
        target.generate(prompt_ids(2), assistant_model=make_drafter(), **SETTINGS)


def test_both_loops_by_hand():
    target, inputs = make_target("llama"), left_padded((9,))
    rows = alone(target, inputs)
    drafter = batch_oracle(rows, "sometimes")
    for loop in (drafter.decode, drafter.assisted_decoding):
        assert target.generate(**inputs, **SETTINGS, custom_generate=loop).tolist() == rows
        assert drafter.last_run.tau > 1.3
    with pytest.raises(ValueError, match="synced_gpus=True needs transformers' loop"):
        drafter.decode(target, inputs["input_ids"], synced_gpus=True)
    inputs = left_padded(LENGTHS[3])
    rows = alone(target, inputs)
    ids = target.generate(**inputs, **SETTINGS, custom_generate=batch_oracle(rows, "always").decode)
    assert without_padding(ids, inputs, rows) == rows


def test_rows_with_images():
    target = make_target("qwen2_5_vl")
    inputs = vlm_inputs(target, batch=3)
    inputs["pixel_values"] += torch.linspace(0, 1, len(inputs["pixel_values"]))[:, None]  # another image in each row
    inputs["input_ids"][:, -1] = torch.tensor([20, 30, 40])
    expected = target.generate(**inputs, **SETTINGS)
    assert len(set(map(tuple, expected.tolist()))) == 3
    ids = target.generate(**inputs, **SETTINGS, assistant_model=batch_oracle(expected.tolist(), "sometimes"))
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_ways_of_calling(family):
    """Chunked and embedded prompts, a second turn in the same cache, inference mode: rows as without a drafter."""
    target, inputs = make_target(family), left_padded((9, 4, 12))
    expected = target.generate(**inputs, **SETTINGS)
    rows = [row[12 - n :].tolist() for row, n in zip(expected, (9, 4, 12), strict=True)]

    def same(kwargs, drafter=None):
        plain = target.generate(**kwargs, **SETTINGS)
        drafted = target.generate(**kwargs, **SETTINGS, assistant_model=drafter or batch_oracle(rows, "sometimes"))
        assert drafted.tolist() == plain.tolist()

    same(inputs | {"prefill_chunk_size": 5})
    same(inputs | {"eos_token_id": sorted({int(token) for token in expected[:, 12]})})  # all end at once
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    same({"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}, make_drafter())
    with torch.inference_mode():
        same(inputs)

    texts = []
    for drafters in ((None, None), (batch_oracle(rows, "sometimes"), make_drafter())):
        cache, text, mask = DynamicCache(config=target.config), inputs["input_ids"], inputs["attention_mask"]
        for drafter in drafters:
            text = target.generate(text, attention_mask=mask, cache=cache, **SETTINGS, assistant_model=drafter)
            text = torch.cat([text, prompt_ids(3, 4, seed=9)], dim=1)
            mask = torch.cat([mask, mask.new_ones(3, text.shape[1] - mask.shape[1])], dim=1)
        texts.append(text.tolist())
    assert texts[0] == texts[1]


def test_a_threshold_that_no_draft_reaches():
    target, inputs = make_target("llama"), left_padded((9, 4))
    rows = alone(target, inputs)
    drafter = batch_oracle(rows, "sometimes", "adaptive")
    drafter.generation_config.assistant_confidence_threshold = 1.0
    drafter.compute_logits = lambda hidden, head, vocab_size: hidden.new_zeros(*hidden.shape[:2], vocab_size)
    ids = target.generate(**inputs, **SETTINGS, assistant_model=drafter)
    assert without_padding(ids, inputs, rows) == rows and drafter.last_run.drafted_cycles > 0


def test_a_users_own_limits():
    """A criterion for length or EOS replaces the config's."""
    target, ids = make_target("llama"), prompt_ids(length=9)
    text = target.generate(ids, **SETTINGS | {"max_new_tokens": 40})[0].tolist()
    for criterion in (MaxLengthCriteria(40), MaxLengthCriteria(15), MaxLengthCriteria(5), EosTokenCriteria(text[13])):
        expected = target.generate(ids, **SETTINGS, stopping_criteria=[criterion])
        drafter = batch_oracle([text], "sometimes")
        out = target.generate(ids, **SETTINGS, stopping_criteria=[criterion], assistant_model=drafter)
        assert out.tolist() == expected.tolist()


def test_positions_shared_by_rows_that_leave():
    target, ids = make_target("llama"), prompt_ids(3, 9)
    expected = target.generate(ids, **SETTINGS)
    stop = {"eos_token_id": int(expected[1, 12])}
    expected = target.generate(ids, **SETTINGS, **stop)
    drafter = batch_oracle(target.generate(ids, **SETTINGS).tolist(), "sometimes")
    out = target.generate(ids, **SETTINGS, **stop, position_ids=torch.arange(9)[None], assistant_model=drafter)
    assert out.tolist() == expected.tolist()


def test_longrope_targets_are_decoded_plainly_across_their_threshold():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    target = make_target("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    ids = prompt_ids(length=9)
    expected = target.generate(ids, **SETTINGS)
    with pytest.warns(UserWarning, match="cross 16 positions"):
        out = target.generate(ids, **SETTINGS, assistant_model=make_drafter())
    assert out.tolist() == expected.tolist()


def test_dynamic_rope_targets_are_decoded_plainly_beyond_their_length():
    """Rotations are those of the largest position in a pass, so drafts would change them; nothing stays behind."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    target, drafter = make_target("llama", rope_parameters=rope, max_position_embeddings=20), make_drafter()
    short, ids = prompt_ids(length=5, seed=3), prompt_ids(length=9)
    of_short, expected = (target.generate(of, do_sample=False, max_new_tokens=n) for of, n in ((short, 8), (ids, 30)))
    with pytest.warns(UserWarning, match="beyond 20 positions"):
        out = target.generate(ids, do_sample=False, max_new_tokens=30, assistant_model=drafter)
    assert out.tolist() == expected.tolist() and drafter.last_run.target_passes == 0
    assert target.generate(short, do_sample=False, max_new_tokens=8).tolist() == of_short.tolist()
    out = target.generate(short, do_sample=False, max_new_tokens=8, assistant_model=drafter)
    assert out.tolist() == of_short.tolist() and drafter.last_run.drafted_cycles > 0


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]])
def test_token_types_that_gpt2_embeds(lengths):
    """Every new token has the type of the last one."""
    target, inputs = make_target("gpt2"), left_padded(lengths)
    inputs["token_type_ids"] = inputs["attention_mask"] * torch.arange(9, 9 + len(lengths))[:, None]
    expected = target.generate(**inputs, **SETTINGS)
    without = target.generate(**{**inputs, "token_type_ids": None}, **SETTINGS)
    assert not torch.equal(expected, without)
    assert torch.equal(target.generate(**inputs, assistant_model=make_drafter(), **SETTINGS), expected)


def test_rows_with_adapters_of_their_own_are_decoded_plainly():
    target, inputs = make_target("llama"), left_padded([9, 4, 7])
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(target, lora, adapter_name="a")
    model.add_adapter("b", lora)
    model.eval()
    names = {"adapter_names": ["a", "b", "__base__"]}
    expected = model.generate(**inputs, **names, **SETTINGS)
    with pytest.warns(UserWarning, match="sequence.s. without the drafter: its rows wear different adapters"):
        found = model.generate(**inputs, **names, assistant_model=make_drafter(), **SETTINGS)
    assert torch.equal(found, expected)


def test_a_drafter_with_dynamic_rope_stays_as_it_is():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    drafter = make_drafter(rope_parameters=rope, max_position_embeddings=32)
    before = drafter.rotary_emb.inv_freq.clone()
    make_target("llama").generate(prompt_ids(length=60), assistant_model=drafter, **SETTINGS)
    assert torch.equal(drafter.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("family", ["phi3", "mistral", "gemma3"])
def test_plain_steps_while_the_window_fills(family):
    """A prompt shorter than the window and passes over one token, the one that fills the window among them."""
    target, ids = make_target(family), prompt_ids(length=WINDOW - 3)
    drafter = make_drafter()
    drafter.generation_config.num_assistant_tokens_schedule = "adaptive"
    wants = SETTINGS | {"return_dict_in_generate": True, "output_scores": True}
    expected = target.generate(ids, **wants)
    out = target.generate(ids, assistant_model=drafter, **wants)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)


def test_caches_that_are_offloaded_have_no_slots():
    target = make_target("llama")
    cache = DynamicCache(config=target.config)
    assert why_not_slots(target, cache) is None
    cache.offloading = True  # as DynamicCache(offloading=True), which needs an accelerator
    assert "offloaded" in why_not_slots(target, cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_memory_for_slots_leaves_the_users_cache(family, monkeypatch):
    """It holds the prompt then, and plain generation goes on from it."""
    target, ids = make_target(family), prompt_ids(length=21)
    expected = target.generate(ids, **SETTINGS)
    cache, made = DynamicCache(config=target.config), []

    class Failing(passes.SlotLayer):
        def __init__(self, *args):
            if len(made) == 2:
                raise MemoryError
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(passes, "SlotLayer", Failing)
    with pytest.raises(MemoryError):
        target.generate(ids, cache=cache, assistant_model=make_drafter(), **SETTINGS)
    assert cache.get_seq_length() == 21 and len(made) == 2
    again = target.generate(expected[:, :22], cache=cache, **SETTINGS | {"max_new_tokens": NEW - 1})
    assert torch.equal(again, expected)


def test_autocast_and_key_widths():
    target, ids = make_target("gemma3", attn_implementation="eager"), prompt_ids(length=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = target.generate(ids, **SETTINGS, assistant_model=make_drafter())
    assert out.shape == (1, 9 + NEW)
    target = make_target("llama", attn_implementation="eager")
    embeds = target.get_input_embeddings()(ids).detach()
    options = SETTINGS | {"return_dict_in_generate": True, "output_attentions": True}
    plain, ours = (target.generate(inputs_embeds=embeds, **options, assistant_model=d) for d in (None, make_drafter()))
    assert [step[0].shape[-1] for step in ours.attentions] == [step[0].shape[-1] for step in plain.attentions]

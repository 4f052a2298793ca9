"""The decode loop: draft, verify, accept, commit, for any number of rows.

It stands in for transformers' assisted loop and keeps its interface. What it does otherwise: rows accept different
lengths and leave when they are finished, a cache from an earlier turn continues whichever ids come with it, embedded
prompts and chunked prefills work, processors see committed tokens only and each once, and whatever ends the text (EOS,
a length, a stop string, a criterion) ends it at that very token.
"""

import inspect
import time
import warnings
import weakref
from types import SimpleNamespace

import torch
from transformers.cache_utils import StaticLayer
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc
from transformers.generation.utils import GenerateDecoderOnlyOutput, _split_model_outputs

from .cache import from_host
from .candidates import (
    MEMORYLESS,
    READS_HISTORY,
    DFlashRun,
    Drafting,
    GumbelNoise,
    confident,
    knobs,
    pick,
    processors_of_row,
    record,
    spread,
    top_probability,
    warp,
)
from .kernels import PackedHead
from .passes import CropPass, ReplayPass, SlotPass, why_not_slots
from .schedule import Schedule

# Keyed by the target's cache object: the drafter's context that belongs beside it, for the next turn.
_continued: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()

# What a batch may hold for its rows to be decoded one by one: each looks at a row and nothing else.
_ROW_PROCESSORS = (*MEMORYLESS, *READS_HISTORY, lp.WatermarkLogitsProcessor)
_ROW_CRITERIA = (sc.MaxLengthCriteria, sc.EosTokenCriteria, sc.StopStringCriteria, sc.MaxTimeCriteria)


def accept(target, drafts, offered, drafter, noise, do_sample):
    """Which drafts each row keeps, and the token behind them.

    Args:
        target: values `[B, g + 1, n]` of the target's processed logits at the anchor and at each draft, and their
            token ids `[B, g + 1, n]`, or None where n is the whole vocabulary (`candidates.warp`).
        drafts: `[B, g]` long.
        offered: `[B]` long, how many of a row's drafts count.
        drafter: the same of what the drafts were drawn from, `[B, g, n]`; read by rejection sampling only.
        noise: the `GumbelNoise` that drafter and target share (coupled sampling), else None.
        do_sample: sample, or take the likeliest.

    Returns:
        tokens `[B, g + 1]` and accepted `[B]` long: row b commits its first accepted[b] + 1 tokens. Sampled ones
        follow the target's distribution exactly: by speculative sampling (arXiv 2211.17192, algorithm 1), or as the
        Gumbel-max of the target's own logits.
    """
    values, ids = target
    num_drafts = drafts.shape[1]
    counts = torch.arange(num_drafts, device=drafts.device) < offered[:, None]
    if num_drafts == 0 or not do_sample or noise is not None:
        tokens = pick(values, ids, do_sample, noise)
        matches = (tokens[:, :-1] == drafts) & counts
        return tokens, matches.long().cumprod(-1).sum(-1)
    p, (q_values, q_ids) = values.softmax(-1), drafter
    q = q_values.softmax(-1)
    p_draft = _probability(p[:, :-1], None if ids is None else ids[:, :-1], drafts)
    q_draft = _probability(q, q_ids, drafts)
    matches = (torch.rand(p_draft.shape, device=p.device) * q_draft < p_draft) & counts
    accepted = matches.long().cumprod(-1).sum(-1)
    rows, behind = torch.arange(len(drafts), device=drafts.device), accepted.clamp_max(num_drafts - 1)
    last, last_ids = p[rows, accepted], None if ids is None else ids[rows, accepted]
    rejected, rejected_ids = q[rows, behind], None if q_ids is None else q_ids[rows, behind]
    if last_ids is None and rejected_ids is not None:
        rejected = torch.zeros_like(last).scatter_(-1, rejected_ids, rejected)
    elif last_ids is not None and rejected_ids is None:
        rejected = rejected.gather(-1, last_ids)
    elif last_ids is not None:
        rejected = ((last_ids[:, :, None] == rejected_ids[:, None]) * rejected[:, None]).sum(-1)
    # Behind the last draft that counts there is nothing to subtract.
    residual = (last - (accepted < offered)[:, None] * rejected).clamp_min(0)
    # p equals q to rounding: rejecting was rounding too, and p itself is what is left
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, last)
    own = torch.multinomial(residual, 1)
    tokens = torch.cat([drafts, drafts[:, :1]], dim=1)
    tokens[rows, accepted] = (own if last_ids is None else last_ids.gather(-1, own))[:, 0]
    return tokens, accepted


def _probability(p, ids, tokens):
    """Of tokens `[B, g]` under probabilities `[B, g, n]` of ids (None: of the whole vocabulary)."""
    if ids is None:
        return p.gather(-1, tokens[..., None])[..., 0]
    return (p * (ids == tokens[..., None])).sum(-1)


def accept_in_turn(logits, drafts, drafter, noise, ids, processors, do_sample, ends):
    """`accept` for one row, token by token, where processors read the text so far.

    Args:
        logits: `[g + 1, V]`, the target's.
        drafts: `[g]` long.
        drafter: values `[1, g', n]` and ids or None as in `accept`, g' >= g; or None.
        noise: `GumbelNoise` of this row, or None.
        ids: `[1, n]`, the text up to the anchor.
        processors: the call's; each is called once a token, with every token before it committed.
        ends: says of a text `[1, n]` whether it ends there; processors must not see what lies behind the end.

    Returns:
        tokens `[m]` long and their processed scores `[m, V]`.
    """
    tokens, scores = [], []
    for slot in range(len(drafts) + 1):
        row = processors(ids, logits[slot : slot + 1])
        scores.append(row)
        draft = drafts[None, slot : slot + 1]
        of_slot = drafter and [None if part is None else part[:, slot : slot + 1] for part in drafter]
        chosen, accepted = accept(
            (row[None].expand(1, draft.shape[1] + 1, -1), None),
            draft,
            draft.new_full((1,), draft.shape[1]),
            of_slot,
            noise and noise.of_row(0, slot),
            do_sample,
        )
        tokens.append(chosen[0, 0])
        ids = torch.cat([ids, tokens[-1].view(1, 1)], dim=1)
        if not bool(accepted) or ends(ids):
            break
    return torch.stack(tokens), torch.cat(scores)


def _prefill(target, input_ids, generation_config, model_kwargs, wanted):
    """Run the prompt through the target: outputs, and the hidden states of ALL its chunks at `wanted`."""
    if generation_config.prefill_chunk_size is None:
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
        return outputs, outputs.hidden_states
    chunks = []
    outputs = type(target)._prefill(_NotingCaller(target, chunks), input_ids, generation_config, model_kwargs)
    return outputs, {i: torch.cat([states[i] for states in chunks], dim=1) for i in wanted}


class _NotingCaller:
    """Stands for the target in `_prefill`, which returns its last chunk only: notes every chunk's hidden states.

    Not a hook on the target, which another thread's calls would run through too.
    """

    def __init__(self, target, hidden_states: list):
        self._target, self._hidden_states = target, hidden_states

    def __getattr__(self, name):
        return getattr(self._target, name)

    def __call__(self, **inputs):
        outputs = self._target(**inputs)
        self._hidden_states.append(outputs.hidden_states)
        return outputs

    def get_compiled_call(self, compile_config):
        return self


def _why_not_row_by_row(target, logits_processor, stopping_criteria, generation_config, streamer) -> str | None:
    """What in a call of several rows may look at the whole batch, so that rows cannot go ahead of each other."""
    odd = [type(p).__name__ for p in logits_processor if type(p) not in _ROW_PROCESSORS]
    odd += [type(c).__name__ for c in stopping_criteria if type(c) not in _ROW_CRITERIA]
    if odd:
        return f"{' and '.join(odd)} may look at all of the batch"
    if streamer is not None:
        return f"{type(streamer).__name__} takes one token of every row at a time"
    # peft's `adapter_names` are hooks of the call that know the row of each adapter.
    hooks = (hook for module in target.modules() for hook in module._forward_pre_hooks.values())
    if any("adapter_names" in (getattr(hook, "keywords", None) or {}) for hook in hooks):
        return "its rows wear different adapters"
    for name in ("output_attentions", "output_hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name):
            return f"{name} come from steps of all rows at once"
    return None


def _why_not_several_tokens(target, shortest: int, longest: int) -> str | None:
    """What makes a pass over several tokens differ from passes over one each, in texts that grow so far."""
    if getattr(target.prepare_inputs_for_generation, "__self__", None) is not target:
        return "its inputs are prepared by somebody else, as peft's prompt learning does"
    config = target.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:  # or one for each layer type
        kind, limit = part.get("rope_type"), part.get("original_max_position_embeddings")
        if kind == "longrope" and limit is not None and shortest <= limit < longest:
            return f"the text may cross {limit} positions, where this target's longrope changes all rotations"
        # Its rotations are those of the largest position in a pass, rejected drafts included.
        if kind == "dynamic" and longest > (limit or config.max_position_embeddings):
            return (
                f"the text may grow beyond {limit or config.max_position_embeddings} positions, where this "
                "target's dynamic RoPE changes with every token"
            )
    return None


def decode(
    target,
    input_ids,
    drafter,
    logits_processor,
    stopping_criteria,
    generation_config,
    streamer=None,
    **model_kwargs,
):
    """Generate with `drafter`; called by `generate()`, whose arguments these are.

    Args:
        target: the model that generates.
        input_ids: `[B, n]` long, left-padded where rows differ.
        drafter: a `DFlashDraftModel`.

    Returns:
        `[B, n + new]` long, rows that end earlier padded on the right; or what `return_dict_in_generate` asks for.

    Raises:
        ValueError: the target makes no cache, its cache cannot be cropped, or several rows on a target whose cache or
            attention the loop does not know.

    Example:
        >>> ids = target.generate(**tokenizer(["A box", "Two"], padding=True, return_tensors="pt"),
        ...     assistant_model=drafter)                                                    # doctest: +SKIP
    """
    drafter.check_target(target, generation_config)
    if generation_config.num_beams > 1:
        raise ValueError(f"A DFlash drafter serves one beam, got num_beams={generation_config.num_beams}.")
    num_rows, prompt_length = input_ids.shape
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError(
            f"{type(target).__name__} makes no cache that generate() knows, which a DFlash drafter needs; call "
            "generate() without assistant_model."
        )
    no_slots = why_not_slots(target, cache)
    if num_rows > 1 and no_slots:
        raise ValueError(
            f"A DFlash drafter serves one sequence at a time here, got {num_rows}: {no_slots}. Call generate() for "
            "each, or leave out assistant_model."
        )
    seen_mask, num_new = model_kwargs.get("attention_mask"), generation_config.max_length - prompt_length
    held = int(cache.get_seq_length()) + prompt_length if seen_mask is None else seen_mask.shape[1]
    shortest = held if seen_mask is None else int(seen_mask.sum(-1).min())
    plainly = _why_not_several_tokens(target, shortest, held + num_new)
    if num_rows > 1 and not plainly:
        plainly = _why_not_row_by_row(target, logits_processor, stopping_criteria, generation_config, streamer)
    if plainly:
        warnings.warn(f"Decoding {num_rows} sequence(s) without the drafter: {plainly}.", stacklevel=4)
        record(drafter, DFlashRun(rows=num_rows))  # so that nobody takes an earlier call's figures for this one's
        return target._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **model_kwargs
        )

    # -- what the call wants --
    do_sample, returns_dict = generation_config.do_sample, generation_config.return_dict_in_generate
    keep_scores = returns_dict and generation_config.output_scores
    keep_logits = returns_dict and generation_config.output_logits
    keep_attentions = returns_dict and generation_config.output_attentions
    keep_hidden = returns_dict and generation_config.output_hidden_states
    keeps_cache = returns_dict or getattr(cache, "_is_user_defined", False)
    attentions, hidden = (() if keep else None for keep in (keep_attentions, keep_hidden))
    scores, raw_logits = [[] for _ in range(num_rows)], [[] for _ in range(num_rows)]
    of_rows = [processors_of_row(logits_processor, row) for row in range(num_rows)]
    at_once = all(type(processor) in MEMORYLESS for processor in logits_processor)
    # A user's own limit or EOS criterion replaces the one of the config. As plain generate() does, give one token at
    # least.
    ends_anywhere = [c for c in stopping_criteria if type(c) not in (sc.MaxLengthCriteria, sc.EosTokenCriteria)]
    stop_strings = [c for c in stopping_criteria if type(c) is sc.StopStringCriteria]
    limits = [c.max_length for c in stopping_criteria if type(c) is sc.MaxLengthCriteria]
    max_length = max(min(limits or [generation_config.max_length]), prompt_length + 1)
    eos_ids = {i for c in stopping_criteria if type(c) is sc.EosTokenCriteria for i in c.eos_token_id.tolist()}
    pad_tensor = getattr(generation_config, "_pad_token_tensor", None)
    pad_id = 0 if pad_tensor is None else int(pad_tensor)

    num_drafts, threshold, sampling, adaptive = knobs(drafter)
    coupled = do_sample and sampling == "coupled"
    # Under rejection sampling the lengths decide what is drawn next, and the clock must not.
    # Nor where several processes hold the parts of one target, which must all do the same.
    schedule = None
    if adaptive and (coupled or not do_sample) and (target.tp_size or 1) == 1:
        schedule = Schedule(drafter, target, num_rows, num_drafts)
    seed = int(torch.randint(1 << 62, ())) if coupled else None

    def ends(text):
        """Whether a text `[1, n]` ends here, as far as that can be asked more than once."""
        return int(text[0, -1]) in eos_ids or any(bool(c(text, None).all()) for c in stop_strings)

    def noise_for(rows, lengths, width):
        new = [length - prompt_length for length in lengths]
        return GumbelNoise(seed, rows, new, width, drafter.config.vocab_size, input_ids.device)

    # -- the prompt --
    run = DFlashRun(rows=num_rows)
    record(drafter, run)
    clock = time.perf_counter()
    mask = model_kwargs.get("attention_mask")
    num_seen = int(cache.get_seq_length())
    shown = torch.ones(num_rows, num_seen, dtype=torch.long) if mask is None else mask[:, :num_seen].long()
    drafting = Drafting(drafter, target, generation_config, logits_processor, num_rows, shown)
    wanted = list(drafting.feature_indices)
    last_layer = target.config.get_text_config().num_hidden_layers
    packs = drafter.pack_head and not torch.is_autocast_enabled("cpu")
    plain_head = target.get_output_embeddings()
    head = PackedHead.of(plain_head) if packs else None
    if not drafter.pack_head:
        PackedHead.forget(plain_head)
    if head is not None and drafter.lm_head is None:
        drafting.target_head = head
    takes_no_logits = head is not None and "logits_to_keep" in inspect.signature(target.forward).parameters
    if takes_no_logits and last_layer not in wanted:
        wanted.append(last_layer)
    model_kwargs["output_hidden_states"] = True if keep_hidden else wanted
    _take_up_context(drafting, drafter, cache, input_ids, model_kwargs, generation_config)
    outputs, features = _prefill(target, input_ids, generation_config, model_kwargs, wanted)
    if getattr(outputs, "cache", None) is None:
        raise ValueError(
            f"{type(target).__name__} fills no cache, which a DFlash drafter needs; call generate() without "
            "assistant_model."
        )
    filled = int(outputs.cache.get_seq_length()) - num_seen
    if filled > prompt_length > 0:  # 0: an embedded prompt
        raise ValueError(
            f"{type(target).__name__} puts positions of its own before a prompt ({filled} for {prompt_length} tokens) "
            "that a DFlash drafter cannot follow; call generate() without assistant_model."
        )
    written_in_place = any(isinstance(layer, StaticLayer) for layer in outputs.cache.layers)
    if not outputs.cache.is_croppable and (written_in_place or not target._is_stateful):
        raise ValueError(
            f"{type(target).__name__}'s cache cannot be cropped, which taking back rejected drafts needs; "
            "call generate() without assistant_model, or with another cache_implementation."
        )
    # Where the head alone gives the target's logits again, passes leave the head out and ours does it.
    final = features[last_layer][:, -1:] if takes_no_logits else None
    own_head = takes_no_logits and final.dtype == outputs.logits.dtype == torch.float32
    if own_head and not torch.allclose(head(final), outputs.logits[:, -1:], rtol=1e-4, atol=1e-4):
        own_head = False  # the target does more to its logits, or its weight was changed behind our back
        if not torch.allclose(head(final), plain_head(final), rtol=1e-4, atol=1e-4):
            PackedHead.forget(plain_head)
            drafting.target_head = plain_head
    prompt_shown = None if mask is None or bool(mask.all()) else mask[:, -features[wanted[0]].shape[1] :].bool()

    if target._is_stateful:
        passes = ReplayPass(target, cache, model_kwargs, generation_config)
    elif no_slots or keep_attentions:
        cache.activate_past_recording()
        passes = CropPass(target, cache, model_kwargs, generation_config)
    else:
        passes = SlotPass(target, cache, model_kwargs, prompt_length, max_length, num_drafts + 1)
    pass_inputs = {"output_hidden_states": model_kwargs["output_hidden_states"]}
    if keep_attentions:
        pass_inputs["output_attentions"] = True
    no_logits = {"logits_to_keep": torch.empty(0, dtype=torch.long)}

    # -- draft and verify --
    ids = input_ids.new_full((num_rows, prompt_length + min(max_length - prompt_length, 256) + 1), pad_id)
    ids[:, :prompt_length] = input_ids
    rows, lengths = list(range(num_rows)), [prompt_length] * num_rows  # rows still here; length of every row
    logits = outputs.logits[:, -1:]
    drafts, drawn_from, offered = input_ids[:, :0], None, [0] * num_rows
    noise = noise_for(rows, lengths, 1) if coupled else None
    guesses, drafted, prefilling, draft_s = [], False, True, 0.0
    try:
        while True:
            # Accept. `logits` are the target's at the last committed token and at each draft.
            logits = logits.to(input_ids.device)
            if do_sample or len(logits_processor) or keep_scores or keep_logits:
                logits = logits.to(torch.float32, copy=True)
            if at_once:
                flat = logits.flatten(0, 1)
                values, kept = warp(logits_processor, flat.clone() if keep_logits else flat)
                values = values.unflatten(0, logits.shape[:2])
                kept = None if kept is None else kept.unflatten(0, logits.shape[:2])
                count_of = from_host(offered, input_ids.device)
                tokens, accepted = accept((values, kept), drafts, count_of, drawn_from, noise, do_sample)
                # Here the host waits for the device; else only where it asks for confidences, and after a top-k.
                both = torch.cat([tokens, accepted[:, None]], dim=1).tolist()
                committed = [row[: row[-1] + 1] for row in both]
                processed = spread(values, kept, logits.shape[-1]) if keep_scores else None
            else:
                committed, processed = [], []
                for i, row in enumerate(rows):
                    chosen, of_row = accept_in_turn(
                        logits[i, : offered[i] + 1],
                        drafts[i, : offered[i]],
                        drawn_from and [None if part is None else part[i : i + 1] for part in drawn_from],
                        noise and noise.of_row(i),
                        ids[row : row + 1, : lengths[row]],
                        of_rows[row],
                        do_sample,
                        ends,
                    )
                    committed.append(chosen.tolist())
                    processed.append(of_row)

            # Commit, each row up to its end.
            if ids.shape[1] <= max(lengths) + drafts.shape[1] + 1:
                more = ids.shape[1] // 4 + drafts.shape[1] + 1
                ids = torch.cat([ids, ids.new_full((num_rows, more), pad_id)], dim=1)
            finished = []
            for i, row in enumerate(rows):
                new = committed[i][: max_length - lengths[row]]
                end = next((j for j, token in enumerate(new) if token in eos_ids), None)
                new = new if end is None else new[: end + 1]
                start = lengths[row]
                ids[row, start : start + len(new)] = from_host(new, ids.device)
                done = end is not None or start + len(new) >= max_length
                if ends_anywhere:
                    # Criteria see what they would see without a drafter: the text as it grows, token by token.
                    for count in range(1, len(new) + 1):
                        seen = None
                        if keep_scores:
                            seen = tuple(one[None] for part in (*scores[row], processed[i][:count]) for one in part)
                        if bool(stopping_criteria(ids[row : row + 1, : start + count], seen).all()):
                            new, done = new[:count], True
                            break
                    ids[row, start + len(new) : start + len(committed[i])] = pad_id
                committed[i] = new
                lengths[row] += len(new)
                if keep_scores:
                    scores[row].append(processed[i][: len(new)].clone())
                if keep_logits:
                    raw_logits[row].append(logits[i, : len(new)].clone())
                if done:
                    finished.append(i)
            counts = [len(new) for new in committed]
            if streamer is not None:
                for token in committed[0]:
                    streamer.put(torch.tensor([token]))
            passes.commit(counts, drafts.shape[1] + 1)
            if keep_attentions and (prefilling or not outputs.attentions):  # some backends return none
                attentions += (outputs.attentions,) * counts[0]
            elif keep_attentions:
                seen = lengths[0] - counts[0] + passes.num_columns - prompt_length  # of the cache, not of the ids
                attentions = _split_model_outputs(
                    attentions, outputs.attentions, seen, counts[0], is_decoder_attention=True
                )
            if keep_hidden and prefilling:
                hidden += (outputs.hidden_states,)
            elif keep_hidden:
                hidden = _split_model_outputs(hidden, outputs.hidden_states, lengths[0] - counts[0], counts[0])

            # Figures.
            now = time.perf_counter()
            run.tokens += sum(counts)
            run.target_passes += 1
            if prefilling:
                run.prefill_s += now - clock
            else:
                run.verifying_s += now - clock
                run.drafted_cycles += drafted
                run.note(offered, [count - 1 for count in counts])
                if schedule is not None:
                    schedule.note_cycle(drafts.shape[1], drafted, draft_s, now - clock, sum(counts))
            clock = now
            if guesses:
                _compare_guesses(schedule, guesses, committed)
            guesses = []

            # Rows that are finished leave.
            last_features, last_counts = features, counts
            if finished:
                staying = [i for i in range(len(rows)) if i not in finished]
                if not staying:
                    break
                keep = from_host(staying, input_ids.device)
                gone = {rows[i]: (i, lengths[rows[i]]) for i in finished}
                passes.leave(gone if keeps_cache else {}, keep)
                drafting.keep_rows(staying)
                features = {i: features[i][keep.to(features[i].device)] for i in drafting.feature_indices}
                prompt_shown = None if prompt_shown is None else prompt_shown[keep]
                rows, counts = [rows[i] for i in staying], [counts[i] for i in staying]
                if schedule is not None:
                    schedule.rows(len(rows))
            drafting.add_context(features, None if prefilling else counts, prompt_shown if prefilling else None)
            prefilling = False

            # Draft.
            at = from_host([rows, [lengths[row] - 1 for row in rows]], ids.device)
            anchors = ids[at[0], at[1]]
            room = [max_length - lengths[row] - 1 for row in rows]  # the target's own token needs a place, too
            limit = min(num_drafts, max(room))
            drafts, drawn_from, offered, drafted = anchors[:, None][:, :0], None, [0] * len(rows), False
            noise = None
            here = [lengths[row] for row in rows]
            if limit > 0 and (schedule is None or schedule.wants_draft()):
                drafted = True
                limit = limit if schedule is None else min(limit, schedule.most())
                histories = [ids[row : row + 1, : lengths[row]] for row in rows]
                noise = noise_for(rows, here, limit + 1) if coupled else None
                drafts, *drawn_from = drafting.draft(anchors, limit, histories, noise)
                offered = [min(drafts.shape[1], space) for space in room]
                if threshold > 0.0:
                    sure = confident(drawn_from[0], threshold).tolist()
                    offered = [min(pair) for pair in zip(offered, sure, strict=True)]
                longest = max(offered)
                if schedule is not None and longest:
                    # One copy to the host for both.
                    fixed = (top_probability(drawn_from[0]) * 2**30).long()
                    guesses = [
                        (row[drafts.shape[1] :], [value / 2**30 for value in row[: drafts.shape[1]]])
                        for row in torch.cat([fixed, drafts], dim=1).tolist()
                    ]
                    longest = schedule.length([confidence[:longest] for _, confidence in guesses])
                    offered = [min(longest, count) for count in offered]
                drafts = drafts[:, :longest]
                drawn_from = [None if part is None else part[:, :longest] for part in drawn_from]
            elif coupled:
                noise = noise_for(rows, here, 1)
            now = time.perf_counter()
            draft_s, clock = now - clock, now
            run.drafting_s += draft_s

            # Verify.
            block = torch.cat([anchors[:, None], drafts], dim=1)
            headless = own_head and block.numel() > 2  # at one or two rows the plain kernel is as fast
            starts = [length - 1 for length in here]
            outputs = passes.run(block, starts, **pass_inputs, **(no_logits if headless else {}))
            features = outputs.hidden_states
            logits = head(features[last_layer]) if headless else outputs.logits[:, -block.shape[1] :]
    except BaseException:
        # Whatever stopped us (a criterion, a streamer, Ctrl-C), a cache that the user holds must not keep drafts.
        passes.close({row: (i, lengths[row]) for i, row in enumerate(rows)})
        raise

    if keeps_cache or num_rows == 1:
        passes.close({row: (i, lengths[row]) for i, row in enumerate(rows)})
    if streamer is not None:
        streamer.end()
    sequences = ids[:, : max(lengths)]
    if num_rows == 1:
        _leave_context(drafting, drafter, cache, last_features, last_counts, prompt_shown, prefilling, sequences)
    if not returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_step(scores) if keep_scores else None,
        logits=_by_step(raw_logits) if keep_logits else None,
        attentions=attentions,
        hidden_states=hidden,
        cache=cache,
    )


def _by_step(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Scores `[m, V]` of each row's cycles as one `[B, V]` for every step; zeros where a row has ended before."""
    whole = [torch.cat(row) for row in rows]
    longest = max(len(row) for row in whole)
    padded = [torch.cat([row, row.new_zeros(longest - len(row), row.shape[1])]) for row in whole]
    return tuple(torch.stack(padded, dim=1))


def _compare_guesses(schedule, guesses, committed) -> None:
    """Tell the schedule which drafts were right, the first one that was not checked included."""
    for (tokens, confidence), text in zip(guesses, committed, strict=True):
        shown = min(len(tokens), len(text))
        right = next((i for i in range(shown) if tokens[i] != text[i]), shown)
        schedule.note_right(confidence[:shown], right)


def _take_up_context(drafting, drafter, cache, input_ids, model_kwargs, generation_config) -> None:
    """With a cache from an earlier turn: go on with the drafter's context that was left beside it, if it fits."""
    past = cache.get_seq_length()
    left = _continued.pop(cache, None)
    if past == 0:
        return
    mask = model_kwargs.get("attention_mask")
    full_length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    has_full_ids = full_length == input_ids.shape[1]
    fits = (
        left is not None
        and len(input_ids) == 1
        and left.drafter() is drafter
        and left.length == past
        and (not has_full_ids or _same_text(left, input_ids, past))
    )
    if fits:
        for name in ("context_cache", "positions", "held", "pending"):
            setattr(drafting, name, getattr(left, name))
    else:
        warnings.warn(
            "The cache comes from an earlier turn that this drafter did not take part in, that had several rows, or "
            "that broke off: the text is right, but the drafter knows only the new tokens, so expect fewer accepted "
            "drafts.",
            stacklevel=4,
        )


def _same_text(left, input_ids, past: int) -> bool:
    """Whether the ids that the context was made from, as far as they were given then, stand in `input_ids` too."""
    ids = left.ids[:, : left.ids.shape[1] - 1].to(input_ids.device)  # the last token is not in the cache
    return torch.equal(ids, input_ids[:, past - ids.shape[1] : past])


def _leave_context(drafting, drafter, cache, features, counts, shown, prefilling, input_ids) -> None:
    """Put the drafter's context beside the cache, the positions of the last pass included."""
    drafting.add_context(features, None if prefilling else counts, shown if prefilling else None)
    _continued[cache] = SimpleNamespace(
        drafter=weakref.ref(drafter),
        context_cache=drafting.context_cache,
        pending=drafting.pending,
        positions=drafting.positions,
        held=drafting.held,
        length=cache.get_seq_length(),
        ids=input_ids.clone(),
    )

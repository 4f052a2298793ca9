"""The decode loop of one sequence: draft, verify, accept, commit.

It stands in for transformers' assisted loop and keeps its interface. What it does otherwise: a cache from an earlier
turn continues whichever ids come with it, embedded prompts and chunked prefills work, processors see committed tokens
only and each once, and whatever ends the text (EOS, a length, a stop string, a criterion) ends it at that very token.
"""

import warnings
import weakref
from types import SimpleNamespace

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, _split_model_outputs

from .candidates import MEMORYLESS

# Keyed by the target's cache object: the drafter's context that belongs beside it, for the next turn.
_continued: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def verify(logits, drafts, draft_logits, ids, processors, do_sample, ends=None):
    """Which tokens to commit, and the processed scores they came from.

    Args:
        logits: `[g + 1, V]`, the target's at the anchor and at each of the g drafts.
        drafts: `[g]` long.
        draft_logits: `[g, V]`, what the drafts were drawn from when sampling; None compares for equality.
        ids: `[1, n]`, the sequence up to the anchor.
        processors: the call's logits processors.
        do_sample: sample, or take the likeliest.
        ends: says of a sequence `[1, n]` whether the text ends with it; asked where processors must not see what lies
            behind the end.

    Returns:
        tokens `[m]`, 1 <= m <= g + 1: the accepted drafts and one token of the target's own, and the processed scores
        `[m, V]`. When sampling they follow the target's processed distribution exactly (speculative sampling,
        arXiv 2211.17192, algorithm 1).
    """
    num_drafts = drafts.shape[0]
    at_once = all(type(processor) in MEMORYLESS for processor in processors)
    if at_once:
        for processor in processors:
            logits = processor(ids.expand(num_drafts + 1, -1), logits)
        if not do_sample:
            chosen = logits.argmax(-1)
            accepted = int((chosen[:-1] == drafts).long().cumprod(0).sum())
            return chosen[: accepted + 1], logits[: accepted + 1]
    tokens, scores = [], []
    for slot in range(num_drafts + 1):
        row = logits[slot : slot + 1]
        if not at_once:
            # Only reached with every token before it committed: state that a processor keeps stays true.
            row = processors(ids, row)
        scores.append(row)
        draft = drafts[slot] if slot < num_drafts else None
        if not do_sample:
            token = row[0].argmax(-1)
        else:
            p = row[0].softmax(-1)
            if draft is not None and draft_logits is not None:
                q = draft_logits[slot].softmax(-1)
                if torch.rand((), device=p.device) * q[draft] < p[draft]:
                    token = draft
                else:
                    residual = (p - q).clamp_min(0)
                    # p equals q to rounding: rejecting was rounding too, and p itself is what is left
                    token = torch.multinomial(residual if residual.sum() > 0 else p, 1)[0]
            else:
                token = torch.multinomial(p, 1)[0]
        tokens.append(token)
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
        if draft is None or token != draft or (not at_once and ends is not None and ends(ids)):
            break
    return torch.stack(tokens), torch.cat(scores)


def _extend(model_kwargs: dict, count: int) -> dict:
    """The kwargs of a pass over `count` tokens more than have been committed."""
    extended = dict(model_kwargs)
    for key in ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"):
        value = model_kwargs.get(key)
        if value is None or count == 0:
            continue
        last = value[..., -1:]
        if key == "position_ids":
            more = last + torch.arange(1, count + 1, device=value.device)
        elif key == "attention_mask":
            more = value.new_ones(*value.shape[:-1], count)
        elif key == "mm_token_type_ids":
            more = value.new_zeros(*value.shape[:-1], count)  # generated tokens are text
        else:
            more = last.expand(*value.shape[:-1], count)
        extended[key] = torch.cat([value, more], dim=-1)
    return extended


def _prefill(target, input_ids, generation_config, model_kwargs, feature_indices):
    """Run the prompt through the target: outputs, and the hidden states of ALL its chunks at `feature_indices`."""
    if generation_config.prefill_chunk_size is None:
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
        return outputs, outputs.hidden_states
    chunks = []
    outputs = type(target)._prefill(_NotingCaller(target, chunks), input_ids, generation_config, model_kwargs)
    return outputs, {i: torch.cat([states[i] for states in chunks], dim=1) for i in feature_indices}


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
    """Generate one sequence with `drafter`; called by `generate()`, whose arguments these are.

    Raises:
        ValueError: more than one sequence, or a cache that cannot be cropped.
    """
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"A DFlash drafter serves one sequence at a time, got a batch of {input_ids.shape[0]}; call generate() "
            "for each, or leave out assistant_model."
        )
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError(
            f"{type(target).__name__} makes no cache that generate() knows, which a DFlash drafter needs; call "
            "generate() without assistant_model."
        )
    cache.activate_past_recording()
    do_sample, returns_dict = generation_config.do_sample, generation_config.return_dict_in_generate
    keep_scores = returns_dict and generation_config.output_scores
    keep_logits = returns_dict and generation_config.output_logits
    keep_attentions = returns_dict and generation_config.output_attentions
    keep_hidden = returns_dict and generation_config.output_hidden_states
    keeps = keep_scores, keep_logits, keep_attentions, keep_hidden
    scores, raw_logits, attentions, hidden = (() if keep else None for keep in keeps)

    generator = drafter.candidate_generator(
        target,
        generation_config=generation_config,
        logits_processor=logits_processor,
        model_kwargs=model_kwargs,
    )
    _take_up_context(generator, drafter, cache, input_ids, model_kwargs, generation_config)
    model_kwargs.update(generator.model_kwargs_overrides)
    ends_anywhere = [c for c in stopping_criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    model_forward = target.__call__
    if target._valid_auto_compile_criteria(model_kwargs, generation_config):
        model_forward = target.get_compiled_call(generation_config.compile_config)

    generator.get_candidates(input_ids, is_first_iteration=True)  # starts the clock of the prefill
    outputs, features = _prefill(target, input_ids, generation_config, model_kwargs, generator.feature_indices)
    if getattr(outputs, "cache", None) is None:
        raise ValueError(
            f"{type(target).__name__} fills no cache, which a DFlash drafter needs; call generate() without "
            "assistant_model."
        )
    if not outputs.cache.is_croppable:
        raise ValueError(
            f"{type(target).__name__}'s cache cannot be cropped, which taking back rejected drafts needs; "
            "call generate() without assistant_model, or with another cache_implementation."
        )
    eos_ids = getattr(generation_config, "_eos_token_tensor", None)
    eos_ids = None if eos_ids is None else eos_ids.to(input_ids.device)
    prompt_length = int(outputs.cache.get_seq_length())
    new_drafts, draft_logits, prefilling, finished = input_ids[:, :0], None, True, False
    try:
        while True:
            num_drafts = new_drafts.shape[1]
            logits = outputs.logits[0, -num_drafts - 1 :].to(input_ids.device)
            if do_sample or len(logits_processor) or keep_scores or keep_logits:
                logits = logits.to(torch.float32, copy=True)
            tokens, rows = verify(
                logits.clone() if keep_logits else logits,
                new_drafts[0],
                None if draft_logits is None else draft_logits[0],
                input_ids,
                logits_processor,
                do_sample,
                ends=lambda ids: eos_ids is not None and bool(torch.isin(ids[0, -1], eos_ids)),
            )
            start = input_ids.shape[1]
            if eos_ids is not None:
                ends = torch.isin(tokens, eos_ids).nonzero()
                if len(ends):
                    tokens = tokens[: int(ends[0]) + 1]
            extended = torch.cat([input_ids, tokens[None]], dim=1)
            count = len(tokens)
            if ends_anywhere:
                # Criteria see what they would see without a drafter: the text as it grows, token by token.
                for count in range(1, len(tokens) + 1):
                    seen = scores + tuple(row[None] for row in rows[:count]) if keep_scores else None
                    if bool(stopping_criteria(extended[:, : start + count], seen).all()):
                        finished = True
                        break
            else:
                finished = bool(stopping_criteria(extended, None).all())
            input_ids, tokens, rows = extended[:, : start + count], tokens[:count], rows[:count]
            if streamer is not None:
                for token in tokens.cpu():
                    streamer.put(token[None])

            outputs.cache.crop(-(num_drafts + 1 - count))
            generator.update_candidate_strategy(input_ids, rows[None], count - 1)
            model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=count)
            if keep_scores:
                scores += tuple(row[None] for row in rows)
            if keep_logits:
                raw_logits += tuple(row[None] for row in logits[:count])
            if keep_attentions and (prefilling or not outputs.attentions):  # some backends return none
                attentions += (outputs.attentions,) * count
            elif keep_attentions:
                attentions = _split_model_outputs(
                    attentions, outputs.attentions, start, count, is_decoder_attention=True
                )
            if keep_hidden and prefilling:
                hidden += (outputs.hidden_states,)
            elif keep_hidden:
                hidden = _split_model_outputs(hidden, outputs.hidden_states, start, count)
            if finished:
                break

            candidates, draft_logits = generator.get_candidates(
                input_ids, model_outputs=SimpleNamespace(hidden_states=features), n_last_matches=count - 1
            )
            new_drafts = candidates[:, input_ids.shape[1] :]
            prefilling = False
            model_inputs = target.prepare_inputs_for_generation(
                candidates,
                next_sequence_length=new_drafts.shape[1] + 1,
                is_first_iteration=False,
                **_extend(model_kwargs, new_drafts.shape[1]),
            )
            if "logits_to_keep" in model_inputs:
                model_inputs["logits_to_keep"] = new_drafts.shape[1] + 1
            with target._optimize_model_for_decode():
                outputs = model_forward(**model_inputs)
            features = outputs.hidden_states
    except BaseException:
        # Whatever stopped us (a criterion, a streamer, Ctrl-C), a cache that the user holds must not keep drafts.
        _crop_to(cache, prompt_length + max(generator.run.tokens - 1, 0))
        raise

    if streamer is not None:
        streamer.end()
    _leave_context(generator, drafter, outputs.cache, features, count, input_ids)
    if not returns_dict:
        return input_ids
    return GenerateDecoderOnlyOutput(
        sequences=input_ids,
        scores=scores,
        logits=raw_logits,
        attentions=attentions,
        hidden_states=hidden,
        cache=model_kwargs["cache"],
    )


def _crop_to(cache, length) -> None:
    """Leave at most `length` positions in every layer; a pass that broke off has filled some layers and not others."""
    for layer in cache.layers:
        extra = int(layer.get_seq_length() - length)
        if extra > 0:
            layer.crop(-extra)


def _take_up_context(generator, drafter, cache, input_ids, model_kwargs, generation_config) -> None:
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
        and left.drafter() is drafter
        and left.length == past
        and (not has_full_ids or _same_text(left, input_ids, past))
    )
    if fits:
        generator.context_cache, generator.position, generator.pending = left.context, left.position, left.pending
        generator.num_seen = past
    else:
        warnings.warn(
            "The cache comes from an earlier turn that this drafter did not take part in, or that broke off: the text "
            "is right, but the drafter knows only the new tokens, so expect fewer accepted drafts.",
            stacklevel=4,
        )


def _same_text(left, input_ids, past: int) -> bool:
    """Whether the ids that the context was made from, as far as they were given then, stand in `input_ids` too."""
    ids = left.ids[:, : left.ids.shape[1] - 1].to(input_ids.device)  # the last token is not in the cache
    return torch.equal(ids, input_ids[:, past - ids.shape[1] : past])


def _leave_context(generator, drafter, cache, features, count, input_ids) -> None:
    """Put the drafter's context beside the cache, the positions of the last pass included."""
    generator.add_context(features, count - 1)
    _continued[cache] = SimpleNamespace(
        drafter=weakref.ref(drafter),
        context=generator.context_cache,
        pending=generator.pending,
        position=generator.position,
        length=cache.get_seq_length(),
        ids=input_ids.clone(),
    )

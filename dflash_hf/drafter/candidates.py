"""DFlashCandidateGenerator: from the target's hidden states to a proposed block, one drafter pass a cycle."""

import threading
import time
import weakref
from dataclasses import dataclass, field

import torch
from transformers.generation import logits_process as lp
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from .cache import DFlashContextCache

logger = logging.get_logger(__name__)

# Warpers that look at one row of logits and nothing else: all slots of a draft can be warped at once.
MEMORYLESS = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.LogitNormalization,
    lp.InfNanRemoveLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
)
# Processors that read the ids so far but keep no state: drafts can pass through them slot by slot. Any other kind
# (watermarks, guidance, a user's own) may count its calls and must not see drafts; leaving it out of the drafting
# changes the acceptance, never the output.
READS_HISTORY = (
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
)


@dataclass
class DFlashRun:
    """What one generate call did. Times are seconds of wall clock on the host.

    Attributes:
        tokens: new tokens, the one that the prefill gives included.
        target_passes: passes of the target, the prefill included.
        cycles: passes that verified, i.e. all but the prefill.
        accepted: how many cycles accepted at least k + 1 drafts, for every draft slot k.
        offered: how many cycles offered a draft at slot k.
        prefill_s, drafting_s, verifying_s: time in the prefill, in the drafter (its head included), in the target's
            verification (logits processing and acceptance included).

    Example:
        >>> DFlashRun(tokens=9, target_passes=4, accepted=[3, 2, 0], offered=[3, 3, 3]).tau
        2.6666666666666665
    """

    tokens: int = 0
    target_passes: int = 0
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    drafting_s: float = 0.0
    verifying_s: float = 0.0

    @property
    def cycles(self) -> int:
        return max(self.target_passes - 1, 0)

    @property
    def tau(self) -> float:
        """Mean tokens committed a cycle, the bonus token included (paper, section 2); nan before the first cycle."""
        return (self.tokens - 1) / self.cycles if self.cycles else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the cycles offering slot k that accepted it (and so all slots before it)."""
        return [a / o for a, o in zip(self.accepted, self.offered, strict=True)]

    def __str__(self) -> str:
        by_position = " ".join(f"{share:.2f}" for share in self.acceptance_by_position)
        return (
            f"{self.tokens} tokens in {self.target_passes} target passes, tau {self.tau:.2f}, accepted by position "
            f"[{by_position}], prefill {self.prefill_s:.2f} s, drafting {self.drafting_s:.2f} s, "
            f"verifying {self.verifying_s:.2f} s"
        )


# The newest run of each drafter: by thread, so that two threads can share a drafter, and overall, because streaming
# users generate in a worker thread and read from the main one.
_newest: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_of_thread = threading.local()


def last_run(drafter) -> DFlashRun | None:
    """The newest run of `drafter`: a worker thread's own, the main thread's unless an ended worker's is newer."""
    mine = getattr(_of_thread, "runs", {}).get(drafter)
    newest, thread = _newest.get(drafter, (None, None))
    if mine is None or (threading.current_thread() is threading.main_thread() and not thread.is_alive()):
        return newest
    return mine


def _record(drafter, run: DFlashRun) -> None:
    if not hasattr(_of_thread, "runs"):
        _of_thread.runs = weakref.WeakKeyDictionary()
    _of_thread.runs[drafter] = run
    _newest[drafter] = run, threading.current_thread()


def _knobs(drafter) -> tuple[int, float]:
    """How many drafts to offer at most, and below which confidence to stop, from `drafter.generation_config`."""
    wanted = drafter.generation_config.num_assistant_tokens
    threshold = drafter.generation_config.assistant_confidence_threshold
    if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
        raise ValueError(
            f"drafter.generation_config.num_assistant_tokens must be a whole number from 1 on, or None for the full "
            f"block, got {wanted!r}."
        )
    if threshold is not None and not (isinstance(threshold, int | float) and 0 <= threshold <= 1):
        raise ValueError(
            f"drafter.generation_config.assistant_confidence_threshold must be a probability from 0 to 1, or None, "
            f"got {threshold!r}."
        )
    full = drafter.config.num_drafts
    return full if wanted is None else min(wanted, full), threshold or 0.0


class DFlashCandidateGenerator(CandidateGenerator):
    """Drafts for one `generate()` call of one sequence; transformers' assisted loop verifies.

    The first call comes before the target has run and offers nothing. Every later one takes the hidden states of the
    positions that the last target pass committed as new context, runs the drafter once on
    `[anchor, mask, ..., mask]`, and offers at most the tokens that the length limit leaves room for.

    When sampling, the drafts are drawn from the drafter's own warped distribution and exactly those logits are
    returned, which is what rejection sampling divides by. How many slots are offered depends on distributions only,
    never on the sampled tokens, so the output keeps the target's distribution.

    Args:
        drafter: a `DFlashDraftModel`.
        target: the model that generates.
        generation_config: of this call; `max_length` and `do_sample` are read.
        logits_processor: the call's processors.
        model_kwargs: of this call; the cache's length and the padding of the prompt are read.

    Raises:
        ValueError: a knob of `drafter.generation_config` is out of its range, or (in a call) the target's hidden
            states are not as wide as the drafter expects.

    Example:
        >>> generator = DFlashCandidateGenerator(drafter, target, generation_config=generation_config,
        ...     logits_processor=processors, model_kwargs={"cache": cache})           # doctest: +SKIP
    """

    requires_model_outputs = True

    def __init__(self, drafter, target, generation_config, logits_processor, model_kwargs):
        self.drafter = drafter
        self.target_embeddings = target.get_input_embeddings()
        self.target_head = target.get_output_embeddings()
        self.vocab_size = drafter.config.vocab_size
        self.feature_indices = [i + 1 for i in drafter.config.target_layer_ids]
        # A user who asked for the hidden states gets them all; the drafter picks its own from them.
        everything = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        self.model_kwargs_overrides = {"output_hidden_states": True if everything else self.feature_indices}

        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        self.processors = [p for p in logits_processor or () if type(p) in MEMORYLESS + READS_HISTORY]
        self.slot_by_slot = any(type(p) in READS_HISTORY for p in self.processors)
        self.num_drafts, self.threshold = _knobs(drafter)

        cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
        # Positions count real tokens: what the target's cache held before this call, less the padding on the left.
        self.num_padding = 0 if mask is None else int(mask[0].long().argmax())
        self.num_seen = 0 if cache is None else cache.get_seq_length()
        self.position = max(self.num_seen - self.num_padding, 0)  # of the next context feature
        self.context_cache = DFlashContextCache(drafter.config.num_hidden_layers)
        self.pending: torch.Tensor | None = None  # features [1, S, F * D_t] that no drafter pass has taken in yet

        self.run = DFlashRun()
        _record(drafter, self.run)
        self._clock = time.perf_counter()
        self._num_offered = 0

    def get_candidates(
        self,
        input_ids,
        model_kwargs=None,
        model_outputs=None,
        is_first_iteration=False,
        n_last_matches=0,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Return `input_ids` `[1, n]` with g drafts appended, and the logits `[1, g, V]` they were drawn from.

        The logits are float32 and None when nothing was sampled (greedy) or nothing is offered (g = 0).
        """
        started = self._clock = time.perf_counter()
        ids, logits = input_ids, None
        self._num_offered = 0
        limit = min(self.num_drafts, self.max_length - input_ids.shape[1] - 1)
        if not is_first_iteration:
            self.add_context(model_outputs.hidden_states, n_last_matches)
            if limit > 0:
                ids, logits = self._draft(input_ids, limit)
            self._num_offered = ids.shape[1] - input_ids.shape[1]
        self._clock = time.perf_counter()
        self.run.drafting_s += self._clock - started
        return ids, logits

    def add_context(self, hidden_states, n_last_matches: int) -> None:
        """Keep the features of the positions that the last target pass committed; the next drafter pass takes them in.

        Args:
            hidden_states: the pass's, indexed as transformers does; only the drafter's own are read.
            n_last_matches: committed positions less one. After the prefill everything is committed.
        """
        features = [hidden_states[i] for i in self.feature_indices]
        if self.run.target_passes == 1:  # the prefill: all of it is committed, padding carries nothing
            start, stop = max(self.num_padding - self.num_seen, 0), features[0].shape[1]
        else:
            start, stop = 0, n_last_matches + 1
        device, width = self.drafter.device, sum(feature.shape[-1] for feature in features)
        if width != self.drafter.fc.in_features:
            raise ValueError(
                f"The drafter reads {self.drafter.fc.in_features} context features a position, the target's layers "
                f"{self.drafter.config.target_layer_ids} give {width}; use the drafter of this target."
            )
        new = torch.cat([feature[:, start:stop].to(device) for feature in features], dim=-1)
        self.pending = new if self.pending is None else torch.cat([self.pending, new], dim=1)

    def _draft(self, input_ids, limit: int) -> tuple[torch.LongTensor, torch.Tensor | None]:
        drafter, config = self.drafter, self.drafter.config
        block = input_ids.new_full((1, config.block_size), config.mask_token_id)
        block[:, 0] = input_ids[:, -1]  # the anchor
        context, self.pending = self.pending, None
        num_context = context.shape[1]
        positions = torch.arange(self.position, self.position + num_context + config.block_size, device=context.device)
        self.context_cache.set_previous_accepted_tokens(num_context)
        self.position += num_context
        hidden = drafter(
            noise_embeds=drafter.embed_block(block, self.target_embeddings),
            context_hidden_states=context,
            position_ids=positions[None],
            cache=self.context_cache,
        ).last_hidden_state
        first = config.block_size - config.num_drafts  # the slot of the first draft: 1, or 0 with sample_from_anchor
        logits = drafter.compute_logits(hidden[:, first : first + limit], self.target_head, self.vocab_size)
        logits = logits.to(input_ids.device)
        if self.do_sample or self.processors:
            logits = logits.float()
        if self.slot_by_slot:
            drafts, logits = self._pick_slot_by_slot(input_ids, logits)
        else:
            for processor in self.processors:
                logits = processor(input_ids.expand(limit, -1), logits[0])[None]
            logits = logits[:, : self._num_possible(logits)]
            drafts = self._pick(logits[0])[None]
        limit = drafts.shape[1]
        if self.threshold > 0.0:
            confident = logits[0].float().softmax(-1).amax(-1) >= self.threshold
            limit = int(confident.long().cumprod(0).sum())
        drafts, logits = drafts[:, :limit], logits[:, :limit]
        ids = torch.cat([input_ids, drafts], dim=1)
        return ids, logits if self.do_sample and limit > 0 else None

    def _pick(self, logits: torch.Tensor) -> torch.LongTensor:
        """One token for every row of `[g, V]`: the likeliest, or one drawn from it."""
        if self.do_sample:
            return torch.multinomial(logits.softmax(-1), num_samples=1)[:, 0]
        return logits.argmax(-1)

    def _pick_slot_by_slot(self, input_ids, logits):
        """As above where a processor reads the ids so far: each slot is processed given the drafts before it."""
        ids, rows = input_ids, []
        for slot in range(logits.shape[1]):
            row = logits[:, slot]
            for processor in self.processors:
                row = processor(ids, row)
            if not self._num_possible(row[None]):
                break
            rows.append(row)
            ids = torch.cat([ids, self._pick(row)[:, None]], dim=1)
        return ids[:, input_ids.shape[1] :], torch.stack(rows, dim=1) if rows else logits[:, :0]

    def _num_possible(self, logits) -> int:
        """Leading slots of `[1, g, V]` with a possible token: processors can forbid all of a reduced vocabulary."""
        if self.drafter.d2t is None:
            return logits.shape[1]
        return int((logits[0] > float("-inf")).any(-1).long().cumprod(0).sum())

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """Called by the loop after every target pass, the last one too: keep the figures."""
        run, elapsed = self.run, time.perf_counter() - self._clock
        if run.target_passes == 0:
            run.prefill_s += elapsed
        else:
            run.verifying_s += elapsed
            while len(run.offered) < self._num_offered:
                run.offered.append(0)
                run.accepted.append(0)
            for slot in range(self._num_offered):
                run.offered[slot] += 1
                run.accepted[slot] += slot < num_matches
        run.tokens += int(num_matches) + 1
        run.target_passes += 1
        if run.cycles == 32 and run.tau < 1.05:
            logger.warning(
                f"After 32 cycles the drafter has committed only {run.tau:.2f} tokens a cycle: it does not help here. "
                "Likely causes: a drafter of another target (or of the target before a fine-tune), another mask token "
                "or other feature layers than in training, or a chat template, thinking mode or language that it was "
                "not trained on."
            )


__all__ = ["DFlashCandidateGenerator", "DFlashRun"]

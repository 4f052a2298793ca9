"""DFlashCandidateGenerator: from the target's hidden states to a proposed block, one drafter pass a cycle."""

import copy
import threading
import time
import weakref
from dataclasses import dataclass, field

import torch
from transformers.generation import logits_process as lp
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from .cache import DFlashContextCache, from_host
from .kernels import with_cpu_kernels

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
# Those of them that look at values only, whichever token has them.
_VALUES_ONLY = tuple(kind for kind in MEMORYLESS if kind is not lp.SuppressTokensLogitsProcessor)
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
        tokens: new tokens of all sequences, those that the prefill gives included.
        target_passes: passes of the target, the prefill included.
        cycles: passes that verified, i.e. all but the prefill.
        rows: sequences of the batch.
        row_cycles: cycles, counted once for each sequence that took part.
        drafted_cycles: cycles that the drafter ran in; the others were plain decoding steps.
        accepted: how many (row) cycles accepted at least k + 1 drafts, for every draft slot k.
        offered: how many (row) cycles offered a draft at slot k.
        prefill_s, drafting_s, verifying_s: time in the prefill, in the drafter (its head included), in the target's
            verification (logits processing and acceptance included).

    Example:
        >>> DFlashRun(tokens=9, target_passes=4, row_cycles=3, accepted=[3, 2, 0], offered=[3, 3, 3]).tau
        2.6666666666666665
    """

    tokens: int = 0
    target_passes: int = 0
    rows: int = 1
    row_cycles: int = 0
    drafted_cycles: int = 0
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    drafting_s: float = 0.0
    verifying_s: float = 0.0
    warned: bool = field(default=False, repr=False)

    @property
    def cycles(self) -> int:
        return max(self.target_passes - 1, 0)

    @property
    def tau(self) -> float:
        """Mean tokens a cycle commits to a sequence, the bonus token included (paper, section 2); nan before any."""
        return (self.tokens - self.rows) / self.row_cycles if self.row_cycles else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the cycles offering slot k that accepted it (and so all slots before it)."""
        return [a / o for a, o in zip(self.accepted, self.offered, strict=True)]

    def note(self, offered: list[int], accepted: list[int]) -> None:
        """Count one verified cycle: drafts offered to and accepted from each row."""
        self.row_cycles += len(offered)
        while len(self.offered) < max(offered):
            self.offered.append(0)
            self.accepted.append(0)
        for num_offered, num_accepted in zip(offered, accepted, strict=True):
            for slot in range(num_offered):
                self.offered[slot] += 1
                self.accepted[slot] += slot < num_accepted
        if self.warned or self.cycles < _ENOUGH_CYCLES or self.offered[:1] < [_ENOUGH_DRAFTS]:
            return
        with_drafts = 1 + sum(self.accepted) / self.offered[0]
        if with_drafts < _LEAST_WORTH:
            self.warned = True
            logger.warning(
                f"After {self.cycles} cycles, a draft is worth {with_drafts:.2f} tokens a cycle: the drafter does not "
                "help here. Likely causes: a drafter of another target (or of the target before a "
                "fine-tune), another mask token or other feature layers than in training, or a chat template, "
                "thinking mode or language that it was not trained on."
            )

    def __str__(self) -> str:
        by_position = " ".join(f"{share:.2f}" for share in self.acceptance_by_position)
        return (
            f"{self.tokens} tokens in {self.target_passes} target passes, tau {self.tau:.2f}, accepted by position "
            f"[{by_position}], prefill {self.prefill_s:.2f} s, drafting {self.drafting_s:.2f} s, "
            f"verifying {self.verifying_s:.2f} s"
        )


# A warning says that a drafter does not help after so many cycles and first drafts, at fewer tokens a cycle than this.
_ENOUGH_CYCLES, _ENOUGH_DRAFTS, _LEAST_WORTH = 32, 8, 1.05

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


def record(drafter, run: DFlashRun) -> None:
    if not hasattr(_of_thread, "runs"):
        _of_thread.runs = weakref.WeakKeyDictionary()
    _of_thread.runs[drafter] = run
    _newest[drafter] = run, threading.current_thread()


def knobs(drafter) -> tuple[int, float, str, bool]:
    """What `drafter.generation_config` asks for: most drafts a cycle, least confidence, way of sampling, adaptive."""
    config = drafter.generation_config
    wanted, threshold = config.num_assistant_tokens, config.assistant_confidence_threshold
    schedule, sampling = config.num_assistant_tokens_schedule, getattr(config, "assistant_sampling", None)
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
    if schedule not in (None, "constant", "adaptive"):
        raise ValueError(
            'drafter.generation_config.num_assistant_tokens_schedule must be "constant", "adaptive" or None (adaptive '
            f"where the clock may decide), got {schedule!r}."
        )
    if sampling not in (None, "rejection", "coupled"):
        raise ValueError(
            'drafter.generation_config.assistant_sampling must be "rejection", "coupled" or None (coupled), got '
            f"{sampling!r}."
        )
    full = drafter.config.num_drafts
    most = full if wanted is None else min(wanted, full)
    return most, threshold or 0.0, sampling or "coupled", schedule != "constant"


def warp(processors, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memoryless processors applied to all rows of `[n, V]` at once, as transformers' own up to rounding.

    What follows a top-k works on the k survivors of each row: to sort or to draw from a whole vocabulary takes longer
    than the LM head on a CPU.

    Returns:
        values `[n, V]` and None; or the survivors' values `[n, k]` and their token ids `[n, k]` long.
    """
    no_ids = torch.zeros(logits.shape[0], 1, dtype=torch.long, device=logits.device)  # read by none of them
    for i, processor in enumerate(processors):
        if type(processor) is lp.TopKLogitsWarper and all(type(later) in _VALUES_ONLY for later in processors[i:]):
            values, ids = logits.topk(min(processor.top_k, logits.shape[-1]))
            # transformers keeps every token that equals the k-th.
            if not bool(((logits >= values[:, -1:]).sum(-1) > ids.shape[1]).any()):
                for later in processors[i + 1 :]:
                    values = later(no_ids, values)
                return values, ids
        logits = processor(no_ids, logits)
    return logits, None


def processors_of_row(processors, row: int) -> LogitsProcessorList:
    """The processors for one row of the batch by itself: what they hold for each row is that row's."""
    own = LogitsProcessorList()
    for processor in processors:
        if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        own.append(processor)
    return own


def spread(values: torch.Tensor, ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits `[..., V]` of what `warp` gives, -inf for all other tokens."""
    if ids is None:
        return values
    return values.new_full((*values.shape[:-1], vocab_size), float("-inf")).scatter_(-1, ids, values)


def pick(values: torch.Tensor, ids: torch.Tensor | None, do_sample: bool, noise=None) -> torch.Tensor:
    """One token for every row of `[B, g, n]`: the likeliest, the likeliest with `noise`, or one drawn."""
    if noise is not None:
        index = (values + noise.at(ids, values.shape[1])).argmax(-1)
    elif do_sample:
        index = torch.multinomial(values.flatten(0, -2).softmax(-1), num_samples=1).view(values.shape[:-1])
    else:
        index = values.argmax(-1)
    return index if ids is None else ids.gather(-1, index[..., None])[..., 0]


class GumbelNoise:
    """Noise that depends on (seed, row, position, token) and on nothing else, so that drafter and target share it.

    The uniform numbers behind it are a hash of that counter, splitmix64's finaliser.

    Args:
        seed: of the call.
        rows: each row's place in the call's batch.
        indices: each row's number of new tokens so far; the noise is for this position and those behind it.
        width: how many positions.
        vocab_size: tokens.

    Example:
        >>> noise = GumbelNoise(0, rows=[0], indices=[5], width=2, vocab_size=10, device="cpu")
        >>> noise.at(None).shape
        torch.Size([1, 2, 10])
    """

    def __init__(self, seed: int, rows: list[int], indices: list[int], width: int, vocab_size: int, device):
        counters = [
            [seed + (row << 40) + index + i for i in range(width)] for row, index in zip(rows, indices, strict=True)
        ]
        self.vocab_size = vocab_size
        self._keys = from_host([[_signed(_mix(counter)) for counter in row] for row in counters], device)

    def at(self, ids: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
        """Float32 noise for the first `width` positions: of all tokens `[B, width, V]`, or of ids `[B, width, n]`."""
        keys = self._keys[:, :width, None]
        tokens = torch.arange(self.vocab_size, device=keys.device) if ids is None else ids
        x = keys + tokens * _signed(0x9E3779B97F4A7C15)
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
        # Small ones, which make the noise large, keep all 53 bits, so that rare tokens are as rare as they should be.
        uniform = ((x >> 11 & (1 << 53) - 1).float() + 0.5) / (1 << 53)
        return -(-torch.log1p(-uniform.clamp_max(1 - 2**-24))).log()

    def of_row(self, row: int, first: int = 0) -> "GumbelNoise":
        """The noise of one row only, from its `first` position on."""
        one = copy.copy(self)
        one._keys = self._keys[row : row + 1, first:]
        return one


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """splitmix64's finaliser, on Python's integers."""
    bits = (1 << 64) - 1
    value &= bits
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & bits
    value = (value ^ value >> 27) * 0x94D049BB133111EB & bits
    return value ^ value >> 31


class Drafting:
    """The drafter's side of one `generate()` call: context features in, blocks of drafts out, for any number of rows.

    Each row's context features lie at its own positions, which count real tokens. Features of the positions that a
    target pass committed wait in `pending` until the next drafter pass takes them in.

    Args:
        drafter: a `DFlashDraftModel`.
        target: the model that generates.
        generation_config: of this call; `do_sample` and what is returned are read.
        logits_processor: the call's processors.
        shown: `[B, n]` bool, which of the columns that the target's cache held before this call are real tokens;
            None for none.
    """

    def __init__(self, drafter, target, generation_config, logits_processor, num_rows: int, shown=None):
        self.drafter = with_cpu_kernels(drafter)
        self.target_embeddings = target.get_input_embeddings()
        self.target_head = target.get_output_embeddings()  # or what computes the same
        self.vocab_size = drafter.config.vocab_size
        self.feature_indices = [i + 1 for i in drafter.config.target_layer_ids]
        self.do_sample = generation_config.do_sample
        self.processors = [p for p in logits_processor or () if type(p) in MEMORYLESS + READS_HISTORY]
        self.rows = list(range(num_rows))  # of the call, those that are still here
        self.slot_by_slot = any(type(p) in READS_HISTORY for p in self.processors)
        self.context_cache = DFlashContextCache(drafter.config.num_hidden_layers)
        # Positions of the next context feature, and how many features the cache and `pending` hold, for each row.
        self.positions = [0] * num_rows if shown is None else shown.sum(-1).tolist()
        self.held = [0] * num_rows
        # [B, S, F * D_t] each, and which of them count: [B, S] bool on the host, or None for all.
        self.pending: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def add_context(self, hidden_states, counts: list[int] | None = None, shown: torch.Tensor | None = None) -> None:
        """Keep features of positions that the target has committed; the next drafter pass takes them in.

        Args:
            hidden_states: of a target pass, indexed as transformers does; only the drafter's own are read.
            counts: how many of a pass's positions each row has committed; None for a prefill, all of it.
            shown: `[B, S]` bool, the real tokens of a prefill; None for all.
        """
        features = [hidden_states[i] for i in self.feature_indices]
        device, width = self.drafter.device, sum(feature.shape[-1] for feature in features)
        if width != self.drafter.fc.in_features:
            raise ValueError(
                f"The drafter reads {self.drafter.fc.in_features} context features a position, the target's layers "
                f"{self.drafter.config.target_layer_ids} give {width}; use the drafter of this target."
            )
        valid, length = shown, features[0].shape[1]
        if counts is not None:
            length = max(counts)
            if min(counts) < length:
                valid = torch.arange(length) < torch.tensor(counts)[:, None]
        new = torch.cat([feature[:, :length].to(device) for feature in features], dim=-1)
        valid = None if valid is None else valid.cpu()
        if valid is not None and len(self.held) == 1:
            new, valid = new[:, from_host(valid[0].nonzero()[:, 0], device)], None
        self.pending.append((new, valid))

    def _take_pending(self):
        """All pending features `[B, S, F * D_t]`, and which of them count `[B, S]` on the host (None: all)."""
        context = torch.cat([features for features, _ in self.pending], dim=1)
        if all(valid is None for _, valid in self.pending):
            valid = None
        else:
            valid = torch.cat(
                [torch.ones(f.shape[:2], dtype=torch.bool) if v is None else v for f, v in self.pending], dim=1
            )
        self.pending = []
        return context, valid

    def draft(self, anchors: torch.Tensor, limit: int, histories=None, noise=None):
        """One drafter pass: `[anchor, mask, ..., mask]` for every row, given its context.

        Args:
            anchors: `[B]` long, each row's last token.
            limit: drafts wanted.
            histories: the ids `[1, n]` of each row, for processors that read them.
            noise: `GumbelNoise` of the drafts' positions; None draws or takes the likeliest.

        Returns:
            drafts `[B, g]`, g <= limit; the processed logits they came from, as `warp` gives them: `[B, g, n]` and
            their token ids, or None where n is the whole vocabulary.
        """
        drafter, config = self.drafter, self.drafter.config
        block = anchors.new_full((len(anchors), config.block_size), config.mask_token_id)
        block[:, 0] = anchors
        context, valid = self._take_pending()
        positions = self._place(context.shape[1], valid, context.device)
        hidden = drafter(
            noise_embeds=drafter.embed_block(block, self.target_embeddings),
            context_hidden_states=context,
            position_ids=positions,
            cache=self.context_cache,
        ).last_hidden_state
        first = config.block_size - config.num_drafts  # the slot of the first draft: 1, or 0 with sample_from_anchor
        logits = drafter.compute_logits(hidden[:, first : first + limit], self.target_head, self.vocab_size)
        logits = logits.to(anchors.device)
        if self.do_sample or self.processors:
            logits = logits.float()
        if self.do_sample and noise is None:  # nothing can be drawn from NaN, which float16 may overflow to
            logits = logits.nan_to_num(0.0, neginf=float("-inf"))
        if self.slot_by_slot:
            picked = [
                self._pick_slot_by_slot(
                    ids,
                    logits[i : i + 1],
                    processors_of_row(self.processors, self.rows[i]),
                    noise and noise.of_row(i),
                )
                for i, ids in enumerate(histories)
            ]
            limit = min(drafts.shape[1] for drafts, _ in picked)
            drafts, values = (torch.cat([of_row[which][:, :limit] for of_row in picked]) for which in (0, 1))
            return drafts, values, None
        values, ids = warp(self.processors, logits.flatten(0, 1))
        values = values.unflatten(0, logits.shape[:2])
        limit = self._num_possible(values)
        values, ids = values[:, :limit], None if ids is None else ids.unflatten(0, logits.shape[:2])[:, :limit]
        return pick(values, ids, self.do_sample, noise), values, ids

    def _place(self, num_context: int, valid: torch.Tensor | None, device) -> torch.Tensor:
        """Where the new context and the block go: tells the cache, returns their positions `[B, S + L]`."""
        block_size = self.drafter.config.block_size
        same = min(self.held) == max(self.held) and self.context_cache.length == self.held[0]
        if valid is None and same:
            self.context_cache.set_previous_accepted_tokens(num_context)
            start = from_host(self.positions, device)[:, None]
            positions = start + torch.arange(num_context + block_size, device=device)
            self._advance([num_context] * len(self.held))
            return positions
        # All of this on the host, which knows every number, and one copy: a GPU is not waited for.
        if valid is None:
            valid = torch.ones(len(self.held), num_context, dtype=torch.bool)
        counts = valid.sum(-1)
        order = valid.cumsum(-1) - 1  # of each valid feature within its row
        relative = torch.cat([order.clamp_min(0), counts[:, None] + torch.arange(block_size)], dim=1)
        num_filled = torch.tensor(self.held) + counts + block_size
        slots = relative + torch.tensor(self.held)[:, None]
        slots[:, :num_context][~valid] = num_filled.max()
        positions = relative + torch.tensor(self.positions)[:, None]
        self._advance(counts.tolist())
        slots, positions = from_host(torch.stack([slots, positions]), device)
        self.context_cache.place(slots, num_filled.tolist(), max(self.held))
        return positions

    def _advance(self, counts: list[int]) -> None:
        self.held = [held + count for held, count in zip(self.held, counts, strict=True)]
        self.positions = [position + count for position, count in zip(self.positions, counts, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        """Go on with these rows of the batch only."""
        index = from_host(rows, self.drafter.device)
        self.rows = [self.rows[row] for row in rows]
        self.held = [self.held[row] for row in rows]
        self.positions = [self.positions[row] for row in rows]
        self.context_cache.keep_rows(index)
        self.pending = [(features[index], None if valid is None else valid[rows]) for features, valid in self.pending]

    def _pick_slot_by_slot(self, input_ids, logits, processors, noise):
        """As above where a processor reads the ids so far: each slot is processed given the drafts before it."""
        ids, rows = input_ids, []
        for slot in range(logits.shape[1]):
            row = processors(ids, logits[:, slot])
            if not self._num_possible(row[None]):
                break
            rows.append(row)
            token = pick(row[None], None, self.do_sample, noise and noise.of_row(0, slot))
            ids = torch.cat([ids, token], dim=1)
        return ids[:, input_ids.shape[1] :], torch.stack(rows, dim=1) if rows else logits[:, :0]

    def _num_possible(self, logits) -> int:
        """Leading slots of `[B, g, n]` with a possible token: processors can forbid all of a reduced vocabulary."""
        if self.drafter.d2t is None:
            return logits.shape[1]
        return int((logits > float("-inf")).any(-1).all(0).long().cumprod(0).sum())


def confident(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """How many leading slots of `[B, g, n]` have a top probability of at least `threshold`: `[B]` long."""
    return (top_probability(logits) >= threshold).long().cumprod(-1).sum(-1)


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token's probability in each slot, `[B, g]` float32; 0 where it is NaN."""
    logits = logits.float()  # probabilities near 1 are few in bfloat16
    return logits.softmax(-1).amax(-1).nan_to_num(0.0)


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
        cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
        num_seen = 0 if cache is None else int(cache.get_seq_length())
        self.mask = None if mask is None else mask.bool()
        shown = torch.ones(1, num_seen) if mask is None else mask[:, :num_seen]
        self.num_seen = num_seen
        self.drafting = Drafting(drafter, target, generation_config, logits_processor, 1, shown.long())
        # A user who asked for the hidden states gets them all; the drafter picks its own from them.
        everything = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        self.model_kwargs_overrides = {"output_hidden_states": True if everything else self.drafting.feature_indices}
        self.max_length, self.do_sample = generation_config.max_length, generation_config.do_sample
        self.num_drafts, self.threshold, *_ = knobs(drafter)
        self.run = DFlashRun()
        record(drafter, self.run)
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `input_ids` `[1, n]` with g drafts appended, and the logits `[1, g, V]` they were drawn from.

        The logits are float32 and None when nothing was sampled (greedy) or nothing is offered (g = 0).
        """
        started = self._clock = time.perf_counter()
        ids, logits = input_ids, None
        self._num_offered = 0
        limit = min(self.num_drafts, self.max_length - input_ids.shape[1] - 1)
        if not is_first_iteration:
            hidden_states = model_outputs.hidden_states
            if self.run.target_passes == 1:
                shown = None if self.mask is None else self.mask[:, self.num_seen :]
                self.drafting.add_context(hidden_states, shown=shown)
            else:
                self.drafting.add_context(hidden_states, [int(n_last_matches) + 1])
            if limit > 0:
                drafts, values, kept = self.drafting.draft(input_ids[:, -1], limit, [input_ids])
                if self.threshold > 0.0:
                    drafts = drafts[:, : int(confident(values, self.threshold))]
                ids = torch.cat([input_ids, drafts], dim=1)
                if self.do_sample and drafts.shape[1]:
                    logits = spread(values, kept, self.drafting.vocab_size)[:, : drafts.shape[1]]
            self._num_offered = ids.shape[1] - input_ids.shape[1]
        self._clock = time.perf_counter()
        self.run.drafting_s += self._clock - started
        return ids, logits

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """Called by the loop after every target pass, the last one too: keep the figures."""
        run, elapsed = self.run, time.perf_counter() - self._clock
        run.target_passes += 1
        run.tokens += int(num_matches) + 1
        if run.target_passes == 1:
            run.prefill_s += elapsed
            return
        run.verifying_s += elapsed
        run.drafted_cycles += 1
        run.note([self._num_offered], [int(num_matches)])


__all__ = ["DFlashCandidateGenerator", "DFlashRun"]

"""Answers on the terminal: what `dflash-hf generate` and `chat` add to `generate()`."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.style import Style
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from .drafter.candidates import DFlashRun

_SHADE = Style(color="black", bgcolor="green")  # two of the eight colours that every terminal has


@dataclass
class Answer:
    """One answer, as it came.

    Attributes:
        text: without special tokens.
        ids: the new token ids.
        accepted: for each of them, whether it is an accepted draft. The last token of a target pass is counted as the
            target's own, as in `run`. None is where the call was decoded without the drafter.
        seconds: wall clock of the `generate()` call, the prompt included.
        run: the drafter's figures; it has no target passes where the call was decoded without the drafter.
    """

    text: str
    ids: list[int]
    accepted: list[bool]
    seconds: float
    run: DFlashRun

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time of the call, the prompt's pass included."""
        return len(self.ids) / self.seconds

    @property
    def target_passes(self) -> int:
        """Of the target, the prompt's included; one a token where the call was decoded without the drafter."""
        return self.run.target_passes or len(self.ids)

    def __str__(self) -> str:
        run = self.run
        tau = "no cycle after the prompt" if math.isnan(run.tau) else f"tau {run.tau:.2f}"
        if not run.target_passes:
            tau = "decoded without the drafter"
        return (
            f"{len(self.ids)} tokens in {self.seconds:.2f} s ({self.tokens_per_second:.1f} tokens/s), {tau}; "
            f"{self.target_passes} target passes, {run.drafted_cycles} with drafts"
        )

    def to_json(self) -> str:
        """One line: the fields of this class, and those figures of the run that belong to one row."""
        run = self.run
        return json.dumps(
            {
                "text": self.text,
                "ids": self.ids,
                "accepted": self.accepted,
                "seconds": self.seconds,
                "tokens_per_second": self.tokens_per_second,
                "tau": None if math.isnan(run.tau) else run.tau,
                "target_passes": self.target_passes,
                "drafted_cycles": run.drafted_cycles,
                "acceptance_by_position": run.acceptance_by_position,
                "prefill_s": run.prefill_s,
                "drafting_s": run.drafting_s,
                "verifying_s": run.verifying_s,
            },
            ensure_ascii=False,
        )


class AcceptedStreamer(BaseStreamer):
    """Streams text and says of each piece whether an accepted draft ended it.

    `generate()` hands over the tokens of a target pass one by one and counts the pass in `drafter.last_run` after its
    last one. So a token is an accepted draft where another one of the same pass follows, and each is held back until
    the next one is there. Before the first pass is counted no token is one: the prompt's pass gives a single token,
    and no pass is ever counted where `generate()` decodes without the drafter.

    Args:
        tokenizer: the target's.
        drafter: the one given to `generate()`.
        write: called with every piece of text, and whether it is from an accepted draft. A token that ends within a
            character gives no piece, the one that completes it does.

    Example:
        >>> streamer = AcceptedStreamer(tokenizer, drafter, write=print)                           # doctest: +SKIP
        >>> target.generate(**inputs, assistant_model=drafter, streamer=streamer)                  # doctest: +SKIP
    """

    def __init__(self, tokenizer, drafter, write: Callable[[str, bool], None]):
        self.tokenizer, self.drafter, self.write = tokenizer, drafter, write
        self.ids: list[int] = []
        self.accepted: list[bool] = []
        self._prompt_is_next = True
        self._held: tuple[int, int] | None = None  # a token, and the passes counted when it came
        self._from = self._shown = 0  # ids decoded for context; ids whose text is out

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        passes = self.drafter.last_run.target_passes
        for token in value.flatten().tolist():
            if self._held is not None:
                self._take(self._held[0], accepted=0 < self._held[1] == passes)
            self._held = token, passes

    def end(self) -> None:
        if self._held is not None:
            self._take(self._held[0], accepted=False, last=True)
            self._held = None

    def _take(self, token: int, accepted: bool, last: bool = False) -> None:
        self.ids.append(token)
        self.accepted.append(accepted)
        # Some tokenizers drop a leading space, so a token is decoded behind the one before it.
        before = self.tokenizer.decode(self.ids[self._from : self._shown], skip_special_tokens=True)
        text = self.tokenizer.decode(self.ids[self._from :], skip_special_tokens=True)
        if text.endswith("\ufffd") and not last:
            return
        self._from, self._shown = self._shown, len(self.ids)
        if piece := text[len(before) :]:
            self.write(piece, accepted)


def shaded(console: Console) -> Callable[[str, bool], None]:
    """For `AcceptedStreamer`: writes text as it is, accepted drafts on a coloured ground where there are colours.

    Example:
        >>> shaded(Console(file=open("answer.txt", "w")))("no terminal, no colours", True)         # doctest: +SKIP
    """
    colours = console.color_system not in (None, "windows") and not console.no_color

    def write(piece: str, accepted: bool) -> None:
        if accepted and colours:  # line by line: some terminals colour the rest of a line that ends within a colour
            piece = "\n".join(_SHADE.render(line) for line in piece.split("\n"))
        console.file.write(piece)
        console.file.flush()

    return write


def encode(tokenizer, messages: list[dict[str, str]] | str) -> torch.Tensor:
    """Ids `[1, n]` of a conversation in the chat template, the answer's beginning included; or of bare text.

    Raises:
        ValueError: there is no chat template, it refuses the conversation, or nothing is left to go on from.
    """
    if isinstance(messages, str):
        ids = tokenizer(messages, return_tensors="pt")["input_ids"]
    else:
        _check_template(tokenizer)
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )["input_ids"]
        except Exception as error:  # whatever the template raises (jinja2 has its own classes)
            raise ValueError(f"The target's chat template refuses the conversation: {error}") from error
    if ids.shape[1] == 0:
        raise ValueError("The prompt is empty: expected some text.")
    return ids.long()


def _check_template(tokenizer) -> None:
    if tokenizer.chat_template is None:
        raise ValueError("The target's tokenizer has no chat template; use `dflash-hf generate --raw`.")


def answer(target, drafter, tokenizer, ids: torch.Tensor, write: Callable[[str, bool], None], **options) -> Answer:
    """Generate behind `ids` and write the text while it comes.

    Args:
        target, drafter: the pair, on one device.
        tokenizer: the target's.
        ids: `[1, n]` long.
        write: see `AcceptedStreamer`.
        options: of `generate()`; `max_new_tokens` among them.

    Raises:
        ValueError: prompt and answer are longer than the target's positions; or whatever `generate()` refuses.

    Example:
        >>> print(answer(target, drafter, tokenizer, ids, shaded(Console()), max_new_tokens=64))   # doctest: +SKIP
    """
    positions = _positions(target)
    if ids.shape[1] + options["max_new_tokens"] > positions:
        raise ValueError(
            f"The prompt's {ids.shape[1]} tokens and {options['max_new_tokens']} new ones are more than the target's "
            f"{positions} positions; shorten the prompt or ask for fewer (--max-new-tokens)."
        )
    ids = ids.to(target.device)
    streamer = AcceptedStreamer(tokenizer, drafter, write)
    start = time.perf_counter()
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, streamer=streamer, **options)
    seconds = time.perf_counter() - start
    text = tokenizer.decode(streamer.ids, skip_special_tokens=True)
    return Answer(text, streamer.ids, streamer.accepted, seconds, drafter.last_run)


def _positions(target) -> float:
    """How many tokens the target can read; infinite where it has no limit."""
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    return math.inf if positions is None else positions


class Conversation:
    """Several turns that share one cache, so that each costs its new tokens only.

    Args:
        target, drafter, tokenizer: as in `answer`.
        system: a system message, or None for the template's own.

    Raises:
        ValueError: there is no chat template.

    Example:
        >>> talk = Conversation(target, drafter, tokenizer)                                        # doctest: +SKIP
        >>> talk.say("Name a fruit.", shaded(Console()), max_new_tokens=64)                        # doctest: +SKIP
    """

    def __init__(self, target, drafter, tokenizer, system: str | None = None):
        _check_template(tokenizer)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._forget()

    def _forget(self) -> None:
        self._cache = DynamicCache(config=self.target.config)
        self._cached: list[int] = []

    def say(self, text: str, write: Callable[[str, bool], None], **options) -> Answer:
        """Answer one more user turn; nothing is remembered of a turn that fails or is broken off (Ctrl-C).

        An answer ends where the target's positions do, before `max_new_tokens`.

        Raises:
            ValueError: no room is left for an answer; or as `encode` and `answer`.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode(self.tokenizer, messages)
        positions = _positions(self.target)
        if ids.shape[1] >= positions:
            raise ValueError(
                f"With this turn the talk has {ids.shape[1]} tokens, and the target's {positions} positions leave no "
                "room for an answer: say it shorter, or begin a new talk."
            )
        options["max_new_tokens"] = min(options["max_new_tokens"], positions - ids.shape[1])
        # A template may write earlier turns anew (leave out their thinking), and text may come back as other tokens.
        if ids[0, : len(self._cached)].tolist() != self._cached:
            self._forget()
        try:
            done = answer(self.target, self.drafter, self.tokenizer, ids, write, cache=self._cache, **options)
        except BaseException:
            self._forget()
            raise
        self.messages = [*messages, {"role": "assistant", "content": done.text}]
        self._cached = [*ids[0].tolist(), *done.ids][: self._cache.get_seq_length()]
        return done

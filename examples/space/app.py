"""Plain and DFlash decoding side by side in the browser: accepted drafts shaded, tau and speed-up live.

TARGET=Qwen/Qwen3-4B DRAFTER=z-lab/Qwen3-4B-DFlash-b16 python examples/space/app.py
"""

import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from threading import Event, Thread
from types import SimpleNamespace

import gradio as gr

from dflash_hf.checkpoints import load_drafter
from dflash_hf.cli import load_target
from dflash_hf.drafter.candidates import DFlashRun
from dflash_hf.terminal import AcceptedStreamer, encode

PROMPTS = [
    "Why does the moon look different from night to night?",
    "A baker fills 6 trays with 12 rolls each and sells 45 of them. How many rolls are left?",
    "Write a Python function that tells whether a word is a palindrome.",
]
SCHEDULES = [("as many as pay here (adaptive)", "adaptive"), ("always full blocks (constant)", "constant")]
INTRO = """# DFlash speculative decoding
One model answers twice: plainly, a token a pass, and with a small drafter that proposes a block of tokens for the
model to check in one pass. The text is the same. Greedy, one after the other, so that neither slows the other down.
"""
THEME = gr.themes.Default(primary_hue="emerald", neutral_hue="slate")
CSS = """
.run { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 14px 16px; }
.run h3 { margin: 0 0 6px; font-size: 1rem; }
.run small, .run footer { opacity: .75; font-size: .85rem; font-weight: 400; }
.run .figures { display: flex; flex-wrap: wrap; gap: 4px 28px; min-height: 54px; }
.run .figures b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.run .text { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 220px; margin-top: 10px; line-height: 1.6; }
.run mark { background: #86efac; color: #14532d; border-radius: 3px; }
.run footer { min-height: 1.4em; }
"""


@dataclass
class Run:
    """What came so far of one way of decoding; `pieces` are `(text, whether an accepted draft)`."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    tau: float = 1.0
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def decode(target, tokenizer, ids, drafter=None, *, stopped: Event, **options) -> Iterator[Run]:
    """Greedy text behind `ids`, looked at every 50 ms while it is made, and at its end or once `stopped` is set.

    Raises:
        Exception: what `generate()` raised.
    """
    run, start = Run(), time.perf_counter()
    source = drafter or SimpleNamespace(last_run=DFlashRun())

    def write(piece: str, accepted: bool) -> None:
        if stopped.is_set():
            raise InterruptedError("Nobody looks any more.")  # ends generate()
        run.pieces.append((piece, accepted))
        # The clock is read here: how fast the page draws is no part of the figures.
        run.tokens, run.seconds = len(streamer.ids), time.perf_counter() - start
        run.passes = source.last_run.target_passes or run.tokens  # none is counted where no drafter took part
        run.tau = 1.0 if math.isnan(source.last_run.tau) else source.last_run.tau  # before the first cycle

    def work() -> None:
        try:
            target.generate(ids, do_sample=False, assistant_model=drafter, streamer=streamer, **options)
        except Exception as error:  # raised below, in the thread that shows it
            run.error = None if stopped.is_set() else error

    streamer = AcceptedStreamer(tokenizer, source, write)
    thread = Thread(target=work)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.05)
            yield run
    finally:
        if thread.is_alive():  # this generator was closed
            stopped.set()
            thread.join()
    if run.error is not None:
        raise run.error
    yield run


def panel(title: str, what: str, run: Run | None = None, plain: Run | None = None, note: str = "") -> str:
    """HTML of a column; with `plain`, the run that it is compared with."""
    figures = [] if run is None else [(f"{run.speed:.1f}", "tokens/s"), (f"{run.passes}", "target passes")]
    if run is not None and plain is not None:
        if plain.speed > 0:  # it is 0 where the answer ends at once
            figures.insert(1, (f"{run.speed / plain.speed:.2f}x", "speed-up"))
        figures.append((f"{run.tau:.2f}", "tau"))
    text = ""
    for accepted, group in itertools.groupby(run.pieces if run else (), key=lambda piece: piece[1]):
        words = escape("".join(piece for piece, _ in group))
        text += f"<mark>{words}</mark>" if accepted else words
    shown = "".join(f"<div><b>{value}</b><small>{name}</small></div>" for value, name in figures)
    return (
        f'<div class="run"><h3>{title} <small>{what}</small></h3><div class="figures">{shown}</div>'
        f'<div class="text">{text}</div><footer>{note}</footer></div>'
    )


PLAIN = "Plain", "every token is a pass of the model"
DFLASH = "DFlash", "a pass checks a block of drafts; those accepted are <mark>shaded</mark>"


def compare(
    target, drafter, tokenizer, prompt: str, max_new_tokens: int, schedule: str, stopped: Event
) -> Iterator[tuple[str, str]]:
    """HTML of both columns while the text comes: plain decoding, then with the drafter. Ends once `stopped` is set.

    Raises:
        ValueError: the prompt is empty; or as `generate()`.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty: expected some text.")
    ids = encode(tokenizer, [{"role": "user", "content": prompt}]).to(target.device)
    options = {"attention_mask": ids.new_ones(ids.shape), "max_new_tokens": int(max_new_tokens), "stopped": stopped}
    for plain in decode(target, tokenizer, ids, **options):
        yield panel(*PLAIN, plain), panel(*DFLASH, note="waits for the other column")
    if stopped.is_set():
        yield panel(*PLAIN, plain, note="stopped"), panel(*DFLASH)
        return
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    done = panel(*PLAIN, plain, note=f"{plain.tokens} tokens in {plain.seconds:.1f} s")
    for drafted in decode(target, tokenizer, ids, drafter, **options):
        yield done, panel(*DFLASH, drafted, plain)
    if stopped.is_set():
        yield done, panel(*DFLASH, drafted, plain, "stopped")
        return
    same = "the same text" if drafted.text == plain.text else "other text: a near-tie of two tokens, or a fault"
    yield done, panel(*DFLASH, drafted, plain, f"{drafted.tokens} tokens in {drafted.seconds:.1f} s; {same}")


def page(target, drafter, tokenizer) -> gr.Blocks:
    stops: dict[str, Event] = {}  # one a visitor

    def run(prompt: str, max_new_tokens: int, schedule: str, visitor: gr.Request):
        stopped = stops[visitor.session_hash] = Event()
        try:
            yield from compare(target, drafter, tokenizer, prompt, max_new_tokens, schedule, stopped)
        except ValueError as error:
            raise gr.Error(str(error)) from error

    def halt(visitor: gr.Request) -> None:  # the next visitor has the machine for himself
        stops.pop(visitor.session_hash, Event()).set()

    with gr.Blocks(title="DFlash speculative decoding") as blocks:
        gr.Markdown(INTRO)
        prompt = gr.Textbox(PROMPTS[0], label="Prompt", lines=2)
        gr.Examples(PROMPTS, prompt, label="Prompts to try")
        with gr.Row():
            length = gr.Slider(16, 512, 128, step=16, label="New tokens at most")
            schedule = gr.Radio(SCHEDULES, value="adaptive", label="Drafts a pass")
        with gr.Row():
            button = gr.Button("Generate", variant="primary", scale=4)
            stop = gr.Button("Stop", scale=1)
        with gr.Row():
            columns = [gr.HTML(panel(*PLAIN), padding=False), gr.HTML(panel(*DFLASH), padding=False)]
        # One at a time: two would share the machine, and the figures would be neither's.
        settings = {"concurrency_limit": 1, "show_progress": "hidden", "api_name": "compare"}
        gr.on([button.click, prompt.submit], run, [prompt, length, schedule], columns, **settings)
        stop.click(halt, queue=False)
        blocks.unload(halt)  # the page was left
    return blocks


def main() -> None:
    target, tokenizer = load_target(os.environ.get("TARGET", "Qwen/Qwen3-4B"))
    name = os.environ.get("DRAFTER", "z-lab/Qwen3-4B-DFlash-b16")
    drafter = load_drafter(name, dtype=target.dtype).to(target.device)
    # The first calls of a process are slower than any later one, which would count against plain decoding.
    for _ in compare(target, drafter, tokenizer, PROMPTS[0], 16, "constant", Event()):
        pass
    page(target, drafter, tokenizer).launch(css=CSS, theme=THEME)


if __name__ == "__main__":
    main()

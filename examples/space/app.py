"""Plain and DFlash decoding side by side in the browser: the same text, accepted drafts shaded, tau and speed-up live.

TARGET=Qwen/Qwen3-4B DRAFTER=z-lab/Qwen3-4B-DFlash-b16 python examples/space/app.py
"""

import math
import os
import time
from collections.abc import Iterator
from queue import Queue
from threading import Thread
from types import SimpleNamespace

import gradio as gr

from dflash_hf.checkpoints import load_drafter
from dflash_hf.cli import load_target
from dflash_hf.terminal import AcceptedStreamer, encode

ACCEPTED = "accepted draft"


def stream(target, tokenizer, ids, drafter=None, **options) -> Iterator[tuple[str, bool, int, float]]:
    """Pieces of text while they come: `(piece, accepted, tokens so far, tau so far)`. Greedy."""
    found: Queue = Queue()
    # Without a drafter every token is a pass of its own.
    run = SimpleNamespace(target_passes=0, tau=1.0)

    def write(piece: str, accepted: bool) -> None:
        figures = run if drafter is None else drafter.last_run
        tau = 1.0 if math.isnan(figures.tau) else figures.tau  # before the first cycle
        found.put((piece, accepted, len(streamer.ids), tau))

    def work() -> None:
        try:
            target.generate(ids, do_sample=False, assistant_model=drafter, streamer=streamer, **options)
            found.put(None)
        except Exception as error:  # shown by the page, which runs in another thread
            found.put(error)

    streamer = AcceptedStreamer(tokenizer, drafter or SimpleNamespace(last_run=run), write)
    if drafter is None:
        put = streamer.put

        def put_and_count(value) -> None:
            put(value)
            run.target_passes += 1

        streamer.put = put_and_count
    Thread(target=work).start()
    while (item := found.get()) is not None:
        if isinstance(item, Exception):
            raise gr.Error(str(item))
        yield item


def compare(target, drafter, tokenizer, prompt: str, max_new_tokens: int):
    """Plain decoding, then with the drafter: at the same time they would slow each other down.

    Yields:
        plain text, its figures, DFlash text as spans `(piece, label or None)`, its figures.
    """
    if not prompt.strip():
        raise gr.Error("The prompt is empty.")
    ids = encode(tokenizer, [{"role": "user", "content": prompt}]).to(target.device)
    options = {"attention_mask": ids.new_ones(ids.shape), "max_new_tokens": int(max_new_tokens)}
    plain, speed, spans = "", 0.0, []
    start = time.perf_counter()
    for piece, _, tokens, _ in stream(target, tokenizer, ids, **options):
        plain, speed = plain + piece, tokens / (time.perf_counter() - start)
        yield plain, f"{speed:.1f} tokens/s", [], ""
    start = time.perf_counter()
    for piece, accepted, tokens, tau in stream(target, tokenizer, ids, drafter, **options):
        spans.append((piece, ACCEPTED if accepted else None))
        drafted = tokens / (time.perf_counter() - start)
        figures = f"{drafted:.1f} tokens/s, **{drafted / speed:.2f}x**, tau {tau:.2f}"
        yield plain, f"{speed:.1f} tokens/s", spans, figures
    same = "the same text" if plain == "".join(piece for piece, _ in spans) else "another text"
    yield plain, f"{speed:.1f} tokens/s", spans, f"{figures}; {same}"


def page(target, drafter, tokenizer) -> gr.Blocks:
    def run(prompt: str, max_new_tokens: int):
        yield from compare(target, drafter, tokenizer, prompt, max_new_tokens)

    with gr.Blocks(title="DFlash") as blocks:
        gr.Markdown("# DFlash speculative decoding\nBoth columns are greedy text of the same target.")
        prompt = gr.Textbox("Why does the moon look different from night to night?", label="Prompt", lines=2)
        length = gr.Slider(16, 512, 128, step=16, label="New tokens at most")
        button = gr.Button("Generate", variant="primary")
        with gr.Row():
            with gr.Column():
                plain_text = gr.Textbox(label="Plain", lines=12)
                plain_figures = gr.Markdown()
            with gr.Column():
                drafted_text = gr.HighlightedText(
                    label="DFlash", combine_adjacent=True, show_legend=True, color_map={ACCEPTED: "green"}
                )
                drafted_figures = gr.Markdown()
        # One at a time: two would share the machine, and the figures would be neither's.
        outputs = [plain_text, plain_figures, drafted_text, drafted_figures]
        button.click(run, [prompt, length], outputs, concurrency_limit=1, api_name="compare")
    return blocks


if __name__ == "__main__":
    assistant = load_drafter(os.environ.get("DRAFTER", "z-lab/Qwen3-4B-DFlash-b16"))
    model, text_tokenizer = load_target(os.environ.get("TARGET", "Qwen/Qwen3-4B"))
    page(model, assistant.to(device=model.device, dtype=model.dtype), text_tokenizer).launch()

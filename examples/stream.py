"""Stream text while it is made, as a server does: generate() runs in a thread, the pieces come in a loop.

    python examples/stream.py

Where printing is enough, `streamer=transformers.TextStreamer(tokenizer, skip_prompt=True)` needs no thread.
"""

from threading import Thread

from transformers import TextIteratorStreamer

from dflash_hf import DFlashDraftModel
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"


def main(target, tokenizer, drafter) -> str:
    messages = [{"role": "user", "content": "List the steps to boil an egg."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(target.device)
    # The timeout ends the loop below if generate() fails in its thread.
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
    options = {"assistant_model": drafter, "streamer": streamer, "do_sample": False, "max_new_tokens": 96}
    thread = Thread(target=target.generate, kwargs={**inputs, **options})
    thread.start()
    text = ""
    for piece in streamer:
        print(piece, end="", flush=True)
        text += piece
    thread.join()
    print(f"\n{drafter.last_run}")
    return text


if __name__ == "__main__":
    main(*load_smollm2(), DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32"))

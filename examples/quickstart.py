"""SmolLM2-135M-Instruct with and without its DFlash drafter: the same text, and what it does to the speed.

Run it with `make demo`, or after that with `.venv/bin/python examples/quickstart.py`.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModel, TextStreamer

from smollm2 import load_smollm2

DRAFTER = Path(__file__).resolve().parents[1] / "model_cards" / "SmolLM2-135M-Instruct-DFlash"
PROMPTS = {
    "math": "A baker fills 6 trays with 12 rolls each. She sells 45 rolls before noon and gives 7 away. "
    "How many rolls are left?",
    "cooking": "How do I keep rice from sticking to the pot?",
    "explaining": "Why does the moon look different from night to night?",
}
ROW = "{:<12}{:>9}{:>14}{:>14}{:>8}{:>15}{:>15}{:>7}"
HEADER = "", "same ids", "plain tok/s", "drafted tok/s", "ratio", "plain passes", "drafted passes", "tau"


def timed_generate(target, inputs, max_new_tokens: int = 96, **kwargs) -> tuple[list[int], float]:
    """The new ids of a greedy call, and the seconds it took."""
    start = time.perf_counter()
    ids = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **kwargs)
    seconds = time.perf_counter() - start
    return ids[0, inputs["input_ids"].shape[1] :].tolist(), seconds


def verdict(results: list[tuple]) -> str:
    """Whether the drafter paid, from all prompts together."""
    plain_s, drafted_s = sum(r[1] for r in results), sum(r[3] for r in results)
    runs = [r[4] for r in results]
    cycles, drafted = sum(run.cycles for run in runs), sum(run.drafted_cycles for run in runs)
    drafting_s, verifying_s = sum(run.drafting_s for run in runs), sum(run.verifying_s for run in runs)
    return (
        f"The drafter {'paid' if drafted_s < plain_s else 'did not pay'} on this machine: "
        f"{plain_s:.1f} s without it, {drafted_s:.1f} s with it, {plain_s / drafted_s:.2f}x.\n"
        f"{cycles} target passes took {1e3 * verifying_s / cycles:.0f} ms each; {drafted} of them checked drafts, "
        f"which took {1e3 * drafting_s / max(drafted, 1):.0f} ms to make."
    )


def main() -> None:
    print("Loading SmolLM2-135M-Instruct and its drafter ...", flush=True)
    target, tokenizer = load_smollm2()
    drafter = AutoModel.from_pretrained(DRAFTER, trust_remote_code=True, dtype=torch.float32)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    results = []  # plain ids, plain seconds, drafted ids, drafted seconds, drafter's run
    for question in PROMPTS.values():
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        if not results:  # the first calls are slower than any later one
            timed_generate(target, inputs, max_new_tokens=8)
            timed_generate(target, inputs, max_new_tokens=8, assistant_model=drafter)
        plain = timed_generate(target, inputs)
        print(f"\n> {question}")
        drafted = timed_generate(target, inputs, assistant_model=drafter, streamer=streamer)
        results.append((*plain, *drafted, drafter.last_run))

    print("\n" + ROW.format(*HEADER))
    for name, (plain_ids, plain_s, drafted_ids, drafted_s, run) in zip(PROMPTS, results, strict=True):
        plain_speed, drafted_speed = len(plain_ids) / plain_s, len(drafted_ids) / drafted_s
        print(
            ROW.format(
                name,
                "yes" if drafted_ids == plain_ids else "NO",
                f"{plain_speed:.1f}",
                f"{drafted_speed:.1f}",
                f"{drafted_speed / plain_speed:.2f}x",
                len(plain_ids),  # plain decoding takes one pass a token
                run.target_passes,
                f"{run.tau:.2f}",
            )
        )
    print("\n" + verdict(results))
    if any(drafted_ids != plain_ids for plain_ids, _, drafted_ids, _, _ in results):
        sys.exit("The drafter changed the ids, which it must not in float32: please report the table above.")


if __name__ == "__main__":
    main()

"""Several turns with one cache: a turn costs its new tokens, for the target and for the drafter.

    python examples/chat.py
"""

import torch
from transformers import DynamicCache

from dflash_hf import DFlashDraftModel
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"
TURNS = ["Name three fruits.", "Which of them is yellow?", "Write a sentence about it."]


def main(target, tokenizer, drafter, turns=TURNS) -> list[str]:
    messages, answers = [], []
    cache, cached = DynamicCache(config=target.config), torch.empty(1, 0, dtype=torch.long)
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(target.device)
        if not torch.equal(inputs["input_ids"][:, : cached.shape[1]], cached):
            cache = DynamicCache(config=target.config)  # the template wrote an earlier turn anew
        ids = target.generate(
            **inputs,  # of all turns: what is in the cache already is skipped
            cache=cache,
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=64,
        )
        cached = ids[:, : cache.get_seq_length()]
        answers.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
        print(f"> {turn}\n{answers[-1]}\n({drafter.last_run})\n")
    return answers


if __name__ == "__main__":
    main(*load_smollm2(), DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32"))

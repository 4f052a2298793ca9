"""Generate with a drafter: one more argument of `generate()`, the same text.

    python examples/generate.py
"""

from dflash_hf import DFlashDraftModel
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"


def main(target, tokenizer, drafter) -> str:
    messages = [{"role": "user", "content": "A box holds 24 pencils, a third of them red. How many are red?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(target.device)
    ids = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=96)
    text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(text)
    print(drafter.last_run)
    return text


if __name__ == "__main__":
    main(*load_smollm2(), DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32"))

"""Sampling: the target's own distribution, by rejection sampling or with noise that drafter and target share.

    python examples/sample.py
"""

from transformers import set_seed

from dflash_hf import DFlashDraftModel
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"


def main(target, tokenizer, drafter) -> dict[str, str]:
    messages = [{"role": "user", "content": "Write one sentence about the sea."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(target.device)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 48}
    texts = {}
    # rejection: more drafts are accepted. coupled: the same text whatever the blocks and the batch are.
    for way in ("rejection", "coupled"):
        drafter.generation_config.assistant_sampling = way
        set_seed(0)
        ids = target.generate(**inputs, **options, assistant_model=drafter)
        texts[way] = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{way}: {texts[way]}\n({drafter.last_run})\n")
    drafter.generation_config.assistant_sampling = None
    return texts


if __name__ == "__main__":
    main(*load_smollm2(), DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32"))

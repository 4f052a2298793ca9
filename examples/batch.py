"""Several prompts at once, padded on the left. Rows accept different lengths and leave when they are finished.

    python examples/batch.py
"""

from dflash_hf import DFlashDraftModel
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"
QUESTIONS = ["What is 12 times 6?", "Why is the sea salty? Answer in one sentence.", "Name a fruit."]


def main(target, tokenizer, drafter, questions=QUESTIONS) -> list[str]:
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(target.device)
    ids = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=48)
    answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for question, answer in zip(questions, answers, strict=True):
        print(f"> {question}\n{answer}\n")
    print(drafter.last_run)
    return answers


if __name__ == "__main__":
    main(*load_smollm2(), DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32"))

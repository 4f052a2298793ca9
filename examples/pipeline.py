"""A transformers pipeline with a drafter. Pass the loaded drafter: a name would be loaded as a language model.

    python examples/pipeline.py
"""

from transformers import pipeline

from dflash_hf import DFlashDraftModel
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"


def main(target, tokenizer, drafter) -> str:
    chat = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = chat(messages, do_sample=False, max_new_tokens=32)[0]["generated_text"][-1]["content"]
    print(answer)
    print(drafter.last_run)
    return answer


if __name__ == "__main__":
    main(*load_smollm2(), DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32"))

"""Let SmolLM2-135M-Instruct write user turns and news articles, the raw material of some training prompts.

    python sample_texts.py OUT.jsonl [SEED USER_TURNS ARTICLES]      # 0 1216 320 unless told

User turns are sampled after the template's user header (the idea of Magpie, arXiv 2406.08464), articles are answers
to a request for one; temperature 1, top-p 0.95. One line a text: {"kind": "user" or "article", "text"}. About
15 minutes on one CPU core.
"""

import itertools
import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from smollm2 import load_smollm2

BATCH = 64
USER_HEADER = "<|im_start|>user\n"
PLACES = "a coastal town in Portugal;Melbourne;a village in Kenya;Chicago;rural Scotland;Mumbai;northern Canada;Berlin"
EVENTS = (
    "a new hospital wing;a museum theft;a football final;a flood;a strike of bus drivers;the trial of a banker;"
    "a rescued dog;an election for mayor;a food festival;a power cut;a lost hiker found alive;a school that won a "
    "prize;the opening of a bridge;a fire in a warehouse;an airline's new route;a celebrity wedding;a medical study;"
    "a factory that closes;a record-breaking athlete;a dispute over a wind farm;a teenager's invention;a train delay;"
    "the return of wolves;a stolen painting;a film premiere;a missing boat;rising rents;a police investigation;"
    "a drought;a charity run;a bank robbery;a discovery in a cave;a court ruling on privacy;a tennis star's injury;"
    "a visit by a president;a recall of cars;a space launch;a storm;a new law on schools;a chef's new restaurant"
)


def sample(model, tokenizer, ids: list[list[int]], max_new_tokens: int) -> list[str]:
    """Sample one continuation each."""
    width = max(map(len, ids))
    padded = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    out = model.generate(
        padded,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_p=0.95,
        top_k=0,
        max_new_tokens=max_new_tokens,
    )[:, width:]
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in out]


def main(path: str, seed: int = 0, num_user_turns: int = 1216, num_articles: int = 320) -> None:
    model, tokenizer = load_smollm2()
    torch.manual_seed(seed)
    system = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).split(USER_HEADER)[0]
    header = tokenizer(system + USER_HEADER, add_special_tokens=False)["input_ids"]
    topics = [f"{event} in {place}" for event, place in itertools.product(EVENTS.split(";"), PLACES.split(";"))]
    requests = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Write a short news article about {topic}, as it would stand in a paper."}],
            add_generation_prompt=True,
        )["input_ids"]
        for topic in random.Random(0).sample(topics, num_articles)
    ]
    jobs = [("user", [header] * BATCH, 96) for _ in range(num_user_turns // BATCH)]
    jobs += [("article", requests[i : i + BATCH], 240) for i in range(0, num_articles, BATCH)]
    random.Random(1).shuffle(jobs)
    with open(path, "w") as file:
        for kind, ids, max_new_tokens in jobs:
            for text in sample(model, tokenizer, ids, max_new_tokens):
                print(json.dumps({"kind": kind, "text": text}), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

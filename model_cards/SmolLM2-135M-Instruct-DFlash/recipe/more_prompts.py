"""A second set of training prompts, shorter and more of them the target's own user turns.

    python more_prompts.py SOURCES TEXTS.jsonl USER_TURNS.jsonl DEV FIRST.jsonl OUT.jsonl

SOURCES, TEXTS and DEV as for make_prompts.py, which wrote FIRST: its prompts are not repeated. USER_TURNS is another
run of sample_texts.py (seed 2, 448 user turns, no articles). Seeded, so it repeats.
"""

import json
import random
import sys
from pathlib import Path

import make_prompts as m

SIZES = {
    "summarization": 70, "rag": 70, "qa": 110, "translation": 110, "code": 70, "open": 150, "chat": 300,
    "extraction": 30,
}  # fmt: skip
MOST_WORDS = 210


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main(sources: str, texts: str, user_turns: str, dev: str, first: str, out: str) -> None:
    rng = random.Random(11)
    facts, paragraphs, heads = m.countries(Path(sources)), m.speeches(Path(sources)), m.functions()
    articles = [text["text"] for text in read(texts) if text["kind"] == "article"]
    rng.shuffle(articles)
    turns_of_target = m.user_turns([t for t in read(texts) if t["kind"] == "user"] + read(user_turns))
    streams = {
        "summarization": m.summarization(rng, facts, paragraphs, list(articles)),
        "rag": m.rag(rng, facts, paragraphs, articles),
        "qa": m.qa(rng, facts),
        "translation": m.translation(rng),
        "code": m.code(rng, heads),
        "open": m.open_ended(rng),
        "chat": ([turn] for turn in turns_of_target),
        "extraction": m.extraction(rng, facts, articles),
    }
    in_dev = m.overlaps(Path(dev))
    seen = {tuple(" ".join(m.words(turn)) for turn in record["turns"]) for record in read(first)}
    records = []
    for category, stream in streams.items():
        count = 0
        for turns in stream:
            if count == SIZES[category]:
                break
            key = tuple(" ".join(m.words(turn)) for turn in turns)
            if key in seen or sum(len(turn.split()) for turn in turns) > MOST_WORDS or in_dev(turns):
                continue
            seen.add(key)
            records.append({"id": f"second-{category}-{count}", "category": category, "turns": turns[:1]})
            count += 1
    rng.shuffle(records)
    with open(out, "w") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A third and a fourth set of training prompts: articles and passages as long as evaluation prompts have them.

    python long_prompts.py SOURCES TEXTS.jsonl USER_TURNS.jsonl DEV FIRST.jsonl,SECOND.jsonl OUT.jsonl [third]
    python long_prompts.py SOURCES TEXTS.jsonl USER_TURNS.jsonl DEV KNOWN.jsonl OUT.jsonl fourth

Arguments as for more_prompts.py; prompts of the sets named before OUT are not repeated. Seeded, so it repeats.
"""

import json
import random
import sys
from pathlib import Path

import make_prompts as m
from more_prompts import read

SEEDS = {"third": 23, "fourth": 47}
SIZES = {
    "third": {"summarization": 110, "rag": 110, "qa": 100, "translation": 120, "code": 20, "open": 80, "chat": 130},
    "fourth": {"summarization": 140, "rag": 120, "qa": 60, "translation": 60, "open": 60},
}  # fmt: skip


def long_text(rng, facts, paragraphs, articles) -> str:
    """250 to 450 words of one source: two articles of the target, fields of a country, or a speech."""
    limit, kind = rng.randint(250, 450), rng.random()
    if kind < 0.4:
        return m.cut(" ".join(rng.sample(articles, 2)), limit)
    if kind < 0.7:
        _, fields = rng.choice(facts)
        parts = [text for text in fields.values() if len(text.split()) > 25]
        return m.cut(" ".join(rng.sample(parts, len(parts))), limit)
    start = rng.randrange(len(paragraphs) - 6)
    return m.cut(" ".join(paragraphs[start : start + 6]), limit)


def summarization(rng, facts, paragraphs, articles):
    while True:
        text = long_text(rng, facts, paragraphs, articles)
        if len(text.split()) >= 220:
            yield ["Summarize: " + text]


def rag(rng, facts, paragraphs, articles):
    """Passages of two prompts of the first set's kind, with the question of the second at the end."""
    short = m.rag(rng, facts, paragraphs, articles)
    while True:
        first, second = (next(short)[0] for _ in range(2))
        passages, _, question = second.rpartition("\n")
        lines = (first.rpartition("\n")[0] + "\n" + passages).splitlines()
        rng.shuffle(lines)
        text = "\n".join(lines)
        if 200 <= len(text.split()) <= 450:
            yield [text + "\n" + question]


def main(sources: str, texts: str, user_turns: str, dev: str, known: str, out: str, name: str = "third") -> None:
    rng = random.Random(SEEDS[name])
    facts, paragraphs, heads = m.countries(Path(sources)), m.speeches(Path(sources)), m.functions()
    articles = [text["text"] for text in read(texts) if text["kind"] == "article"]
    turns_of_target = m.user_turns([t for t in read(texts) if t["kind"] == "user"] + read(user_turns))
    streams = {
        "summarization": summarization(rng, facts, paragraphs, articles),
        "rag": rag(rng, facts, paragraphs, articles),
        "qa": m.qa(rng, facts),
        "translation": m.translation(rng),
        "code": m.code(rng, heads),
        "open": m.open_ended(rng),
        "chat": ([turn] for turn in turns_of_target),
    }
    in_dev = m.overlaps(Path(dev))
    seen = {" ".join(m.words(turn)) for path in known.split(",") for record in read(path) for turn in record["turns"]}
    records = []
    for category, size in SIZES[name].items():
        count = 0
        for turns in streams[category]:
            key = " ".join(m.words(turns[0]))
            if key in seen or in_dev(turns[:1]):
                continue
            seen.add(key)
            records.append({"id": f"{name}-{category}-{count}", "category": category, "turns": turns[:1]})
            count += 1
            if count == size:
                break
    rng.shuffle(records)
    with open(out, "w") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main(*sys.argv[1:])

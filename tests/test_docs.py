"""The Python blocks of README.md and docs/using.md, run in order with the real pair."""

import copy
import importlib
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/using.md"])
def test_every_block_runs(page, smollm2, monkeypatch, capsys):
    target, tokenizer = smollm2
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    # Loaded once for all tests; pages set the tokenizer's padding.
    loader = importlib.import_module("examples.smollm2")
    monkeypatch.setattr(loader, "load_smollm2", lambda: (target, copy.deepcopy(tokenizer)))
    generate = target.generate

    def a_few_tokens(*args, **options):  # whether a block works does not depend on how far it goes
        options["max_new_tokens"] = min(options.get("max_new_tokens", 6), 6)
        return generate(*args, **options)

    monkeypatch.setattr(target, "generate", a_few_tokens)
    text = (ROOT / page).read_text()
    names, ran = {"__name__": page}, 0
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        # Line numbers of a traceback are the page's.
        code = compile("\n" * line + match[1], page, "exec")
        if match[1].startswith("# needs "):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            exec(code, names)
        ran += 1
    assert ran >= 5
    assert names["drafter"].last_run.tokens > 1
    assert capsys.readouterr().out.strip()

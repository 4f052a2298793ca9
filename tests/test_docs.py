"""The documentation is run: Python blocks executed, commands parsed, options, links and figures' sources looked up."""

import ast
import copy
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import typer
from transformers import HfArgumentParser
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import app
from drafters import make_drafter
from hub_server import TOKEN, HubServer
from targets import make_target, prompt_ids

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md",
         *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("model_cards/*/README.md"))]]  # fmt: skip
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

REAL = ["README.md", "docs/using.md", "docs/how-it-works.md"]  # run with SmolLM2 and its drafter
TINY = ["docs/adapting.md", "docs/training.md", "docs/troubleshooting.md"]  # run with a tiny pair and its files
NEEDS = {  # what a page says about itself, where its blocks cannot be run here
    "model_cards/SmolLM2-135M-Instruct-DFlash/README.md": "a model hub",
}


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """(line of the page, text) of its blocks."""
    text = (ROOT / page).read_text()
    found = [(text[: match.start()].count("\n") + 1, match) for match in BLOCK.finditer(text)]
    return [(line, match[2]) for line, match in found if match[1] == language]


def with_blocks(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


def run_blocks(page: str, names: dict) -> int:
    """Execute a page's Python blocks one after the other; how many could be."""
    ran, names["__name__"] = 0, page
    for line, text in blocks(page, "python"):
        if not torch.cuda.is_available():
            text = text.replace("bf16=True", "use_cpu=True")  # transformers refuses it without a GPU
        code = compile("\n" * line + text, page, "exec")  # line numbers of a traceback are the page's
        if text.startswith("# needs "):
            check_names(text)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", "'pin_memory'")  # the trainer's default, on a machine without a GPU
            exec(code, names)
        ran += 1
    return ran


def check_names(text: str) -> None:
    """Of code that cannot be run: what it imports is there, and what it calls takes the keywords that it is given."""
    tree, names = ast.parse(text), {"DFlashDraftModel": DFlashDraftModel}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "imports", "exec"), names)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        path = ast.unparse(call.func).split(".")
        if path[0] not in names or not all(part.isidentifier() for part in path):
            continue  # a variable of the page
        called = names[path[0]]
        for part in path[1:]:
            called = getattr(called, part)
        taken = inspect.signature(called).parameters.values()
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken):
            assert {word.arg for word in call.keywords} <= {parameter.name for parameter in taken}, ast.unparse(call)


def test_every_page_with_python_is_run_or_says_what_it_needs():
    assert sorted(with_blocks("python")) == sorted([*REAL, *TINY, *NEEDS])
    known = {"python", "bash", "text", ""}
    assert {match[1] for page in PAGES for match in BLOCK.finditer((ROOT / page).read_text())} <= known


@pytest.mark.parametrize("page", REAL)
def test_blocks_run_with_the_real_pair(page, smollm2, monkeypatch, capsys):
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

    if page != "docs/how-it-works.md":  # which counts them
        monkeypatch.setattr(target, "generate", a_few_tokens)
    names = {}
    assert run_blocks(page, names) == len([text for _, text in blocks(page, "python") if text[:8] != "# needs "])
    assert names["drafter"].last_run.tokens > 1
    assert capsys.readouterr().out.strip()


@pytest.fixture
def tiny_folder(tmp_path, monkeypatch):
    """A folder with the files that pages speak of, made from a tiny pair: `(target, drafter)`."""
    target, drafter = make_target("llama"), make_drafter(initializer_range=0.05)
    monkeypatch.chdir(tmp_path)
    drafter.save_pretrained("my-drafter")
    lines = []
    for seed in range(4):
        ids = target.generate(prompt_ids(length=8, seed=seed), do_sample=False, max_new_tokens=24)[0].tolist()
        lines.append(f'{{"id": "{seed}", "ids": {ids}, "spans": [[8, 32]]}}\n')
    Path("answers.jsonl").write_text("".join(lines))
    return target, drafter


@pytest.mark.parametrize("page", TINY)
def test_blocks_run_with_a_tiny_pair(page, tiny_folder, byte_tokenizer, monkeypatch, capsys):
    target, drafter = tiny_folder
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template, tokenizer.pad_token = "{{ messages[0].content }}", "0"
    tokenizer.add_tokens(["3"], special_tokens=True)  # free for the mask token
    if page == "docs/troubleshooting.md":
        from dflash_hf import doctor
        from dflash_hf.benchmark import Prompt

        prompts = [Prompt(str(i), chr(60 + i) * 5, "any") for i in range(2)]
        diagnose = doctor.diagnose
        monkeypatch.setattr(doctor, "diagnose", lambda *args, **kw: diagnose(*args, prompts, max_new_tokens=8, **kw))
    inputs = {"input_ids": prompt_ids(length=6)}
    target.generation_config.max_new_tokens = 8  # as the generation config of a real target has some limit
    names = {"target": target, "drafter": drafter, "tokenizer": tokenizer, "inputs": inputs}
    assert run_blocks(page, names | {"DFlashDraftModel": DFlashDraftModel}) == len(blocks(page, "python"))


@pytest.mark.parametrize("page", NEEDS)
def test_blocks_that_cannot_run_here_compile_and_name_what_exists(page):
    for line, text in blocks(page, "python"):
        compile("\n" * line + text, page, "exec")
        check_names(text)


# -- commands --

COMMANDS = typer.main.get_command(app).commands
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKE_TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def training_options() -> set[str]:
    from dflash_hf.training.trainer import DFlashTrainingArguments

    parser = HfArgumentParser(DFlashTrainingArguments)
    return {option for action in parser._actions for option in action.option_strings}


def check_command(words: list[str]) -> None:
    """That a command line could run: its options exist and have values, its files are there."""
    program, *rest = words
    if program == "dflash-hf":
        context = COMMANDS[rest[0]].make_context(rest[0], rest[1:])
        if context.args:  # of transformers' TrainingArguments
            from dflash_hf.training.trainer import DFlashTrainingArguments

            HfArgumentParser(DFlashTrainingArguments, exit_on_error=False).parse_args_into_dataclasses(context.args)
    elif program == "pip":
        assert rest[0] == "install"
        for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), rest
    elif program == "make":
        assert rest[0] in MAKE_TARGETS
    elif program == "python":
        source = (ROOT / rest[0]).read_text()
        for word in rest[1:]:
            assert not word.startswith("--") or word in source, f"{rest[0]} has no option {word}"
    else:
        assert words[:3] in (["hf", "auth", "login"],), f"a command that the test does not know: {words}"


@pytest.mark.parametrize("page", with_blocks("bash"))
def test_commands_parse(page, tmp_path, monkeypatch):
    for name in ("prompts.jsonl", "other-prompts.jsonl", "answers.jsonl", "bench.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    count = 0
    for _, text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                check_command(words)
                count += 1
    assert count


# What makes a command of the page small; nothing else is added to them.
SMALL = {
    "answer": "--max-new-tokens 12 --device cpu",
    "train": "--max_steps 2 --num_anchors 2 --num-layers 1 --block-size 4 --use_cpu --report_to none",
    "check": "--max-new-tokens 4 --limit 2 --device cpu",
    "bench": "--max-new-tokens 4 --limit 2 --device cpu",
    "push": "",
}
LOAD = """
import sys; sys.modules["dflash_hf"] = None
import json, torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained("TARGET")
drafter = AutoModel.from_pretrained("me/my-drafter", trust_remote_code=True)
ids = torch.tensor([json.loads(sys.argv[1])])
ids = target.generate(ids, do_sample=False, max_new_tokens=16, assistant_model=drafter)
print(json.dumps([ids[0].tolist(), drafter.last_run.drafted_cycles, type(drafter).__module__]))
"""


def test_the_way_to_a_drafter_for_ones_own_model_leads_there(byte_tokenizer, tmp_path, monkeypatch):
    """The commands of README.md one after the other, then the published drafter by its name, without dflash_hf."""
    monkeypatch.chdir(tmp_path)
    target, tokenizer, ids = make_target("llama"), copy.deepcopy(byte_tokenizer), prompt_ids(length=9)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.add_tokens(["3"], special_tokens=True)  # free for the mask token
    target.save_pretrained("TARGET")
    tokenizer.save_pretrained("TARGET")
    lines = [json.dumps({"turns": [chr(60 + i) * (5 + i)]}) + "\n" for i in range(8)]
    Path("prompts.jsonl").write_text("".join(lines[:6]))
    Path("other-prompts.jsonl").write_text("".join(lines[6:]))
    (text,) = [text for _, text in blocks("README.md", "bash") if "dflash-hf answer" in text]
    done = []
    with HubServer(TOKEN) as hub:
        hub.serve(monkeypatch, tmp_path / "cache")
        for program, *words in filter(None, (shlex.split(line, comments=True) for line in text.splitlines())):
            if program == "dflash-hf":
                words = ["someone/TARGET" if word == "TARGET-ON-THE-HUB" else word for word in words]
                result = CliRunner().invoke(app, [*words, *SMALL[words[0]].split()])
                # Two steps make a poor drafter, of which `check` may say anything but that it does not fit or not
                # give the target's text (3, 4).
                assert result.exit_code in ((0, 5, 6, 7) if words[0] == "check" else (0,)), result.output
                done.append(words[0])
        assert done == list(SMALL)
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", LOAD, str(ids[0].tolist())]
        loaded = subprocess.run(command, env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    got, cycles, module = json.loads(loaded.stdout.splitlines()[-1])
    assert got == target.generate(ids, do_sample=False, max_new_tokens=16)[0].tolist()
    assert cycles > 0 and module.startswith("transformers_modules.me.my_hyphen_drafter")
    card = hub.files("me/my-drafter")["README.md"].decode()
    assert "base_model: someone/TARGET" in card and "2 prompts of other-prompts.jsonl" in card


def test_a_wrong_option_is_seen():
    for line in ("dflash-hf bench A B C --limits 3", "dflash-hf train A --data x --output_dir y --num_ancors 3"):
        with pytest.raises(Exception, match=r"limits|ancors"):
            check_command(line.split())


@pytest.mark.parametrize("page", PAGES)
def test_options_and_commands_in_the_text_exist(page):
    text = BLOCK.sub("", (ROOT / page).read_text())
    options = {name for command in COMMANDS.values() for parameter in command.params for name in parameter.opts}
    options |= training_options() | {"--help", "--install-completion"}
    options |= {"--speculative-config", "--speculative-algorithm"}  # of vLLM and SGLang
    options |= {"--no-python", "--no_python", "--cases", "--log"}  # of torchrun, accelerate and tests/fuzz.py
    spans = re.findall(r"`([^`\n]+)`", text)
    for span in spans:
        assert set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", span)) <= options, span
        if match := re.match(r"dflash-hf ([a-z]+)", span):
            assert match[1] in COMMANDS, span


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http://", "https://", "#")):
            assert ((ROOT / page).parent / link.partition("#")[0]).exists(), link
    for path in re.findall(r"`((?:examples|docs|tests|dflash_hf|model_cards)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path

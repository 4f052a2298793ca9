"""The command line, `dflash-hf`: every command a few lines over the library."""

import json
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from . import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_SCHEDULE_HELP = "As many drafts as pay, or always as many; unset: as the drafter says."
_DEVICE_HELP = "cpu, cuda, ...; auto: spread over all there are (not run on several); unset: CUDA where it is there."


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """DFlash drafters for transformers: a small drafter proposes blocks of tokens, the target's text stays the same.

    Example: dflash-hf generate "Why is the sky blue?" --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16

    Every command has an example: dflash-hf COMMAND --help.
    """


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the user says; - reads it from standard input.")],
    target: Annotated[str, typer.Option(help="Folder or Hub name of the target, or a GGUF file.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub name of its drafter.")],
    raw: Annotated[bool, typer.Option("--raw", help="Go on from PROMPT as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the best token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample; unset: 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --sample; unset or 0: off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample; unset or 1: off.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="With --sample.")] = 0,
    schedule: Annotated[Literal["adaptive", "constant"] | None, typer.Option(help=_SCHEDULE_HELP)] = None,
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of target and drafter: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object, and nothing while it runs.")] = False,
) -> None:
    """Answer PROMPT, accepted drafts shaded, with tokens a second and tau at the end.

    Example: dflash-hf generate "Why is the sky blue?" --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16
    """
    from rich.console import Console

    from . import terminal

    with one_line_errors():
        prompt = sys.stdin.read() if prompt == "-" else prompt
        if not prompt.strip():
            raise ValueError("The prompt is empty: expected some text.")
        options = _generate_options(max_new_tokens, seed, sample, temperature=temperature, top_k=top_k, top_p=top_p)
        pair = _load_pair(target, drafter, schedule, gguf_file=gguf_file, dtype=dtype, device=device)
        ids = terminal.encode(pair[2], prompt if raw else [{"role": "user", "content": prompt}])
        done = terminal.answer(*pair, ids, _silent if as_json else terminal.shaded(Console()), **options)
    if as_json:
        typer.echo(done.to_json())
    else:
        typer.echo()
        typer.echo(done, err=True)


@app.command()
def chat(
    target: Annotated[str, typer.Option(help="Folder or Hub name of the target, or a GGUF file.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub name of its drafter.")],
    system: Annotated[str | None, typer.Option(help="System message; unset: the chat template's own.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, if TARGET has room for it.")] = 1024,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the best token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample; unset: 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --sample; unset or 0: off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample; unset or 1: off.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="With --sample.")] = 0,
    schedule: Annotated[Literal["adaptive", "constant"] | None, typer.Option(help=_SCHEDULE_HELP)] = None,
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of target and drafter: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object a turn, and nothing else.")] = False,
) -> None:
    """Talk with TARGET, a line a turn. Ctrl-C breaks an answer off, Ctrl-D ends the talk.

    Example: dflash-hf chat --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --sample --temperature 0.6
    """
    from rich.console import Console

    from . import terminal

    with one_line_errors():
        options = _generate_options(max_new_tokens, seed, sample, temperature=temperature, top_k=top_k, top_p=top_p)
        pair = _load_pair(target, drafter, schedule, gguf_file=gguf_file, dtype=dtype, device=device)
        pair[1].check_target(pair[0])  # what every turn would say
        talk = terminal.Conversation(*pair, system=system)
        while (line := _read_line("" if as_json or not sys.stdin.isatty() else "> ")) is not None:
            if not line.strip():
                continue
            try:
                done = talk.say(line, _silent if as_json else terminal.shaded(Console()), **options)
            except KeyboardInterrupt:
                typer.echo("\nBroken off; this turn is forgotten.", err=True)
                continue
            except ValueError as error:  # of this turn: the next one may be shorter
                _echo_error(error)
                continue
            typer.echo(done.to_json() if as_json else "")
            if not as_json:
                typer.echo(done, err=True)


@app.command()
def answer(
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target.")],
    prompts: Annotated[str, typer.Argument(help="JSONL file with `turns` or `messages`, or a data set's name.")],
    out: Annotated[Path, typer.Argument(help="JSONL file to append the samples to.")],
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    split: Annotated[str, typer.Option(help="Of the data set.")] = "train",
    column: Annotated[str | None, typer.Option(help="Text column that holds the user turn.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first prompts only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations in a batch.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the best token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample; unset: 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample; unset or 1: off.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="With --sample.")] = 0,
) -> None:
    """Let TARGET answer PROMPTS: the training data of its drafter. Call it again after an interruption.

    Example: dflash-hf answer Qwen/Qwen3-8B prompts.jsonl answers.jsonl --max-new-tokens 1024
    """
    from .training import answers

    with one_line_errors():
        sampling = _sampling(sample, temperature=temperature, top_p=top_p)
        questions = answers.read_prompts(prompts, split=split, column=column)[:limit]
        model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device=device)
        run = answers.answer(
            model,
            tokenizer,
            questions,
            out,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch_size=batch_size,
            do_sample=sample,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            progress=True,
        )
    rate = f", {run.tokens / run.seconds:.0f} tokens/s" if run.written else ""
    left_out = f", {run.too_long} prompts over {max_prompt_tokens} tokens left out" if run.too_long else ""
    typer.echo(f"{out}: {run.written} answers written, {run.found} were there{left_out}{rate}")


@app.command()
def features(
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target.")],
    answers: Annotated[Path, typer.Argument(help="File that `answer` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the shards to.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub name of the drafter whose layers to keep.")],
    with_final: Annotated[bool, typer.Option("--with-final", help="Keep what distillation needs too.")] = False,
    storage: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    skip: Annotated[int, typer.Option(min=0, help="Leave out the first answers.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Take this many answers.")] = None,
) -> None:
    """Keep the TARGET's context features of ANSWERS on disk, so that training computes them once.

    Example: dflash-hf features Qwen/Qwen3-8B answers.jsonl features --drafter z-lab/Qwen3-8B-DFlash-b16
    """
    from . import checkpoints
    from .training.answers import read_samples
    from .training.features import write_features

    with one_line_errors():
        samples = read_samples(answers)[skip:][:limit]
        if not samples:
            raise ValueError(f"{answers} holds no answers (skip {skip}, limit {limit}).")
        layers = checkpoints.read(drafter).config.target_layer_ids or []
        _refuse_a_model(out)
        model, _ = load_target(target, gguf_file=gguf_file, dtype=dtype, device=device)
        written = write_features(model, samples, out, layers, dtype=storage, with_final=with_final, progress=True)
    typer.echo(f"{out}: {written} shards written, {len(samples)} answers")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target.")],
    data: Annotated[str, typer.Option(help="Answers (JSONL) or folders of features, with commas between them.")],
    eval_data: Annotated[str | None, typer.Option(help="Held-out data, for --eval_strategy or the end.")] = None,
    init_from: Annotated[str | None, typer.Option(help="Drafter to start from; unset: a fresh one.")] = None,
    num_layers: Annotated[int, typer.Option(min=1, help="Of a fresh drafter.")] = 5,
    block_size: Annotated[int, typer.Option(min=2, help="Of a fresh drafter.")] = 16,
    mask_token_id: Annotated[int | None, typer.Option(help="Of a fresh drafter; unset: an unused id.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the target's weights: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help="Of the target; unset: where the drafter is.")] = None,
) -> None:
    """Train a drafter of TARGET. Call it again after an interruption: it goes on from the last checkpoint.

    Every option of transformers' TrainingArguments is one here (--output_dir, --learning_rate, --max_steps ...), and
    those of DFlashTrainingArguments (--num_anchors, --max_length, --distillation_weight ...). Their defaults are the
    paper's.

    Example: dflash-hf train Qwen/Qwen3-8B --data answers.jsonl --output_dir my-drafter
    """
    import torch
    from transformers import HfArgumentParser, set_seed

    from . import DFlashDraftModel
    from .checkpoints import load_drafter
    from .training import trainer as t

    with one_line_errors():
        (arguments,) = HfArgumentParser(t.DFlashTrainingArguments, exit_on_error=False).parse_args_into_dataclasses(
            context.args
        )
        out = Path(arguments.output_dir)
        _refuse_a_model(out)
        if not (sources := _list(data)):
            raise ValueError("Expected answers or folders of features as --data, with commas between them, got none.")
        # First what is quickly read: a mistake in it shows before a large target is there.
        dataset = t.read_dataset(sources)
        names = _list(eval_data) or []
        held_out = {Path(name).stem: t.read_dataset([name]) for name in names}
        if len(held_out) < len(names):
            raise ValueError(f"Each set of --eval-data is evaluated under its name, and two share one: {eval_data}.")
        if arguments.eval_strategy != "no" and not held_out:
            raise ValueError(f"--eval_strategy {arguments.eval_strategy.value} needs held-out answers as --eval-data.")
        drafter = None if init_from is None else load_drafter(init_from, dtype=torch.float32)
        set_seed(arguments.seed)  # a fresh drafter's weights are drawn before the trainer sets it
        device = device or str(arguments.device)  # of this process, where several were launched
        model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device=device)
        if drafter is None:
            drafter = DFlashDraftModel.for_target(
                model, num_layers, block_size, mask_token_id=mask_token_id, tokenizer=tokenizer
            )
        with _removed_if_empty(out):
            trainer = t.DFlashTrainer(drafter, model, arguments, dataset, held_out or None)
            trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint or True)
            trainer.save_model()
            found = trainer.evaluate() if held_out and arguments.eval_strategy == "no" else {}
    taus = [f", {name} {value:.2f}" for name, value in found.items() if name.endswith("_tau")]
    typer.echo(f"{arguments.output_dir}: a drafter of {trainer.state.global_step} steps{''.join(taus)}")


@app.command()
def bench(
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder or Hub name of its drafter.")],
    prompts: Annotated[str, typer.Argument(help="JSONL file with `turns` or `messages`, or a data set's name.")],
    out: Annotated[Path, typer.Option(help="JSON file of the report.")] = Path("bench.json"),
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG plots (needs matplotlib).")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated; unset: all that can run.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Folder or Hub name of a small language model.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of target and drafter: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    split: Annotated[str, typer.Option(help="Of the data set.")] = "test",
    column: Annotated[str | None, typer.Option(help="Text column that holds the user turn.")] = None,
    categories: Annotated[str | None, typer.Option(help="Comma-separated: take these only.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Take the first prompts of each category.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first prompts only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of every prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in a batch.")] = 1,
    block_lengths: Annotated[str | None, typer.Option(help="Comma-separated num_assistant_tokens values.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Comma-separated prompt lengths to fill up to.")] = None,
    simulated_tau: Annotated[str | None, typer.Option(help="Comma-separated; drafts right as often as asked.")] = None,
    efficiency: Annotated[bool, typer.Option("--efficiency", help="Measure the cycle efficiency too.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the best token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample; unset: 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --sample; unset or 0: off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample; unset or 1: off.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of sampling, simulation and intervals.")] = 0,
) -> None:
    """Measure DRAFTER on PROMPTS against plain decoding and its peers. Ctrl-C keeps what was measured.

    Example: dflash-hf bench Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16 prompts.jsonl --limit 32 --plots plots
    """
    from importlib.util import find_spec

    import torch
    from transformers import AutoModelForCausalLM

    from . import benchmark as b

    with one_line_errors():
        if plots is not None and find_spec("matplotlib") is None:
            raise ModuleNotFoundError('Plots need matplotlib: pip install "dflash-hf[bench]" (in a clone: ".[bench]")')
        if plots is not None and plots.exists() and not plots.is_dir():
            raise FileExistsError(f"Expected a folder for the plots, {plots} is something else.")
        if threads is not None:
            torch.set_num_threads(threads)
        chosen, sha256 = b.read_prompts(
            prompts,
            categories=_list(categories),
            per_category=per_category,
            limit=limit,
            split=split,
            column=column,
        )
        sampling = _sampling(sample, temperature=temperature, top_k=top_k, top_p=top_p)
        model, assistant_model, tokenizer = _load_pair(
            target, drafter, gguf_file=gguf_file, dtype=dtype, device=device
        )
        assistant_model.check_target(model)
        small = None
        if assistant is not None:
            small = AutoModelForCausalLM.from_pretrained(assistant, dtype=model.dtype).to(model.device).eval()
        report = b.bench(
            model,
            assistant_model,
            chosen,
            tokenizer=tokenizer,
            methods=_list(methods),
            assistant=small,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            sampling=sampling,
            block_lengths=_list(block_lengths, int),
            contexts=_list(contexts, int),
            simulated_taus=_list(simulated_tau, float),
            efficiency=efficiency,
            seed=seed,
            source={"source": prompts, "sha256": sha256, "command": shlex.join(["dflash-hf", *sys.argv[1:]])},
            out=out,
            progress=True,
        )
        report.print()
        drawn = []
        if plots is not None:
            from .benchmark.plots import draw

            drawn = draw(report, plots, prefix=out.stem)
    typer.echo("\n".join(map(str, [out, *drawn])))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Drafter's folder or Hub name, in z-lab's or speculators' layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    to: Annotated[str, typer.Option(help="Layout to write: z-lab or speculators.")] = "z-lab",
    target: Annotated[str | None, typer.Option(help="Folder or Hub name of the target; speculators names it.")] = None,
) -> None:
    """Write a drafter in the layout that transformers, vLLM and SGLang load, or in speculators'.

    Example: dflash-hf convert z-lab/Qwen3-8B-DFlash-b16 for-training --to speculators --target Qwen/Qwen3-8B
    """
    from . import checkpoints

    with one_line_errors():
        done = checkpoints.convert(source, out, to=to, target=target)
    typer.echo(f"{out}: {len(done.tensors)} tensors, {done.layout} layout, the same draft before and after")
    for name, reason in done.left_out.items():
        typer.echo(f"left out: {name} ({reason})")
    for note in done.notes:
        typer.echo(f"note: {note}")


@app.command()
def push(
    drafter: Annotated[str, typer.Argument(help="Drafter's folder or Hub name, in z-lab's or speculators' layout.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hub, owner/name; made if it is not there.")],
    measurements: Annotated[Path | None, typer.Option(help="JSON of `dflash-hf bench --out`, for the card.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub name of the target; unset: by the drafter.")] = None,
    license: Annotated[str | None, typer.Option(help="Hub identifier, such as apache-2.0.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Hub name of training data; may be repeated.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Of that data, such as en; may be repeated.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Pattern of other files; may be repeated.")] = None,
    private: Annotated[bool | None, typer.Option(help="For a repository that is made.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to upload to; unset: main.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace something else, or a changed README.md.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the files to this folder and upload nothing.")] = None,
) -> None:
    """Publish DRAFTER with a model card. Log in with `hf auth login` first; call it again after an interruption.

    The card is the folder's README.md, else the one on the Hub, else a new one. One that was changed on the Hub stays,
    and so do its figures without --measurements.

    Example: dflash-hf push my-drafter me/my-drafter --measurements bench.json --license apache-2.0
    """
    from .hub import publish

    with one_line_errors():
        done = publish(
            drafter,
            repo_id,
            measurements=measurements,
            base_model=base_model,
            license=license,
            datasets=dataset,
            language=language,
            include=include or (),
            private=private,
            revision=revision,
            force=force,
            out=out,
        )
    typer.echo(f"{done.url}: {len(done.files)} files" + ("" if out is None else ", nothing uploaded"))


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder or Hub name of the drafter.")],
    prompts: Annotated[str | None, typer.Option(help="JSONL file as for `bench`; unset: eight built in.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file of everything that was found.")] = None,
    other_target: Annotated[list[str] | None, typer.Option(help="Try this target too; may be repeated.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="File in TARGET that holds the weights as GGUF.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first prompts only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=3, help="Of every prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of the comparison with plain decoding.")] = 1,
) -> None:
    """Find out whether DRAFTER works with TARGET, and if it does not help, which known mistake explains it.

    Exit code: 0 healthy, 1 could not be checked, 3 does not load or fit, 4 other text than the target's own,
    5 a mistake was found, 6 low acceptance without a known mistake, 7 slower than plain decoding here.

    Example: dflash-hf check Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16
    """
    from .benchmark import read_prompts
    from .doctor import PROMPTS, diagnose

    with one_line_errors():
        if out is not None and not out.parent.is_dir():
            raise FileNotFoundError(f"There is no folder {out.parent} to write {out.name} to; make it first.")
        if out is not None and out.exists() and not out.is_file():  # a folder, or a device that would be replaced
            raise FileExistsError(f"Expected the name of a file to write, {out} is something else.")
        if _is_drafter(Path(target)):
            raise ValueError(f"Expected the target first, {target} is a drafter: dflash-hf check TARGET DRAFTER")
        chosen = PROMPTS[:limit] if prompts is None else read_prompts(prompts, limit=limit)[0]
        model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device=device)
        others = {name: load_target(name, dtype=dtype, device=device)[0] for name in other_target or ()}
        found = diagnose(
            model,
            drafter,
            chosen,
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            other_targets=others,
            progress=True,
        )
        if out is not None:
            found.save(out)
    found.print()
    raise typer.Exit(found.exit_code)


def _echo_error(error: BaseException) -> None:
    typer.secho(f"Error: {' '.join(str(error).split())}", fg="red", err=True)


def _silent(piece: str, accepted: bool) -> None:
    """Write nothing."""


def _read_line(prompt: str) -> str | None:
    """A line of standard input; None at its end, and on Ctrl-C before one."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None


def _sampling(sample: bool, **options: Any):
    """The `benchmark.Sampling` that the options ask for, None being unset.

    Raises:
        ValueError: a value out of its range, or one is given and nothing is sampled.
    """
    from .benchmark import Sampling

    given = {name: value for name, value in options.items() if value is not None}
    if given and not sample:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"Without --sample nothing is sampled, and {names} would be ignored: add --sample.")
    return Sampling(sample, **given)


def _generate_options(max_new_tokens: int, seed: int, sample: bool, **options: Any) -> dict[str, Any]:
    """For `generate()`; seeds torch."""
    import torch

    torch.manual_seed(seed)
    return {"max_new_tokens": max_new_tokens, **_sampling(sample, **options).options}


def _load_pair(target: str, drafter: str, schedule: str | None = None, **where) -> tuple[Any, Any, Any]:
    """`(target, drafter, tokenizer)` in one dtype on one device; `where` as for `load_target`."""
    from . import checkpoints

    checkpoints.read(drafter)  # first: what is wrong with it shows before a large target is there
    model, tokenizer = load_target(target, **where)
    assistant = checkpoints.load_drafter(drafter, dtype=model.dtype).to(model.device)
    if schedule is not None:
        assistant.generation_config.num_assistant_tokens_schedule = schedule
    return model, assistant, tokenizer


def _refuse_a_model(folder: Path) -> None:
    """Raise FileExistsError if `folder` holds a model that is no drafter: what is written there would spoil it."""
    if (folder / "config.json").is_file() and not _is_drafter(folder):
        raise FileExistsError(f"{folder} holds another model (its config.json is no drafter's); name another folder.")


def _is_drafter(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and "DFlashDraftModel" in config.read_text(errors="replace")


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """On an error take `folder` away, if it was made since then and nothing is in it."""
    there = folder.exists()
    try:
        yield
    except BaseException:
        if not there and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _list(text: str | None, kind=str) -> list | None:
    """The parts of `a,b,c`; None for None.

    Raises:
        ValueError: a part is not of the kind that is wanted.
    """
    if text is None:
        return None
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"Expected numbers with commas between them, got {text!r}.") from None


class one_line_errors:
    """Turn errors that a user can mend into one line on stderr and exit code 1."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        from .memory import is_out_of_memory

        if is_out_of_memory(error):
            hint = "try a shorter prompt, fewer tokens, a smaller batch, or a smaller dtype such as --dtype bfloat16"
            error = MemoryError(f"Out of memory: {hint}. {error}")
        if isinstance(error, (ValueError, OSError, ImportError, ArgumentError, MemoryError)):
            _echo_error(error)
            raise typer.Exit(1) from None


def load_target(name: str, *, gguf_file: str | None = None, dtype: str = "auto", device: str | None = None):
    """Load `(model, tokenizer)` of a target from a folder or the Hub, a GGUF file dequantized.

    Args:
        name: folder or Hub name; or the path of a GGUF file, in a folder or behind a Hub name.
        gguf_file: the file's name in there; needs the package `gguf`.
        dtype: a torch dtype's name, or "auto" for the one that the weights were saved in (GGUF: float32).
        device: a torch device's name; unset: CUDA where it is there, else the CPU. "auto" spreads the layers over all
            devices there are by accelerate, which must be installed; that was run on a CPU alone.

    Raises:
        ImportError: a package that is needed for this is not installed.
        OSError: there is no such model.
        ValueError: a file of it is damaged, weights are missing, or `dtype` or `device` cannot be had.

    Example:
        >>> target, tokenizer = load_target("HuggingFaceTB/SmolLM2-135M-Instruct")       # doctest: +SKIP
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = Path(name)
    if gguf_file is None and path.suffix == ".gguf":
        path, gguf_file = path.parent, path.name
        name = str(path)
    if not name or (not path.is_dir() and (path.exists() or path.is_absolute() or len(path.parts) > 2)):
        raise FileNotFoundError(
            f"Expected a folder, a GGUF file or a Hub name like owner/name, got {name or 'nothing'}."
        )
    kind = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1):
        raise ValueError(f"Expected auto or a dtype such as float32, bfloat16 or float16, got {dtype!r}.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {}
    if device == "auto":
        options["device_map"] = "auto"
    else:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"The device {device!r} cannot be had here: {str(error).splitlines()[0]}.") from None
    if gguf_file is not None:
        dtype = "float32" if dtype == "auto" else dtype
        # Otherwise the model counts as quantized: it could not be saved.
        options |= {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # refused below, in one line
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=gguf_file)
        model, info = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    except (SafetensorError, json.JSONDecodeError, TypeError) as error:  # TypeError: a JSON file that holds no object
        raise ValueError(f"A file of {name} is damaged or incomplete ({error}); fetch or write it again.") from None
    except OSError as error:
        if name in str(error):
            raise
        raise OSError(f"{name} cannot be loaded: {error}") from None
    if lacking := sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]):
        raise ValueError(
            f"{name} does not hold the weights of a {type(model).__name__}: {len(lacking)} tensors are missing or of "
            f"another shape, such as {lacking[0]}. It is incomplete, or of another kind."
        )
    return (model if device == "auto" else model.to(device)).eval(), tokenizer

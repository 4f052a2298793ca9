"""Publish a drafter and load it back by its name, as anyone else would.

    hf auth login                                     # or HF_TOKEN in the environment
    python examples/publish.py my-drafter me/my-drafter --base_model Qwen/Qwen3-8B --license apache-2.0

`--measurements bench.json` puts the figures of `dflash-hf bench --out bench.json` on the card; without it the card
says that there are no measurements. A repository that holds something else is left as it is.
"""

from argparse import ArgumentParser

from transformers import AutoModel

from dflash_hf.hub import Published, publish


def main(folder: str, name: str, **options) -> Published:
    done = publish(folder, name, **options)
    print(f"{done.url}: {', '.join(done.files)}")
    # The commit is pinned: its code is what was just uploaded, whatever becomes of the repository.
    drafter = AutoModel.from_pretrained(name, trust_remote_code=True, revision=done.revision)
    print(f"loads as {type(drafter).__name__} with {drafter.num_parameters():,} parameters")
    return done


if __name__ == "__main__":
    parser = ArgumentParser(description="Publish a drafter and load it back by its name.")
    parser.add_argument("folder", help="the drafter's")
    parser.add_argument("name", help="of the repository, owner/name")
    parser.add_argument("--measurements", help="JSON of `dflash-hf bench --out`")
    parser.add_argument("--base_model", help="the target's name on the Hub")
    parser.add_argument("--license", help="such as apache-2.0")
    main(**vars(parser.parse_args()))

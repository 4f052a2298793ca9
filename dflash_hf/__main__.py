"""`dflash-hf`, and `python -m dflash_hf`: the command line, or what to install for it."""

import sys


def main() -> None:
    """Run the command line.

    Example:
        >>> main()                                                                                 # doctest: +SKIP
    """
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit('Error: The commands need typer and rich: pip install "dflash-hf[cli]" (in a clone: ".[cli]")')
    app()


if __name__ == "__main__":
    main()

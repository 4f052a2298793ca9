"""Publishing drafters: the repository's files, its model card, the upload.

>>> from dflash_hf.hub import publish                                            # doctest: +SKIP
>>> publish("my-drafter", "me/my-drafter", measurements="bench.json")            # doctest: +SKIP
"""

from .card import Measurements, write_card
from .publish import Published, publish

__all__ = ["Measurements", "Published", "publish", "write_card"]

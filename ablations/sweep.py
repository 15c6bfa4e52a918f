"""Questions of ablations and their variants: each variant is trained with several seeds and rates.

A question file has its questions in ``QUESTIONS`` and calls :func:`main` with them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Edits a copy of the whole config. The second argument is the base's TokenFormer: its sizes.
Change = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str  # in results.csv, in folders and on the command line
    label: str  # in tables and charts
    change: Change | None  # None: only its rows are left, it can no longer be trained
    start: str | None = None  # name of the earlier variant whose trained model it goes on from
    compare: tuple[str, ...] = ()  # names of the variants to which a table shows its difference
    paper: float | None = None  # what the paper reports for it, where its table has this row
    # Names and shares: its training costs as many FLOPs as these shares of theirs together.
    costs: tuple[tuple[str, float], ...] = ()
    start_folder: str = ""  # where its weights are, within the work directory of ``start``
    prepares: bool = False  # trains weights for others by the config's rate; it has no result


@dataclass(frozen=True)
class Question:
    """One question: its variants are the rows of one table for each base config."""

    name: str  # in results.csv and on the command line
    title: str
    text: str  # Markdown: the question, and what the paper says
    variants: tuple[Variant, ...]  # each after the one that it starts from
    metric: str = "top1"  # in results.csv: top1 of images, perplexity of language
    same_size: bool = True  # all variants have as many parameters, within 1 %
    tunes: bool = False  # its config starts from trained weights; else it trains from scratch
    diagnose: bool = False  # whether the layers are measured during training

    @property
    def higher_is_better(self) -> bool:
        """Perplexity is better if it is lower."""
        return self.metric != "perplexity"

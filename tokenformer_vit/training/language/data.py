"""Rows of the tokens that prepare-text wrote; PyTorch's ``default_collate`` makes the batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import check_tokens_agree
from tokenformer_vit.language.data import open_tokens, read_text_meta

from ..engine import DATASETS


@DATASETS.register_module()
class TokenDataset(Dataset):
    """Memory-mapped rows of one folder, or of several folders one after the other.

    A row has ``inputs``, (N + 1,) int64 tokens, and ``source``, the number of its folder. Each
    token but the first is a target. The last token of a row is the first of the next.
    ``data_root`` is a folder that ``tokenformer-vit prepare-text`` made, or several.
    """

    def __init__(self, data_root: str | Sequence[str], split: str) -> None:
        roots = [data_root] if isinstance(data_root, str) else list(data_root)
        self.folders = [Path(root) for root in roots]
        metas = [read_text_meta(folder) for folder in self.folders]
        shared = {key: metas[0][key] for key in ("context_length", "vocab_size")}
        for key, value in shared.items():
            if any(meta[key] != value for meta in metas):
                raise InputError(f"{', '.join(roots)} have different values of {key}: choose one")
        for folder in self.folders[1:]:
            check_tokens_agree(self.folders[0], folder)
        sources = tuple(folder.name for folder in self.folders)
        if len(set(sources)) < len(sources):
            raise InputError(f"figures are named by the folders {', '.join(roots)}: rename one")
        self._split, self._length = split, metas[0]["context_length"]
        self._tokens = [open_tokens(folder, split) for folder in self.folders]
        self._ends = np.cumsum([(len(each) - 1) // self._length for each in self._tokens])
        self.metainfo: dict[str, Any] = {"sources": sources, **shared}

    def __reduce__(self) -> Any:
        """Open the files again in a worker that is not a fork: a pickle would hold all tokens."""
        return type(self), (list(map(str, self.folders)), self._split)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        source = int(np.searchsorted(self._ends, index, side="right"))
        begin = (index - (self._ends[source - 1] if source else 0)) * self._length
        row = self._tokens[source][begin : begin + self._length + 1].astype(np.int64)
        return {"inputs": torch.from_numpy(row), "source": source}

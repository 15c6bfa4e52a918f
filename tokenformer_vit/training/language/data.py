"""Rows of tokens that prepare-text wrote.

An image data set of mmpretrain has a pipeline of transforms and makes data samples. Rows of tokens
need neither: PyTorch's own ``default_collate`` makes the batches.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmpretrain.registry import DATASETS
from torch.utils.data import ConcatDataset, Dataset

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import check_tokens_agree, open_rows, read_text_meta


@DATASETS.register_module()
class TokenDataset(Dataset):
    """Memory-mapped rows of one folder, or of several folders one after the other.

    Args:
        data_root: Folder that ``tokenformer-vit prepare-text`` made, or several with the same
            context length and vocabulary.
        split: ``train`` or ``val``.

    Attributes:
        metainfo: ``sources``, the names of the folders; ``context_length`` N; ``vocab_size``, the
            number of entries of the tokenizer.

    Raises:
        InputError: If a folder is missing, damaged or empty, or several folders do not fit.

    Shape:
        A row has ``inputs``, (N + 1,) int64 tokens, and ``source``, the number of its folder. Each
        token but the first is a target. The last token of a row is the first of the next.
    """

    def __init__(self, data_root: str | Sequence[str], split: str) -> None:
        roots = [data_root] if isinstance(data_root, str) else list(data_root)
        if not roots:
            raise InputError("data_root of TokenDataset is an empty list; give a folder")
        self.folders = [Path(root) for root in roots]
        metas = [read_text_meta(folder) for folder in self.folders]
        for key in ("context_length", "vocab_size"):
            values = {meta[key]: folder for meta, folder in zip(metas, self.folders, strict=True)}
            if len(values) > 1:
                told = " and ".join(f"{value} in {folder}" for value, folder in values.items())
                raise InputError(f"{key} is {told}: prepare all texts with the same {key}")
        for folder in self.folders[1:]:
            check_tokens_agree(self.folders[0], folder)
        sources = tuple(folder.name for folder in self.folders)
        if len(set(sources)) < len(sources):
            raise InputError(
                f"two of the folders {', '.join(roots)} have the same name, but perplexities are "
                "reported by name; rename one"
            )
        self._metas = metas
        self._rows: Any = ConcatDataset([open_rows(folder, split) for folder in self.folders])  # type: ignore[arg-type]
        self.metainfo: dict[str, Any] = {
            "sources": sources,
            "context_length": metas[0]["context_length"],
            "vocab_size": metas[0]["vocab_size"],
        }

    @classmethod
    def check_files(cls, data_root: str | Sequence[str], split: str, **_: Any) -> None:
        """Check the files, before a run begins."""
        cls(data_root, split)  # maps them into memory and reads no row

    def fingerprint(self) -> str:
        """Return a SHA-256 of the settings of prepare-text and of two rows, to check on resume."""
        made = [[meta.get("settings"), meta["splits"]] for meta in self._metas]
        digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode())
        for row in (0, len(self) - 1):
            digest.update(self[row]["inputs"].numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            InputError: If a token is not in the vocabulary.
        """
        row = np.asarray(self._rows[index]["input_ids"], dtype=np.int64)
        if row.max() >= self.metainfo["vocab_size"]:
            raise InputError(
                f"row {index} of {' and '.join(map(str, self.folders))} has the token {row.max()}, "
                f"but the vocabulary has {self.metainfo['vocab_size']} entries: a file is damaged; "
                "prepare the text again"
            )
        source = np.searchsorted(self._rows.cumulative_sizes, index, side="right")
        return {"inputs": torch.from_numpy(row), "source": int(source)}

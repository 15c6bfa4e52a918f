"""Which backend is the fastest on a GPU, by the records of the benchmark."""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import timm
import torch

from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.ops.measured import Facts

from .records import read_benchmark
from .variants import PRECISIONS


def facts_from_record(record: Mapping[str, Any]) -> Facts:
    """Return the facts of a record about every number of pairs P in its model.

    ``triton`` is the fastest in a dtype if its median time is at most that of ``fused`` in every
    group that measured both, eager and compiled. Otherwise ``fused`` is.

    Args:
        record: Record of ``tokenformer-vit benchmark``.

    Returns:
        {GPU: {dtype: {P: backend}}}, in the form of ``ops/measured.json``; empty for a CPU, and for
        a dtype without both backends.
    """
    faster: dict[str, bool] = {}
    for group in record["groups"] if record["device"] == "cuda" else ():
        dtype = str(PRECISIONS[group["precision"]].products).removeprefix("torch.")
        seconds = {
            (row["implementation"], row["compiled"]): row["seconds_p50"]
            for row in group["variants"]
            if "failed" not in row
        }
        for compiled in (False, True):
            fused, triton = (seconds.get((name, compiled)) for name in ("fused", "triton"))
            if fused and triton:
                faster[dtype] = faster.get(dtype, True) and triton <= fused
    if not faster:
        return {}
    pairs = sorted(_pairs(record))
    backends = {dtype: "triton" if wins else "fused" for dtype, wins in sorted(faster.items())}
    own = {dtype: dict.fromkeys(map(str, pairs), name) for dtype, name in backends.items()}
    return {record["hardware"]: own}


def _pairs(record: Mapping[str, Any]) -> set[int]:
    """Return every P of a record's model."""
    with torch.device("meta"):
        if record["unit"] == "token":
            model = TokenFormerLM(LMConfig(**{**record["config"], "depth": 1}))
        else:
            model = timm.create_model(record["model"], depth=1)
    return {layer.num_param_tokens for layer in model.modules() if isinstance(layer, Pattention)}


def merge_facts(several: Iterable[Facts]) -> Facts:
    """Merge the facts of records; where they disagree, ``fused`` is the fastest."""
    cells = sorted(
        (gpu, dtype, int(pairs), backend)
        for facts in several
        for gpu, dtypes in facts.items()
        for dtype, backends in dtypes.items()
        for pairs, backend in backends.items()
    )
    merged: Facts = {}
    for (gpu, dtype, pairs), same in groupby(cells, key=lambda cell: cell[:3]):
        names = {backend for *_, backend in same}
        own = merged.setdefault(gpu, {}).setdefault(dtype, {})
        own[str(pairs)] = names.pop() if len(names) == 1 else "fused"
    return merged


def render_facts(folder: Path) -> str:
    """Return the text of ``ops/measured.json`` for the records ``speed_*.json`` of a folder.

    Raises:
        InputError: If a file is not a record.
    """
    records = (read_benchmark(path) for path in sorted(folder.glob("speed_*.json")))
    return json.dumps(merge_facts(map(facts_from_record, records)), indent=2) + "\n"

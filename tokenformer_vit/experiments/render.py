"""Render the tables of README.md from the records in ablations/results.

python ablations/render.py           writes the tables
python ablations/render.py --check   fails if a table is not what the records say
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tokenformer_vit.command_line import run_tool

from . import compute_tables, tables
from .comparable import read_groups
from .fields import LANGUAGE, VISION, Field
from .rows import at_best_lr

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "ablations" / "results"
README = ROOT / "README.md"

# Record of each row: what it is, and what is run for it.
RUNS = {
    "digits_demo": "`make demo`: 8 px digits, 0.6 M parameters",
    "cifar10_tiny_5000": "`cifar10_tiny` on a 5,000-image slice",
    "cifar10_tiny_full": "`cifar10_tiny`, all 50,000 images, GPU",
    "imagenet_base_20_iterations": "`imagenet_base`, 20 iterations at batch 4, random images",
    "imagenet_base": "`imagenet_base`, the full recipe",
}
HEAD = (
    "| run | hardware | epochs | loss, first → mean of the last 20 | top-1 % | top-5 % "
    "| minutes |\n"
    "|---|---|---|---|---|---|---|\n"
)
LANGUAGE_RUNS = {
    "lm_reversal": "`lm_reversal`: 16 digits backwards, 0.15 M parameters",
    "lm_shakespeare": "`lm_shakespeare`: tiny Shakespeare by bytes, 0.6 M parameters",
    "lm_pile_150m": "`lm_pile_150m`, the full recipe",
}
LANGUAGE_HEAD = (
    "| run | hardware | steps | loss, first → mean of the last 20 | perplexity, held out "
    "| answers right, % | minutes |\n"
    "|---|---|---|---|---|---|---|\n"
)

# The benchmarks and, of each, the variants that are rendered.
SPEED = {
    "model": "tokenformer_base_matched",
    "baseline": "vit_base_patch16_224",
    "img_size": 224,
    "depth": None,
}
SPEED_VARIANTS = ("fused compiled", "baseline compiled", "released eager")
DECODING_VARIANTS = ("fused eager", "baseline eager", "released eager")  # which none compiles
# What a benchmark on a GPU would show, until there is a record of one.
GPU_GROUPS = [
    f"{mode}, bfloat16 autocast, batch {batch}"
    for mode in ("train", "infer")
    for batch in (128, 256)
]
SPEED_HEAD = (
    "| | ViT-B/16, images/s | TokenFormer, images/s | × ViT (p20–p80) | × released formula, eager "
    "| kept for backward, MB an image | peak memory, × ViT | MFU % |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
LANGUAGE_SPEED_HEAD = (
    "| | Transformer, tokens/s | TokenFormer, tokens/s | × Transformer (p20–p80) "
    "| × released formula, eager | kept for backward, kB a token | peak memory, × Transformer "
    "| MFU % |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
GROWTH_HEAD = (
    "| | parameters, start → end | FLOPs, × the largest | {} | n |\n|---|---|---|---|---|\n"
)


def run_row(name: str) -> str:
    """Render one row of the table of runs."""
    what, keys = RUNS.get(name), ("accuracy/top1", "accuracy/top5")
    if what is None:
        what, keys = LANGUAGE_RUNS[name], ("perplexity", "answers/accuracy")
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return f"| {what} | not run | | | | | |\n"
    record = json.loads(path.read_text())
    values = [f"{record[key]:.2f}" if key in record else "–" for key in keys]
    # The record of a resumed run knows the time of its last part alone.
    minutes = "–" if record["resumed_at_iteration"] else f"{record['seconds'] / 60:.1f}"
    return (
        f"| [{what}](ablations/results/{name}.json) | {record['hardware']}, "
        f"{record['dtype']} | {record['epochs' if name in RUNS else 'iterations']:,} | "
        f"{record['loss_first']:.2f} → {record['loss_last_20_mean']:.2f} | {' | '.join(values)} | "
        f"{minutes} |\n"
    )


def speed_rows() -> str:
    """Render the rows of all benchmarks: our model, compiled, against the compiled baseline."""
    records = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("speed_*.json"))}
    records = {path: record for path, record in records.items() if SPEED.items() <= record.items()}
    rows = [
        speed_row(f"[{record['hardware']}](ablations/results/{path.name})", group)
        for path, record in records.items()
        for group in record["groups"]
        if {row["variant"] for row in group["variants"]} >= set(SPEED_VARIANTS)
    ]
    if not any(record["device"] == "cuda" for record in records.values()):
        rows += [f"| NVIDIA H200, {group} | not run |{' |' * 6}\n" for group in GPU_GROUPS]
    return "".join(rows)


def language_speed_rows() -> str:
    """Render the rows of all benchmarks of language models."""
    rows = ""
    for path in sorted(RESULTS.glob("speed_lm_*.json")):
        record = json.loads(path.read_text())
        link = (
            f"[`{record['model']}`, {record['num_tokens']} tokens, {record['hardware']}]"
            f"(ablations/results/{path.name})"
        )
        rows += "".join(
            speed_row(link, group, "token")
            for group in record["groups"]
            if {row["variant"] for row in group["variants"]} >= set(rendered_variants(group))
        )
    return rows or f"| not run |{' |' * 7}\n"


def speed_row(link: str, group: dict[str, Any], unit: str = "image") -> str:
    """Render one group of a benchmark whose speed is counted in ``unit``."""
    rows = {row["variant"]: row for row in group["variants"]}
    name = f"{link}, {group['mode']}, {group['dtype']}, batch {group['batch_size']}"
    ours, theirs, released = (rows[name] for name in rendered_variants(group))
    if failed := [row["variant"] for row in (ours, theirs, released) if "failed" in row]:
        return f"| {name} | {', '.join(failed)} failed |{' |' * 6}\n"
    times_released = median(
        other / own for other, own in zip(released["seconds"], ours["seconds"], strict=True)
    )
    kept = peak = "–"
    saved = [row[f"saved_mb_per_{unit}"] for row in (ours, theirs)]
    if None not in saved:
        own, other = (each if unit == "image" else 1e3 * each for each in saved)
        kept = f"{own:.1f} / {other:.1f} = {own / other:.2f}"
    if ours["peak_mib"] is not None:
        peak = f"{ours['peak_mib'] / theirs['peak_mib']:.2f}"
    return (
        f"| {name} | {rate(theirs[f'{unit}s_per_s'])} | {rate(ours[f'{unit}s_per_s'])} "
        f"| **{ours['ratio_p50']:.2f}** ({ours['ratio_p20']:.2f}–{ours['ratio_p80']:.2f}) "
        f"| {times_released:.2f} | {kept} | {peak} "
        f"| {100 * ours['mfu']:.0f} |\n"
    )


def rendered_variants(group: dict[str, Any]) -> tuple[str, str, str]:
    """Name ours, the baseline and the released formula as they stand in a group's row."""
    return DECODING_VARIANTS if group["mode"] == "decode" else SPEED_VARIANTS


def rate(per_second: float) -> str:
    """Write out a speed to three digits, or whole."""
    return f"{per_second:.3g}" if per_second < 1000 else f"{per_second:,.0f}"


def growth_rows(field: Field) -> str:
    """Render the rows of a field's sweeps of training cost, each variant at its best rate."""
    text = ""
    for (question, folder), records in read_groups(tables.QUESTIONS, RESULTS).items():
        if question.compute is not None and question.field is field:
            hardware = ", ".join(sorted({record["hardware"] for record in records}))
            link = f"[`{Path(records[0]['config']).stem}`](ablations/results/{folder})"
            text += f"| **{link}**, {hardware} | | | | |\n"
            text += compute_tables.summary(question, at_best_lr(question, records))
    return text or "| not run | | | | |\n"


def growth_table(field: Field) -> str:
    """Render the table of a field's sweeps of training cost."""
    return GROWTH_HEAD.format(field.measure.heading) + growth_rows(field)


def render(text: str) -> str:
    """Replace the tables between the markers of a text; one without markers is left out."""
    rendered = {
        "runs": HEAD + "".join(map(run_row, RUNS)),
        "language-runs": LANGUAGE_HEAD + "".join(map(run_row, LANGUAGE_RUNS)),
        "speed": SPEED_HEAD + speed_rows(),
        "language-speed": LANGUAGE_SPEED_HEAD + language_speed_rows(),
        "growth": growth_table(VISION),
        "language-growth": growth_table(LANGUAGE),
    }
    for name, table in rendered.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda match, table=table: match[1] + table + match[2],
            text,
            flags=re.DOTALL,
        )
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if out of date")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    rendered = render(text)
    if args.check:
        if rendered != text:
            sys.exit("error: README.md is not what the records say; run `ablations/render.py`")
    elif rendered != text:
        README.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    run_tool(main)

"""Render the tables of README.md from the records in ablations/results.

python ablations/render.py           writes the tables
python ablations/render.py --check   fails if a table is not what the records say
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "ablations" / "results"
README = ROOT / "README.md"

# Record of each row: what it is, and what is run for it.
RUNS = {
    "digits_demo": "`make demo`: 8 px digits, 0.6 M parameters",
    "cifar10_tiny_5000": "`cifar10_tiny` on a 5,000-image slice",
    "cifar10_tiny_full": "`cifar10_tiny`, all 50,000 images, GPU",
    "imagenet_base_20_iterations": "`imagenet_base`, 20 iterations at batch 4 on 20 images",
    "imagenet_base": "`imagenet_base`, the full recipe",
}
HEAD = (
    "| run | hardware | epochs | loss, first → mean of the last 20 | top-1 % | top-5 % "
    "| minutes |\n"
    "|---|---|---|---|---|---|---|\n"
)


def run_row(name: str) -> str:
    """Render one row of the table of runs."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return f"| {RUNS[name]} | not run | | | | | |\n"
    record = json.loads(path.read_text())
    accuracy = [
        f"{record[key]:.2f}" if key in record else "–" for key in ("accuracy/top1", "accuracy/top5")
    ]
    # The record of a resumed run knows the time of its last part alone.
    minutes = "–" if record["resumed_at_iteration"] else f"{record['seconds'] / 60:.1f}"
    return (
        f"| [{RUNS[name]}](ablations/results/{name}.json) | {record['hardware']}, "
        f"{record['dtype']} | {record['epochs']} | {record['loss_first']:.2f} → "
        f"{record['loss_last_20_mean']:.2f} | {' | '.join(accuracy)} | "
        f"{minutes} |\n"
    )


def render(text: str) -> str:
    """Replace the table between the markers of a text."""
    table = HEAD + "".join(map(run_row, RUNS))
    return re.sub(
        r"(<!-- runs -->\n).*?(<!-- /runs -->)",
        lambda match: match[1] + table + match[2],
        text,
        flags=re.DOTALL,
    )


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
    main()

"""The tables and charts of language models say what the records say."""

import json
import math

import numpy as np
import pytest
from growth_start import QUESTION as START
from lm_continue import QUESTION as CONTINUE
from lm_growth import QUESTION as GROWTH
from lm_languages import QUESTION as LANGUAGES
from lm_transformer import QUESTION as TRANSFORMER
from PIL import Image
from tables import QUESTIONS

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import IMAGES, LANGUAGE, tables
from tokenformer_vit.experiments.results import read_groups
from tokenformer_vit.experiments.rows import best_lr

SIZES = {"eighth": 1, "quarter": 2, "half": 4, "large": 8, "large_short": 8, "eighth_long": 1}
SHORTER = {"large_short": 6, "eighth_long": 20}


def write(root, question, variant, seed, result, flops=1e12, parameters=1000, **changes):
    """Write the record of a run; if ``result`` is an error, the run failed.

    Args:
        root: Folder of the results.
        question: Question of the sweep.
        variant: Name of the variant.
        seed: Seed of the run.
        result: Final perplexity, or perplexities by the names of texts, or an error.
        flops: Training FLOPs of the run.
        parameters: Number of parameters.
        changes: Other entries of the record.
    """
    (row,) = (each for each in question.variants if each.name == variant)
    options = {"model": {"config": {"num_ffn_param_tokens": parameters}}}
    model = {**options["model"]}
    if row.reference:
        model = {"architecture": "transformer", "config": {"_delete_": True, "depth": 1}}
    if row.start is not None:
        model = {**model, "checkpoint": f"work/{row.start}_seed{seed}"}
    settings = {"randomness": {"seed": seed}, "model": model}
    iterations = SHORTER.get(variant, 10)
    if variant in SHORTER:
        options["train_cfg"] = settings["train_cfg"] = {"max_iters": iterations}
    if row.grown:
        hook = {"type": "GrowthHook", "schedule": [{"iteration": 5}], "init": variant}
        options["custom_hooks"] = [hook]
        settings["custom_hooks"] = [hook, {"type": "CostHook"}]
    if row.text:
        text = {"dataset": {"data_root": f"data/{row.text}"}}
        options["train_dataloader"] = settings["train_dataloader"] = text
    record = {"question": question.name, "variant": variant, "seed": seed, "lr": 1e-3}
    record |= {"config": "configs/small.py", "commit": "abc", "hardware": "CPU"}
    record |= {"options": options, "settings": settings, "parameters": parameters}
    record["loss"] = {"iteration": [], "loss": []}
    if isinstance(result, str):
        record["failed"] = result
    else:
        result = result if isinstance(result, dict) else {"": result}
        final = {f"perplexity{'/' if text else ''}{text}": v for text, v in result.items()}
        final.setdefault("perplexity", 5.0)
        record |= {"iterations": iterations, "flops": flops, "final": final, "dtype": "float32"}
        record |= {"train_sequences": 50 + len(row.text or ""), "sequences_per_step": 5}
        record |= {"seconds": 90.0, "resumed_at_iteration": 0}
        done = [iterations * part // 5 for part in range(1, 6)]
        record["validation"] = {"iteration": done, "flops": [flops * i / done[-1] for i in done]}
        for name, value in final.items():
            record["validation"][name] = [
                value * (1 + 3 / (i + 1) - 3 / (done[-1] + 1)) for i in done
            ]
        record["loss"] = {"iteration": done, "loss": [2.5 - i / 50 for i in done]}
        if row.grown:
            record["growth"] = [{"iteration": 5, "parameters": 8 * parameters}]
    path = root / "ablations" / "results" / f"{question.name}_small" / f"{variant}_seed{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, **changes}))


def rendered(root):
    return tables.render(QUESTIONS, read_groups(QUESTIONS, root / "ablations" / "results"))


def cells(text, question, variant):
    """Return the cells of a variant's last row."""
    section = text[text.index(f"## {question.title}\n") :]
    section = section[: section.find("\n## ", 3)]
    label = next(each.label for each in question.variants if each.name == variant)
    row = [line for line in section.splitlines() if line.startswith(f"| {label} |")][-1]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def picture(path):
    with Image.open(path) as image:
        return image.width, len(image.convert("RGB").getcolors(1_000_000))


def test_a_measure_knows_which_way_is_better():
    perplexity, top1 = LANGUAGE.measure, IMAGES.measure
    assert perplexity.score(8.0) > perplexity.score(9.0)
    assert top1.score(9.0) > top1.score(8.0)
    for measure in (perplexity, top1):
        assert measure.value(measure.score(7.5)) == pytest.approx(7.5)
    line = {"perplexity": 8.12345, "perplexity/a/b": 9, "accuracy/top1": 1, "loss": 2}
    assert perplexity.read(line) == {"perplexity": 8.123, "perplexity/a/b": 9.0}
    assert top1.read(line) == {"top1": 1.0}
    runs = [{"lr": lr, "final": {"perplexity": 5 + lr, "top1": 5 + lr}} for lr in (0.1, 0.2)]
    assert (best_lr(perplexity, runs), best_lr(top1, runs)) == (0.1, 0.2)


def test_everything_is_set_beside_the_transformer(root):
    other, own = {0: 10.0, 1: 11.0}, {0: 9.5, 1: 9.0, 2: 9.9}
    for seed, value in other.items():
        write(root, TRANSFORMER, "transformer", seed, value)
    for seed, value in own.items():
        write(root, TRANSFORMER, "matched", seed, value, flops=1.25e12, parameters=964)
        write(root, TRANSFORMER, "rotary", seed, value + 0.1)
    write(root, TRANSFORMER, "width", 0, "the loss is nan")
    text = rendered(root)
    assert "56 training sequences" not in text
    assert "50 training sequences, 5 a step, 10 iterations, lr 0.001:" in text
    assert cells(text, TRANSFORMER, "transformer") == [
        *("1,000", "1.000", "1.00 · 10¹²", "1.00", "10.50 ± 0.71 (n = 2)", "", "", "1.5", "")
    ]
    row = cells(text, TRANSFORMER, "matched")
    values, steps = np.array(list(own.values())), np.array([-0.5, -2.0])
    assert row[:4] == ["964", "0.964", "1.25 · 10¹²", "1.25"]
    assert row[4] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f} (n = 3)"
    assert row[5] == f"−{-steps.mean():.2f} ± {steps.std(ddof=1):.2f} (n = 2)"
    assert row[6] == "−0.10 ± 0.00, better"  # than the rotary Transformer, with standard error
    assert cells(text, TRANSFORMER, "width")[-1] == "seed 0: the loss is nan"
    assert cells(text, TRANSFORMER, "report")[4] == "not run"


def test_savings_are_read_off_the_lower_envelope_of_log_perplexity(root):
    scratch = {"eighth": (16, 1), "quarter": (12, 2), "half": (9, 4), "large": (8, 8)}
    scratch |= {"large_short": (11, 5), "eighth_long": (15, 2)}  # above the envelope
    for variant, (perplexity, flops) in scratch.items():
        size = 1000 * SIZES[variant]
        write(root, GROWTH, variant, 0, perplexity, flops * 1e12, size)
    half_way = math.sqrt(12 * 9)  # of log perplexity, and so of log FLOPs: needs 2.83e12
    write(root, GROWTH, "zero_key", 0, half_way, 2e12)
    write(root, GROWTH, "duplicate", 0, 7.9, 3e12)
    write(root, GROWTH, "random", 0, 17.0, 2e12)
    write(root, GROWTH, "transformer", 0, 8.5, 9e12)
    write(root, GROWTH, "net2net", 0, 9.0, 4.5e12)
    write(root, GROWTH, "rotary", 0, 7.0, 9e12)
    write(root, GROWTH, "rotary_net2net", 0, 7.25, 3e12)
    text = rendered(root)
    row = cells(text, GROWTH, "zero_key")
    assert row[:3] == ["1,000 → 8,000", "2.00 · 10¹²", "0.25"]
    need = 2e12 * math.sqrt(2)
    assert row[4:6] == [f"+{half_way - 8:.2f}", f"{100 * (1 - 2e12 / need):.0f} %"]
    assert cells(text, GROWTH, "duplicate")[4:6] == ["−0.10", "> all"]
    assert cells(text, GROWTH, "random")[4:6] == ["+9.00", "≤ −100 %"]
    assert cells(text, GROWTH, "net2net")[2:6] == ["0.50", "9.00 (n = 1)", "+0.50", ""]
    # Each form is compared with its own largest model.
    assert cells(text, GROWTH, "rotary_net2net")[2:6] == ["0.33", "7.25 (n = 1)", "+0.25", ""]
    assert "| 12.59 |" in text  # the paper's figures stand beside


def test_the_first_steps_of_a_stage_are_in_the_table(root):
    curve = {"iteration": [50, 100, 200, 400]}
    for seed, shift in ((0, 0.0), (1, 0.5)):
        write(root, START, "small", seed, 7.0)
        for variant, end in (("same", 6.0), ("zero_key", 5.5)):
            values = [9.0 + shift, 8.0, 7.0, end + shift]
            own = {"validation": {**curve, "perplexity": values}}
            own["settings"] = {"train_cfg": {"val_interval": 50}}  # more often than the others
            write(root, START, variant, seed, end + shift, **own)
    write(root, START, "random", 0, "the loss is nan")
    tables.main(QUESTIONS, [], root)
    text = (root / "ablations" / "TABLES.md").read_text()
    row = cells(text, START, "zero_key")
    # The last validation by then; at 150 it is that at 100.
    assert row[3:7] == ["9.25 ± 0.35", "8.00 ± 0.00", "8.00 ± 0.00", "7.00 ± 0.00"]
    assert row[7:9] == ["5.75 ± 0.35 (n = 2)", "−0.50 ± 0.00 (n = 2)"]
    assert cells(text, START, "small")[3:8] == ["", "", "", "", "7.00 ± 0.00 (n = 2)"]
    assert cells(text, START, "random")[-1] == "seed 0: the loss is nan"
    width, colours = picture(root / "ablations" / "results" / "growth_start_small.png")
    assert width > 600
    assert colours > 50


def test_each_text_and_what_is_forgotten_of_it(root):
    books, news = CONTINUE.texts
    for seed, shift in ((0, 0.0), (1, 0.5)):
        write(root, CONTINUE, "first", seed, {books: 6.0 + shift, news: 14.0})
        write(root, CONTINUE, "same", seed, {books: 7.0 + 2 * shift, news: 9.0})
    write(root, CONTINUE, "random", 1, {books: 6.0, news: 9.0}, parameters=2000)
    text = rendered(root)
    assert f"| `{books}` | `{news}` |" in text
    first = cells(text, CONTINUE, "first")
    assert first[0] == f"`{books}`"
    assert first[3:] == ["6.25 ± 0.35", "14.00 ± 0.00", "2", "1.5", ""]
    row = cells(text, CONTINUE, "same")
    assert row[0] == f"`{news}`"
    assert row[3:6] == ["7.50 ± 0.71 (+1.25 ± 0.35)", "9.00 ± 0.00", "2"]
    # Beside the first stage of the same seed.
    assert cells(text, CONTINUE, "random")[1:6] == [
        *("2,000", "1.00 · 10¹²", "6.00 (−0.50 (n = 1))", "9.00", "1")
    ]
    assert cells(text, CONTINUE, "net2net")[3] == "not run"


def test_a_language_of_no_earlier_stage_is_not_forgotten(root):
    english, french, spanish = LANGUAGES.texts
    write(root, LANGUAGES, "first", 0, {english: 5.0, french: 30.0, spanish: 30.0})
    write(root, LANGUAGES, "masked_fr", 0, {english: 5.5, french: 6.0, spanish: 20.0})
    write(root, LANGUAGES, "masked_es", 0, {english: 5.25, french: 6.5, spanish: 5.0})
    text = rendered(root)
    assert cells(text, LANGUAGES, "masked_fr")[3:6] == ["5.50 (+0.50)", "6.00", "20.00"]
    assert cells(text, LANGUAGES, "masked_es")[3:6] == ["5.25 (+0.25)", "6.50 (+0.50)", "5.00"]


def test_charts_and_the_table_of_the_readme(root):
    readme = root / "README.md"
    readme.write_text(
        "<!-- language-growth -->\n<!-- /language-growth -->\n<!-- growth -->\n<!-- /growth -->\n"
    )
    tables.main(QUESTIONS, [], root)
    assert readme.read_text().count("| not run |") == 2
    for question in (TRANSFORMER, GROWTH, CONTINUE, LANGUAGES):
        for seed in (0, 1):
            for number, variant in enumerate(question.variants):
                final = 6.0 + number + seed / 4
                of_texts = {
                    name: final + i for i, name in enumerate(getattr(question, "texts", ()))
                }
                write(root, question, variant.name, seed, of_texts or final, 1e12 * (number + 1))
    tables.main(QUESTIONS, [], root)
    tables.main(QUESTIONS, ["--check"], root)
    for question in (TRANSFORMER, GROWTH, CONTINUE, LANGUAGES):
        assert (
            f"(results/{question.name}_small.png)" in (root / "ablations" / "TABLES.md").read_text()
        )
        width, colours = picture(root / "ablations" / "results" / f"{question.name}_small.png")
        assert width > 600
        assert colours > 50
    text = readme.read_text()
    assert text.count("| not run |") == 1  # of images
    assert "| perplexity | n |" in text
    assert "| grown, zero keys | 1,000 → 8,000 | 1.75 | 12.12 ± 0.18 | 2 |" in text


def test_charts_of_part_of_a_sweep(root):
    write(root, GROWTH, "zero_key", 0, "out of memory")
    write(root, LANGUAGES, "first", 0, dict.fromkeys(LANGUAGES.texts, 5.0))
    write(root, LANGUAGES, "masked_fr", 0, "out of memory")
    tables.main(QUESTIONS, [], root)
    for question in (GROWTH, LANGUAGES):
        assert (root / "ablations" / "results" / f"{question.name}_small.png").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": 9}, r"iterations is "),
        ({"sequences_per_step": 9}, r"sequences_per_step is "),
        ({"train_sequences": 9}, r"train_sequences is "),
        ({"settings": {"model": {"config": {"depth": 9}}}}, r"model is .*depth"),
        ({"settings": {"optim_wrapper": {"clip_grad": None}}}, r"settings is .*clip_grad"),
        ({"settings": {"train_cfg": {"max_iters": 9}}}, r"max_iters is "),
    ],
)
def test_records_that_are_no_comparison_are_refused(root, changes, message):
    for variant in ("quarter", "large", "large_short", "zero_key", "transformer"):
        write(root, GROWTH, variant, 0, 9.0)
    rendered(root)
    write(root, GROWTH, "large", 1, 9.0, **changes)
    with pytest.raises(InputError, match=rf"{message}.*cannot be compared"):
        rendered(root)


def test_texts_are_of_different_lengths_and_other_data_roots_are_told(root):
    texts = dict.fromkeys(CONTINUE.texts, 9.0)
    write(root, CONTINUE, "first", 0, texts)
    write(root, CONTINUE, "same", 0, texts)
    rendered(root)
    other = {"val_dataloader": {"dataset": {"data_root": ["elsewhere"]}}}
    write(root, CONTINUE, "zero_key", 0, texts, settings=other)
    with pytest.raises(InputError, match=r"settings is .*elsewhere.*cannot be compared"):
        rendered(root)

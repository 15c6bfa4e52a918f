"""Sweeps of language models: what each variant is, and runs that start from the end of others."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lm_continue import QUESTION as CONTINUE
from lm_growth import QUESTION as GROWTH
from lm_languages import QUESTION as LANGUAGES
from lm_schedules import QUESTION as SCHEDULES
from lm_stages import QUESTION as STAGES
from lm_transformer import QUESTION as TRANSFORMER
from tables import QUESTIONS

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import LANGUAGE, Texts
from tokenformer_vit.experiments.fields import mean_flops
from tokenformer_vit.experiments.plan import plan
from tokenformer_vit.experiments.sweep import parse, sweep
from tokenformer_vit.models.compilation import BLOCKS
from tokenformer_vit.training.config import load_config

pytest.importorskip("transformers", reason="language models need the extra [language]")
pytest.importorskip("datasets", reason="language models need the extra [language]")

from tokenformer_vit.language import byte_tokenizer

OF_LANGUAGE = [question for question in QUESTIONS if question.field is LANGUAGE]
LENGTH, WIDTH = 16, 32
PAIRS = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 40, "num_ffn_param_tokens": 120}
CONFIG = """
_base_ = "{root}/configs/lm_shakespeare.py"
_sizes = dict(context_length={length}, embed_dim={width}, depth=1, num_heads=2)
model = dict(config=dict(**_sizes, **{pairs}))
train_dataloader = dict(batch_size=4, dataset=dict(data_root="{data}/text"))
val_dataloader = dict(dataset=dict(data_root="{data}/text"))
test_dataloader = val_dataloader
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=2),
    dict(type="CosineAnnealingLR", eta_min=2e-4, by_epoch=False, begin=2),
]
train_cfg = dict(max_iters=40, val_interval=20)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=20))
"""
FOLDERS = ("text", *CONTINUE.texts, *LANGUAGES.texts)

# Stands in for tools/train.py: what it would leave behind, or how it would end.
TRAINER = """
import json, os, sys
from pathlib import Path

config, folder = Path(sys.argv[1]), Path(sys.argv[3])
with open(config.parent / "starts.txt", "a") as file:
    file.write(f"{config.stem}\\n")
if os.environ.get("FAIL", "nothing") in config.stem:
    sys.exit("error: the loss is nan")
logs = folder / "20260101_000000" / "vis_data"
logs.mkdir(parents=True)
lines = [{"loss": 2 - step / 1000, "lr": 0.1, "step": step} for step in range(1, 41)]
for step, value in ((20, 9.0), (40, 8.12345)):
    lines.append({"perplexity": value, "perplexity/a": value + 1, "flops": step * 1e6,
                  "parameters": 7, "answers/accuracy": 3.0, "step": step})
(logs / "scalars.json").write_text("\\n".join(map(json.dumps, lines)))
record = {"command": "python train.py", "iterations": 40, "flops": 4e7, "seconds": 6.0}
record |= {"perplexity": 8.12345, "perplexity/a": 9.12345, "resumed_at_iteration": 0}
record |= {"commit": "abc", "processes": 1}
(folder / "record.json").write_text(json.dumps(record))
"""


def write_text(folder, letters):
    """Write 20 rows to train on and 3 to validate on, of random letters."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    splits = {}
    for split, rows in (("train", 20), ("val", 3)):
        text = rng.choice(list(letters.encode()), rows * LENGTH + 1)
        text.astype(np.uint16).tofile(folder / f"{split}.bin")
        splits[split] = {"tokens": len(text), "documents": 1, "bytes": len(text)}
    meta = {"context_length": LENGTH, "vocab_size": 258, "end": 256, "dtype": "uint16"}
    (folder / "meta.json").write_text(json.dumps({**meta, "splits": splits}))
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    for number, name in enumerate(dict.fromkeys(FOLDERS)):
        write_text(root / name, "abcdefghij"[number : number + 3])
    return root


@pytest.fixture
def words(tmp_path, texts):
    """The options that every sweep of these tests has."""
    config = tmp_path / "small_lm.py"
    sizes = {"length": LENGTH, "width": WIDTH, "pairs": repr(PAIRS)}
    root = Path(__file__).resolve().parents[2]
    config.write_text(CONFIG.format(root=root, data=texts, **sizes))
    options = {"config": config, "work-dir": tmp_path / "work", "out": tmp_path / "results" / "x"}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def trainer(replace_training):
    """Replace the training; returns the list of what was started."""
    return replace_training(TRAINER)


def planned_runs(question, words, *more):
    planned = plan(question, parse(question, [*words, *more]))
    return {run.about["variant"]: run for run in planned}


def located(question, words, texts):
    return [*words, "--data-root", str(texts)] if isinstance(question, Texts) else words


def records(tmp_path):
    paths = sorted((tmp_path / "results" / "x").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def block_weights(model):
    ends = tuple(f".{name}.0" for name in BLOCKS)
    blocks = [module for name, module in model.named_modules() if name.endswith(ends)]
    return [sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in blocks]


@pytest.mark.parametrize("question", OF_LANGUAGE, ids=lambda question: question.name)
def test_every_variant_is_a_run_of_its_own(question, words, texts):
    planned = planned_runs(question, located(question, words, texts))
    assert list(planned) == [variant.name for variant in question.variants]
    said = []
    for variant in question.variants:
        run = planned[variant.name]
        run.write_config()
        cfg = load_config(run.config).to_dict()
        assert {"type": "CostHook"} in cfg["custom_hooks"]
        assert variant.grown == any("schedule" in hook for hook in cfg["custom_hooks"])
        said.append(json.dumps([run.settings, run.start and run.start.name]))
        if variant.start is None:
            assert run.start is None
            model = LANGUAGE.build(cfg)
            assert run.about["parameters"] == sum(p.numel() for p in model.parameters())
        else:
            assert run.start is planned[variant.start]
            assert cfg["model"]["checkpoint"] == str(run.start.folder)
            assert not cfg["model"]["config"]
        if isinstance(question, Texts):
            assert cfg["train_dataloader"]["dataset"]["data_root"] == str(texts / variant.text)
            measured = cfg["val_dataloader"]["dataset"]["data_root"]
            assert measured == [str(texts / text) for text in question.texts]
    assert len(set(said)) == len(said)


def test_the_matched_models_weigh_and_cost_as_much(words):
    planned = planned_runs(TRANSFORMER, words)
    models = {}
    for name, run in planned.items():
        run.write_config()
        models[name] = LANGUAGE.build(load_config(run.config).to_dict())
    weights = {name: block_weights(model) for name, model in models.items()}
    costs = {name: mean_flops(model, LENGTH) for name, model in models.items()}
    matched = ("transformer", "rotary", "matched", "matched_learned")
    assert len({tuple(weights[name]) for name in matched}) == 1
    assert len({costs[name] for name in matched}) == 1
    attention = models["rotary"].model.gpt_neox.layers[0].attention
    assert attention.rotary_ndims == models["matched"].model.model.rotary_dims
    # The committed records of GPT-2's form have no key of the rotation.
    assert not {"positions", "rotary_share"} & set(
        planned["transformer"].settings["model"]["config"]
    )
    assert weights["width"] == [8 * 2 * WIDTH**2]
    assert weights["report"] == [4 * 2 * WIDTH**2]
    assert models["matched_learned"].model.model.positions is not None


def test_growth_ends_with_the_whole_model(words):
    planned = planned_runs(GROWTH, words)
    (hook,) = (h for h in planned["duplicate"].settings["custom_hooks"] if "schedule" in h)
    assert hook["init"] == "duplicate"
    assert [event["iteration"] for event in hook["schedule"]] == [10, 20, 30]
    assert hook["schedule"][-1] == {"iteration": 30, **PAIRS}
    small = planned["duplicate"].settings["model"]["config"]
    assert small == {key: count // 8 for key, count in PAIRS.items()}
    assert hook["schedule"][0] == {"iteration": 10, **{k: n // 4 for k, n in PAIRS.items()}}

    for largest, grown in (("transformer", "net2net"), ("rotary", "rotary_net2net")):
        (hook,) = (h for h in planned[grown].settings["custom_hooks"] if "schedule" in h)
        whole = planned[largest].settings["model"]["config"]["hidden_features"]
        pairs = 3 * 32 + 40 + 120
        assert whole == pairs - 2 * WIDTH
        assert [event["hidden_features"] for event in hook["schedule"]] == [
            *(whole // 4, whole // 2, whole)
        ]
    assert (planned["large_short"].length, planned["eighth_long"].length) == (24, 80)
    assert planned["large"].settings.keys() <= {"randomness"}


@pytest.mark.parametrize("question", [GROWTH, STAGES], ids=lambda question: question.name)
def test_a_dry_run_counts_sequences(question, words, capsys):
    sweep(question, [*words, "--dry-run"])
    number = len(question.variants)
    text = capsys.readouterr().out
    assert text.startswith(f"{number} of {number} runs are left: ")
    if question is GROWTH:  # 40 iterations of 4 sequences, 24 and 80
        assert f"left: {4 * (11 * 40 + 24 + 80):,} sequences, " in text
    assert "measured in 3 steps" in text


def test_schedules_end_at_one_size(words):
    for name, run in planned_runs(
        SCHEDULES, words, "--cfg-options", "train_cfg.max_iters=100"
    ).items():
        if name == "large":
            continue
        (hook,) = (h for h in run.settings["custom_hooks"] if "schedule" in h)
        number = {"g64": 20, "g128": 10}.get(name, 5)
        times = [event["iteration"] for event in hook["schedule"]]
        assert times == list(range(100 // number, 100, 100 // number))
        assert hook["schedule"][-1] == {"iteration": times[-1], **PAIRS}
        assert hook["moments"] == ("keep" if name == "g256_kept" else "reset")


def test_languages_get_pairs_of_their_own(words, texts):
    planned = planned_runs(LANGUAGES, words, "--data-root", str(texts))
    double = {key: 2 * count for key, count in PAIRS.items()}
    assert planned["first"].settings["model"]["masks"]["new"] == "newstest_en"
    planned["first"].write_config()
    cfg = load_config(planned["first"].config)
    assert cfg.model.type == "masked_lm.MaskedLM"
    assert [hook.type for hook in cfg.custom_hooks] == ["CostHook", "masked_lm.MasksHook"]
    masked, frozen, unmasked = (
        planned[f"{name}_fr"].settings["model"] for name in ("masked", "frozen", "unmasked")
    )
    for model in (masked, frozen, unmasked):
        assert {key: model["growth"][key] for key in PAIRS} == double
    assert masked["masks"]["new"] == frozen["masks"]["new"] == "newstest_fr"
    assert (masked.get("frozen_stem"), frozen["frozen_stem"]) == (None, True)
    assert unmasked.get("masks") is None
    first, second, third = (planned[n].about["parameters"] for n in ("first", *_stages("frozen")))
    assert third - second == second - first == 2 * WIDTH * (3 * 32 + 40 + 120)


def _stages(name):
    return f"{name}_fr", f"{name}_es"


def test_a_stage_waits_for_the_one_it_starts_from(tmp_path, words, texts, trainer, monkeypatch):
    words += ["--data-root", str(texts), "--variants", "masked_es"]
    sweep(LANGUAGES, [*words, "--seeds", "2", "--jobs", "2"])
    started = trainer()
    assert sorted(started) == sorted(
        f"{name}_seed{seed}" for name in ("first", "masked_fr", "masked_es") for seed in (0, 1)
    )
    for seed in (0, 1):
        order = [started.index(f"{name}_seed{seed}") for name in ("first", "masked_fr")]
        assert order == sorted(order)
    record = records(tmp_path)["masked_es_seed1"]
    assert record["settings"]["model"]["checkpoint"] == "work/masked_fr_seed1"
    # It began with other weights than a run of the other seed, and its record says so.
    assert record["base"] != records(tmp_path)["masked_es_seed0"]["base"]
    expected = {"final": {"perplexity": 8.123, "perplexity/a": 9.123}, "flops": 4e7}
    expected |= {"best": {"iteration": 40, "perplexity": 8.123, "perplexity/a": 9.123}}
    assert expected.items() <= record.items()
    assert record["validation"] == {
        "iteration": [20, 40],
        "perplexity": [9.0, 8.123],
        "perplexity/a": [10.0, 9.123],
        "flops": [2e7, 4e7],
    }
    assert "perplexity" not in record
    assert "diagnostics" not in record


def test_what_starts_from_a_failed_run_has_failed(tmp_path, words, texts, trainer, monkeypatch):
    monkeypatch.setenv("FAIL", "masked_fr")
    words += ["--data-root", str(texts), "--variants", "masked_es"]
    with pytest.raises(SystemExit, match="1"):
        sweep(LANGUAGES, words)
    assert trainer() == ["first_seed0", "masked_fr_seed0"]
    found = records(tmp_path)
    assert found["masked_fr_seed0"]["failed"] == "the loss is nan"
    assert (
        found["masked_es_seed0"]["failed"]
        == "it starts from the end of masked_fr_seed0, which failed"
    )
    monkeypatch.delenv("FAIL")
    sweep(LANGUAGES, [*words, "--retry-failed"])
    assert trainer()[2:] == ["masked_fr_seed0", "masked_es_seed0"]
    assert not any("failed" in record for record in records(tmp_path).values())


def test_a_start_of_which_only_the_record_is_left(tmp_path, words, texts, trainer):
    words += ["--data-root", str(texts)]
    sweep(CONTINUE, [*words, "--variants", "first"])
    (tmp_path / "work" / "first_seed0" / "record.json").unlink()
    with pytest.raises(SystemExit, match="1"):
        sweep(CONTINUE, [*words, "--variants", "same"])
    reason = records(tmp_path)["same_seed0"]["failed"]
    assert "delete the record of that run" in reason


def test_what_others_start_from_is_trained_here(tmp_path, words, texts, trainer, monkeypatch):
    monkeypatch.setattr("tokenformer_vit.experiments.record.environment", lambda: {"commit": "abc"})
    words += ["--data-root", str(texts)]
    out, work = (words.index(option) + 1 for option in ("--out", "--work-dir"))
    words[out] = str(tmp_path / "results" / "lm_languages_small_lm")
    sweep(LANGUAGES, [*words, "--variants", "first"])
    again, words[work] = replace(LANGUAGES, name="lm_again"), str(tmp_path / "work" / "again")
    words[out] = str(tmp_path / "results" / "lm_again_small_lm")
    sweep(again, [*words, "--variants", "first"])
    path = tmp_path / "results" / "lm_again_small_lm" / "first_seed0.json"
    assert (
        json.loads(path.read_text(encoding="utf-8"))["taken_from"]
        == "lm_languages_small_lm/first_seed0.json"
    )
    path.unlink()  # else it is known that nothing in this work directory can be started from
    sweep(again, [*words, "--variants", "masked_fr"])
    assert trainer() == ["first_seed0"]
    starts = tmp_path / "work" / "again" / "starts.txt"
    assert starts.read_text().split() == ["first_seed0", "masked_fr_seed0"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data-root", "absent"], r"there is no folder absent; make a folder of tokens"),
        (["--cfg-options", "model.checkpoint=x"], r"checkpoint is x, but an ablation trains from"),
        (["--cfg-options", "train_cfg.max_iters=1"], r"also set param_scheduler"),
        (["--cfg-options", "model.config.depht=1"], r"no 'depht'; there is depth"),
        (
            ["--cfg-options", *(f"model.config.{key}=1" for key in PAIRS)],
            r"width 32 cannot match 5 pairs .* --variants without",
        ),
    ],
)
def test_mistakes_end_before_any_training(words, trainer, extra, message):
    with pytest.raises(InputError, match=message):
        sweep(GROWTH, [*words, *extra])
    assert trainer() == []


@pytest.mark.slow
def test_from_one_end_to_the_other(tmp_path, words, texts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    words += ["--data-root", str(texts)]
    sweep(LANGUAGES, [*words, "--variants", "masked_fr", "frozen_es", "unmasked_fr"])
    found = records(tmp_path)
    names = ("first", "masked_fr", "frozen_fr", "frozen_es", "unmasked_fr")
    assert sorted(found) == sorted(f"{name}_seed0" for name in names)
    first, masked, frozen, last, unmasked = (found[f"{name}_seed0"] for name in names)
    english, french, spanish = (f"perplexity/{text}" for text in LANGUAGES.texts)
    for record in found.values():
        assert record["validation"]["iteration"] == [20, 40]
        assert record["final"].keys() == {"perplexity", english, french, spanish}
        assert record["validation"]["flops"][-1] == record["flops"] > 0
    # With the rest frozen, a language's own pairs compute what they did.
    assert frozen["final"][english] == pytest.approx(first["final"][english], abs=2e-3)
    assert last["final"][english] == frozen["final"][english]
    assert last["final"][french] == pytest.approx(frozen["final"][french], abs=2e-3)
    for record in (masked, unmasked):
        assert abs(record["final"][english] - first["final"][english]) > 0.01
    assert frozen["final"][french] < first["final"][french] - 1

    words[words.index("--out") + 1] = str(tmp_path / "results" / "continue")
    words[words.index("--work-dir") + 1] = str(tmp_path / "work_continue")
    sweep(CONTINUE, [*words, "--variants", "random", "net2net"])
    paths = (tmp_path / "results" / "continue").glob("*.json")
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    assert sorted(found) == [*("first_seed0", "net2net_seed0", "random_seed0", "transformer_seed0")]
    (grown,) = found["net2net_seed0"]["growth"]
    assert grown["iteration"] == 1
    assert found["random_seed0"]["flops"] > found["first_seed0"]["flops"]


@pytest.mark.slow
def test_stages_from_one_end_to_the_other(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    names = ("x4_duplicate_20", "x4_net2net_20", "x4_sunk_20")
    sweep(STAGES, [*words, "--variants", *names])
    found = {name.removesuffix("_seed0"): record for name, record in records(tmp_path).items()}
    assert sorted(found) == sorted((*names, "small", "reference"))
    for name, start in (("x4_duplicate_20", "small"), ("x4_net2net_20", "reference")):
        assert found[name]["iterations"] == 8
        assert found[name]["growth"][0]["iteration"] == 1
        assert found[name]["loss"]["loss"][0] < found[start]["loss"]["loss"][0] - 0.3
        assert ("diagnostics" in found[name]) == (name == "x4_duplicate_20")
    measured = found["x4_duplicate_20"]["diagnostics"]
    assert measured["iteration"] == list(range(9))
    assert measured["key_norm"][-1][0] > 1.5 * measured["key_norm"][0][0]  # it has more keys
    scratch, small = found["x4_sunk_20"]["flops"] / 8, found["small"]["flops"] / 40
    assert found["x4_duplicate_20"]["flops"] == pytest.approx(small + 7 * scratch, rel=1e-6)

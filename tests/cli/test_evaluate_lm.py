"""tools/evaluate_lm.py as a user starts it."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from tokenformer_vit import language
from tokenformer_vit.cli import evaluate_lm as tool
from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    load_language_model,
    load_tokenizer,
)
from tokenformer_vit.language import evaluation as measures
from tokenformer_vit.language.data import SplitWriter
from tokenformer_vit.language.published import TITLES

ROOT = Path(__file__).resolve().parents[2]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def run(*arguments):
    tool.main([str(argument) for argument in arguments])


def save_tokenizer(folder, more=("<|endoftext|>",)):
    vocabulary = {sign: number for number, sign in enumerate([*ALPHABET, *more])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    load_tokenizer(folder).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    config = TokenFormerConfig(
        vocab_size=257, context_length=32, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    TokenFormerForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Ein Text für das Modell, etwas länger als sein Kontext.\n" * 2)
    return path


def record(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_text_is_measured_and_kept(folder, text, capsys, monkeypatch):
    run(folder, "--text", text)
    out = folder / "evaluation"
    found, printed = record(out), capsys.readouterr().out
    values = found["texts"][str(text)]
    assert values["tokens"] == values["bytes"] - 1 == len(text.read_bytes()) - 1
    assert values["words"] == 20
    assert values["loss"] == pytest.approx(math.log(256), rel=0.1)
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
    assert printed.endswith(f"Done. In {out}: results.json, results.md, parts\n")
    assert printed.startswith((out / "results.md").read_text())
    assert f"{values['perplexity']:.3f}" in printed
    wanted = {"context": 32, "stride": 32, "batch_size": 8, "limit": None}
    assert wanted.items() <= found["settings"].items()
    assert found["dtype"] == "float32"
    assert found["n"] == 1
    assert {"command", "commit", "date", "hardware", "versions", "seed"} <= found.keys()
    model = TokenFormerForCausalLM.from_pretrained(folder)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())

    computed, measure = [], measures.measure_text

    def count(*arguments, **options):
        computed.append(options["title"])
        return measure(*arguments, **options)

    monkeypatch.setattr(measures, "measure_text", count)
    run(folder, "--text", text)
    assert computed == []
    assert "read from an earlier run" in capsys.readouterr().err
    assert record(out)["texts"] == found["texts"]
    run(folder, "--text", text, "--stride", 4)
    assert record(out)["texts"][str(text)]["loss"] != values["loss"]
    text.write_text("something else")
    run(folder, "--text", text, "--stride", 4)
    assert record(out)["texts"][str(text)]["tokens"] == 13
    TokenFormerForCausalLM(model.config).save_pretrained(folder)
    run(folder, "--text", text, "--stride", 4)
    assert len(computed) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"merges": [["e", "x"]]}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {
                    "<|endoftext|>": {"id": "e", "ids": [256], "tokens": ["<|endoftext|>"]}
                },
            }
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_tokenizer_with_other_rules_is_another_one(folder, text, change, capsys):
    save_tokenizer(folder, ("<|endoftext|>", "ex"))
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text())
    TokenFormerForCausalLM(
        TokenFormerConfig(vocab_size=258, context_length=32, embed_dim=32, depth=1, num_heads=2)
    ).save_pretrained(folder)
    run(folder, "--text", text)
    before = record(folder / "evaluation")["texts"][str(text)]
    run(folder, "--text", text)
    assert "read from an earlier run" in capsys.readouterr().err
    for name, value in change.items():
        rules[name] = {**rules[name], **value} if name == "model" else value
    file.write_text(json.dumps(rules))
    run(folder, "--text", text)
    assert "read from an earlier run" not in capsys.readouterr().err
    assert record(folder / "evaluation")["texts"][str(text)]["loss"] != before["loss"]


def test_prepared_tokens_give_what_the_text_gives(folder, text, tmp_path):
    tokens = np.array(load_tokenizer(folder)(text.read_text())["input_ids"])
    writer = SplitWriter(tmp_path, "val", 10, 257)
    writer.add([tokens[:111]])  # 11 rows exactly, on another context than the model's
    writer.close_shard()
    counts = {**writer.counts, "bytes": 222}
    meta = {"context_length": 10, "vocab_size": 257, "splits": {"val": counts}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    text.write_bytes(text.read_bytes()[:111])
    out = tmp_path / "out"
    run(folder, "--data", tmp_path, "--text", text, "--out", out, "--stride", 8)
    texts = record(out)["texts"]
    split, whole = texts[f"{tmp_path} val"], texts[str(text)]
    assert split["tokens"] == whole["tokens"] == 110
    assert split["loss"] == pytest.approx(whole["loss"])
    bytes_a_token = 222 / 111
    bits = split["loss"] / math.log(2) / bytes_a_token
    assert split["bits_per_byte"] == pytest.approx(bits)
    assert split["word_perplexity"] is None

    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    run(folder, "--data", tmp_path, "--out", out)  # tokens need no tokenizer
    assert record(out)["texts"].keys() == {f"{tmp_path} val"}


def test_tokens_of_another_tokenizer_are_refused(folder, text, tmp_path):
    language.prepare_text(
        [language.file_source(text, "file", "text", 0.0)],
        tmp_path / "data",
        language.byte_tokenizer,
        8,
        {"tokenizer": "bytes", "sources": []},
        held_out=False,
    )
    with pytest.raises(InputError, match=r"the tokenizers in .* differ: token 0 is"):
        run(folder, "--data", tmp_path / "data", "--split", "train")


def test_a_mask_is_chosen_by_its_name(folder, text, capsys):
    model = load_language_model(folder)
    masks = TokenMasks(model)
    masks.add("half", lambda _, layer: slice(layer.num_param_tokens // 2))
    masks.save(folder / "masks.safetensors")
    run(folder, "--text", text)
    assert "all pairs are used; choose a mask with --mask" in capsys.readouterr().err
    every = record(folder / "evaluation")["texts"][str(text)]["loss"]
    run(folder, "--text", text, "--mask", "half")
    assert "--mask" not in capsys.readouterr().err
    found = record(folder / "evaluation")
    assert found["settings"]["mask"] == "half"
    masks.activate("half")
    tokens = np.array(load_tokenizer(folder)(text.read_text())["input_ids"])
    predicted, nats = measures.measure_text(model, tokens, 32)
    assert found["texts"][str(text)]["loss"] == pytest.approx(nats / predicted)
    assert found["texts"][str(text)]["loss"] != pytest.approx(every, rel=1e-5)
    with pytest.raises(InputError, match=r"there is no mask 'third'; .* half"):
        run(folder, "--text", text, "--mask", "third")


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: {},
        lambda part: {**part, "values": 5},
        lambda part: {**part, "values": {}},
        lambda part: {**part, "values": {**part["values"], "loss": "x"}},
        lambda part: {**part, "values": {**part["values"], "loss": None}},
        lambda part: {**part, "values": {**part["values"], "perplexity": math.nan}},
        lambda part: "[" * 9999,
    ],
)
def test_a_damaged_part_is_measured_anew(folder, text, damage):
    run(folder, "--text", text)
    before = record(folder / "evaluation")["texts"]
    (file,) = (folder / "evaluation" / "parts").iterdir()
    damaged = damage(json.loads(file.read_text()))
    file.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    run(folder, "--text", text)
    assert record(folder / "evaluation")["texts"] == before
    assert json.loads(file.read_text())["values"] == before[str(text)]


def test_weights_that_are_not_finite_are_refused(folder, text):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.bias"][3] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.norm\.bias holds NaN"):
        run(folder, "--text", text)
    assert not (folder / "evaluation").exists()


def test_other_models_and_bfloat16(folder, text, tmp_path):
    gpt2 = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=257, n_positions=24, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(gpt2)
    run(gpt2, "--tokenizer", folder, "--text", text, "--amp")
    found = record(gpt2 / "evaluation")
    assert (found["dtype"], found["settings"]["context"]) == ("autocast bfloat16", 24)
    assert found["texts"][str(text)]["loss"] == pytest.approx(math.log(256), rel=0.05)
    run(gpt2, "--tokenizer", folder, "--text", text, "--context", 8)
    assert record(gpt2 / "evaluation")["settings"]["context"] == 8


def test_tasks_that_are_finished_are_not_asked_again(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")
    from tokenformer_vit.language import tasks

    def item(name):
        return {
            "lambada": {"text": "two words"},
            "piqa": {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
        }[name]

    for name in ("lambada", "piqa"):
        (tmp_path / tasks.TASKS[name].file).write_text(json.dumps(item(name)))
    asked, stop = [], ["piqa"]

    def answer(harness, name, items, limit, seed):
        assert (harness.max_length, len(items), limit, seed) == (32, 1, 5, 3)
        asked.append(name)
        if name in stop:
            raise KeyboardInterrupt
        return {"n": 1, "version": 1.0, "acc": 0.25, "acc_stderr": 0.125}

    monkeypatch.setattr(tasks, "run_task", answer)
    command = (folder, "--tasks", "lambada", "piqa", "--task-data", tmp_path, "--seed", 3)
    with pytest.raises(KeyboardInterrupt):
        run(*command, "--limit", 5)
    stop.clear()
    run(*command, "--limit", 5)
    assert asked == ["lambada", "piqa", "piqa"]
    found = record(folder / "evaluation")
    assert found["tasks"]["piqa"] == {"n": 1, "version": 1.0, "acc": 0.25, "acc_stderr": 0.125}
    assert found["average"] is None
    row = capsys.readouterr().out.splitlines()[2]
    assert row.count("25.0 ± 12.5") == 2
    (tmp_path / tasks.TASKS["piqa"].file).write_text(json.dumps({**item("piqa"), "goal": "b"}))
    run(*command, "--limit", 5)
    assert asked[3:] == ["piqa"]


@pytest.mark.slow
def test_all_six_tasks_on_their_real_items(folder, shared_data, capsys):
    pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")
    config = TokenFormerConfig(
        vocab_size=257, context_length=1024, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    TokenFormerForCausalLM(config).save_pretrained(folder)
    run(folder, "--tasks", "--task-data", shared_data("eval"), "--limit", 4)
    found = record(folder / "evaluation")
    assert list(found["tasks"]) == list(TITLES)
    assert all(values["n"] == 4 for values in found["tasks"].values())
    # One word among all that there are: about 256 to the power of its letters.
    assert found["tasks"]["lambada"]["perplexity"] > 1e6
    normalised = ("hellaswag", "arc_challenge")
    accuracies = [
        values["acc_norm" if name in normalised else "acc"]
        for name, values in found["tasks"].items()
    ]
    assert found["average"] == pytest.approx(np.mean(accuracies))
    assert "TokenFormer 150M" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is nothing to evaluate: give --text, --data or --tasks"),
        (("--text", "nowhere.txt"), "there is no file nowhere.txt"),
        (("--text", "empty.txt"), "empty.txt has 0 tokens"),
        (("--text", "latin.txt"), "latin.txt is not UTF-8 text"),
        (("--data", "nowhere"), "there is no folder nowhere"),
        (("--text", "good.txt", "--stride", "33"), "stride must be from 1 to 32, .* got 33"),
        (("--text", "good.txt", "--context", "33"), "--context 33 is more than the model's"),
        (("--text", "good.txt", "--tokenizer", "nowhere"), "there is no tokenizer in nowhere"),
        (("--text", "good.txt", "--tokenizer", "larger"), "has 300 entries, .* vocab_size is 257"),
        (("--tasks", "piqa", "--task-data", "nowhere"), "there is no file nowhere/piqa_val.jsonl"),
        (("--tasks", "lambada", "--task-data", "."), r"lambada_.*, line 1: .*recursion"),
        (("--tasks", "hellaswag", "--task-data", "."), "hellaswag_.*, line 1: .*unicode"),
        (("--data", "."), r"\. has no meta\.json"),
        (
            ("--tasks", "piqa", "--task-data", ".", "--tokenizer", "endless"),
            "the tokenizer has no token that begins or ends a text",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(folder, tmp_path, monkeypatch, arguments, message):
    if "--tasks" in arguments:
        pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("good.txt").write_text("good")
    save_tokenizer(Path("larger"), [str(number) * 2 for number in range(10, 54)])
    save_tokenizer(Path("endless"), [])
    Path("piqa_val.jsonl").write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 1}')
    Path("lambada_openai_test.jsonl").write_text('{"text": ' + "[" * 30_000)
    Path("hellaswag_val.jsonl").write_bytes(b'{"query": "\xff"}')
    with pytest.raises(InputError, match=message) as caught:
        run(folder, *arguments)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(folder, text, tmp_path, monkeypatch, capsys):
    with pytest.raises(InputError, match=r"there is no .*nowhere/config.json"):
        run(tmp_path / "nowhere", "--text", text)
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(InputError, match="holds no readable model"):
        run(folder, "--text", text)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tokenformer_vit.language.tasks", raising=False)
    with pytest.raises(SystemExit, match="1"):
        run_tool(lambda: run(folder, "--tasks", "piqa"))
    assert "in the clone, run pip install '.[evaluation]'" in capsys.readouterr().err


def test_a_task_that_is_none_is_refused_with_those_that_are(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(folder, "--tasks", "piqua")
    assert "invalid choice: 'piqua'" in capsys.readouterr().err
    assert list(tool.TASKS) == list(TITLES)


def test_the_command_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate_lm.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(str(ROOT / "tools" / "evaluate_lm.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith("error: there is nothing to evaluate")

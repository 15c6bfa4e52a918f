"""tools/generate.py as a user starts it."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tokenformer_vit.cli import generate as command
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks, count_pairs
from tokenformer_vit.language import (
    TerminalStreamer,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    generate_text,
    load_language_model,
    load_tokenizer,
    save_language_model,
    transformer_lm,
)

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["<|endoftext|>", "?", *(f"w{number}" for number in range(31))]


def run(*arguments):
    command.main([str(argument) for argument in arguments])


def words(count):
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(WORDS[:count])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def does_not_end_at_once(model):
    """Keep a model of random weights from ending a text before its first word."""
    with torch.no_grad():
        model.get_output_embeddings().weight[WORDS.index("<|endoftext|>")] = 0


@pytest.fixture
def folder(tmp_path):
    config = TokenFormerConfig(
        vocab_size=32, context_length=20, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    folder = tmp_path / "run"
    model = TokenFormerForCausalLM(config)
    does_not_end_at_once(model)
    model.save_pretrained(folder)
    words(32).save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(tmp_path / "tokenizer.json").save_pretrained(folder)
    return folder


def test_prompts_are_continued(folder, tmp_path, capsys, monkeypatch):
    def written(*arguments):
        run(*arguments)
        return capsys.readouterr().out

    greedy = written(folder, "w1 w2", "w3", "--greedy", "--max-new-tokens", 6)
    first, second = greedy.strip().split("\n\n")
    assert first.startswith("w1 w2 ")
    assert second.startswith("w3 ")  # its weights are random, so an unknown word may follow
    assert len(first.split()) <= 8
    assert greedy == written(folder, "w1 w2", "w3", "--greedy", "--max-new-tokens", 6)

    how = ("--temperature", 2, "--top-k", 20, "--top-p", 0.95, "--seed")
    drawn = {written(folder, "w1 w2", *how, seed) for seed in (1, 2, 3)}
    assert len(drawn) > 1
    assert written(folder, "w1 w2", *how, 2) in drawn

    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n\nw3\n"))
    arguments = ("--greedy", "--max-new-tokens", 6, "--tokenizer", tmp_path / "tokenizer.json")
    assert written(folder, *arguments) == greedy


def test_it_stops_where_the_context_ends(folder, capsys):
    run(folder, "w1 " * 17, "--max-new-tokens", 50, "--seed", 4)
    assert 17 <= len(capsys.readouterr().out.split()) <= 20


def break_file(name, content):
    def change(folder):
        (folder / name).write_bytes(content)

    return change


def drop(*names):
    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def other_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_ffn_param_tokens": 100}))


def deeper(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "depth": 2}))


def config_says(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def weights_are(change_tensors):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def in_shards(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        part = {name: tensors[name] for name in tensors if places[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": {**places, **changes}})
    (folder / "model.safetensors.index.json").write_text(index)


def shard_of_nan(folder):
    weights_are(lambda tensors: tensors[KEYS].fill_(torch.nan))(folder)
    in_shards(folder)


KEYS = "model.blocks.0.mlp.key_param_tokens"
TAU, EMBEDDING = "model.blocks.0.mlp.tau", "model.embedding.weight"


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, ("w1 " * 20,), "has 20 tokens, but the model's context is 20: shorten"),
        (None, ("",), "a prompt is empty"),
        (None, ("w1", "--temperature", 0), "at least 1e-06, but got 0.0; .* greedy"),
        (None, ("w1", "--temperature", "1e-300"), "at least 1e-06, but got 1e-300; .* greedy"),
        (None, ("w1", "--temperature", "nan"), "at least 1e-06, but got nan"),
        (None, ("caf\udce9",), "a prompt is not UTF-8 text"),
        (None, ("w1 " * 2_000_000,), "a prompt of 6000000 characters .* 20 tokens: shorten"),
        (config_says(num_heads=0), ("w1",), r"config\.json cannot be used: num_heads is 0"),
        (config_says(vocab_size=0), ("w1",), "vocab_size is 0"),
        (config_says(embed_dim=33), ("w1",), "holds no readable model: .* 33"),
        (config_says(depth=10**9), ("w1",), "has 1000000000 layers, but there are only .* tensors"),
        (config_says(num_ffn_param_tokens=10**9), ("w1",), r"\(1000000000, 32\) by config\.json"),
        (config_says(num_labels=10**9), ("w1",), "num_labels is 1000000000"),
        (config_says(pattention_args={"eps": "x"}), ("w1",), r"pattention_args\.eps is 'x'"),
        (config_says(attn_implementation="a/b"), ("w1",), "'a/b'.* remove attn_implementation"),
        (config_says(dtype="float7"), ("w1",), "cannot be used|holds no readable model"),
        (break_file("config.json", b"[" * 30_000), ("w1",), "is not a readable configuration"),
        (break_file("generation_config.json", b"[1"), ("w1",), "holds no readable model"),
        (break_file("tokenizer_config.json", b"\xff"), ("w1",), "holds no readable tokenizer"),
        (weights_are(lambda t: t[KEYS].fill_(torch.nan)), ("w1",), f"{KEYS} holds NaN"),
        (weights_are(lambda t: t.update({KEYS: t[KEYS].int()})), ("w1",), "is of type int32"),
        (
            weights_are(lambda t: t[TAU].neg_()),
            ("w1",),
            r"mlp\.tau is -11\.31.*, but τ must be one positive number",
        ),
        (weights_are(lambda t: t[EMBEDDING].mul_(1e38)), ("w1",), "output is not finite"),
        (shard_of_nan, ("w1",), f"{KEYS} holds NaN"),
        (lambda folder: in_shards(folder, x="../a"), ("w1",), r"weight_map\.x is '\.\./a'"),
        (
            lambda folder: in_shards(folder, x="b"),
            ("w1",),
            r"there is no .*/b, which .*index\.json",
        ),
        (None, ("w1", "--top-p", 1.5), "top_p must be above 0"),
        (None, ("w1", "--tokenizer", "nowhere"), "there is no tokenizer in nowhere"),
        (drop("tokenizer.json", "tokenizer_config.json"), ("w1",), "there is no tokenizer in"),
        (break_file("tokenizer.json", b"{}"), ("w1",), "holds no readable tokenizer"),
        (drop("model.safetensors"), ("w1",), "holds no readable model: .*model.safetensors"),
        (drop("config.json"), ("w1",), "there is no .*config.json"),
        (break_file("config.json", b'{"a"'), ("w1",), "is not a readable configuration"),
        (break_file("config.json", b'{"model_type": "bert"}'), ("w1",), "of type 'bert'"),
        (truncate, ("w1",), "holds no readable model"),
        (
            other_shape,
            ("w1",),
            r"is \(128, 32\) in the file, but \(100, 32\) by config\.json",
        ),
        (
            deeper,
            ("w1",),
            "do not fit its config.json: .* is missing.* and 12 more",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(folder, monkeypatch, change, arguments, message):
    monkeypatch.chdir(folder.parent)
    if change:
        change(folder)
    with pytest.raises(InputError, match=message) as caught:
        run(folder, *arguments)
    assert "\n" not in str(caught.value)


EVIL = "open('code_ran', 'w').close()\n"


def model_with_code(folder):
    (folder / "evil.py").write_text(EVIL)
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config_says(model_type="evil", auto_map=classes)(folder)


def tokenizer_with_code(folder):
    (folder / "evil.py").write_text(EVIL)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "load"),
    [
        (model_with_code, lambda folder: load_language_model(folder, ("tokenformer", "evil"))),
        (model_with_code, lambda folder: load_language_model(folder, None)),
        (tokenizer_with_code, load_tokenizer),
    ],
)
def test_code_of_a_folder_is_never_run(folder, tmp_path, monkeypatch, change, load):
    change(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    with pytest.raises(
        InputError, match=r"custom code .*; code in a folder is never run"
    ) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "code_ran").exists()
    assert sys.stdin.read() == "y\n" * 20  # and nobody was asked


def test_a_model_in_shards_is_the_same_model(folder, capsys):
    how = ("w1 w2", "--greedy", "--max-new-tokens", 6)
    run(folder, *how)
    in_shards(folder)
    whole = capsys.readouterr().out
    run(folder, *how)
    assert capsys.readouterr().out == whole


def test_another_file_that_a_configuration_names_is_not_read(folder, capsys):
    run(folder, "w1", "--greedy")
    expected = capsys.readouterr().out
    tensors = {n: t + 1 for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "other.safetensors", {"format": "pt"})
    config_says(transformers_weights="other.safetensors")(folder)
    run(folder, "w1", "--greedy")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("fields", [{"repetition_penalty": "x"}, {"num_beams": 10**9}])
def test_what_is_asked_for_is_done_whatever_generation_config_says(folder, capsys, fields):
    run(folder, "w1", "--greedy")
    expected = capsys.readouterr().out
    (folder / "generation_config.json").write_text(json.dumps(fields))
    run(folder, "w1", "--greedy")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [("café\n".encode("latin-1"), "stdin is not utf-8 text"), (b"", "there is no prompt")],
)
def test_stdin_that_is_no_prompt_is_said(folder, monkeypatch, content, message):
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InputError, match=message):
        run(folder)


@pytest.mark.parametrize("seed", [2**64, -1, "9" * 5000])
def test_a_seed_that_is_none_is_said(folder, capsys, seed):
    with pytest.raises(SystemExit, match="2"):
        run(folder, "w1", f"--seed={seed}")
    assert "is not a whole number of at least 0" in capsys.readouterr().err
    run(folder, "w1", "--seed", 2**64 - 1, "--top-k", 10**18)


@pytest.mark.parametrize("terminal", [True, False])
def test_text_does_not_control_a_terminal(monkeypatch, terminal):
    tokenizer, stdout = byte_tokenizer(), io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    streamer = TerminalStreamer(tokenizer)
    text = "é\t\x1b[2J 文\n"
    streamer.put(torch.tensor([list(text.encode())]))
    streamer.end()
    assert stdout.getvalue() == (text.replace("\x1b", r"\x1b") if terminal else text) + "\n"


def test_a_mask_is_chosen_by_its_name(folder, capsys):
    model = load_language_model(folder)
    masks = TokenMasks(model)
    masks.add("half", {n: slice(count // 2) for n, count in count_pairs(model).items()})
    torch.save(masks.pairs, folder / "masks.pt")
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 6)
    assert "all pairs are used; choose a mask with --mask" in capsys.readouterr().err
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 6, "--mask", "half")
    printed = capsys.readouterr()
    assert not printed.err
    masks.activate("half")
    words = generate_text(model, load_tokenizer(folder), "w1 w2", 6, greedy=True)
    assert printed.out.split() == ["w1", "w2", *words.split()]
    (folder / "masks.pt").unlink()
    with pytest.raises(InputError, match=r"has no masks \(masks\.pt\), .* 'half'"):
        run(folder, "w1", "--mask", "half")


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_plain_transformer_continues_prompts_too(positions, folder, capsys):
    model = transformer_lm(32, 20, 16, 1, 2, positions=positions)
    does_not_end_at_once(model)
    save_language_model(model, folder)
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 3)
    assert capsys.readouterr().out.startswith("w1 w2 ")


def test_the_masks_in_old_files_of_gpt2_are_no_damage(folder):
    save_language_model(transformer_lm(32, 20, 16, 1, 2), folder)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.uint8)
    weights_are(lambda tensors: tensors.update({"transformer.h.0.attn.bias": mask}))(folder)
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 3)


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    words(33).save(str(tmp_path / "other.json"))
    with pytest.raises(
        InputError, match=r"has 33 entries, .* vocab_size is 32: give the tokenizer"
    ):
        run(folder, "w1", "--tokenizer", tmp_path / "other.json")


def test_the_command_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path), "Hello"])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(str(ROOT / "tools" / "generate.py"), run_name="__main__")
    assert capsys.readouterr().err == (
        f"error: there is no {tmp_path}/config.json; give a folder that save_pretrained wrote\n"
    )

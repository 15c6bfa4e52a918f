"""Every link, file, command, option and key of configs that a page names exists."""

import ast
import contextlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

import tokenformer_vit
from tokenformer_vit import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("ablations", "examples", "tokenformer_vit", "tools")
FOLDERS = (*SOURCES, "configs", "tests", ".github")
PAGES = [*ROOT.glob("*.md"), *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FILE = re.compile(rf"(?<![\w/.-])(?:[\w*][\w*./-]*\.(?:py|md)\b|(?:{'|'.join(FOLDERS)})/[\w*./-]*)")
CALL = re.compile(r"(tokenformer[-_]vit |tools/|ablations/|^--)([a-z][\w-]*).*")
KEY = re.compile(r"(?<![\w.-])[a-z]\w*\.(?:\w+\.)*(\w+)=")
MADE = ("path/to/", "work_dirs/", "data/", "build/", "my_", "photos", "NAME")  # by users


def code(text):
    """All code of a page: each line of a block, and each span."""
    spans = re.findall("`([^`]+)`", FENCE.sub("", text))
    blocks = "\n".join(FENCE.findall(text)).replace("\\\n", " ").splitlines()
    return [each.partition(" #")[0] for each in blocks] + [" ".join(each.split()) for each in spans]


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@cache
def options(command):
    """The options of a command; of "", those of all commands and scripts."""
    if not command:
        files = [
            file.read_text("utf-8") for each in SOURCES for file in ROOT.glob(f"{each}/**/*.py")
        ]
        return set(re.findall(r'"(--[\w-]+)"', "".join(files))).union(*map(options, cli.COMMANDS))
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return set(re.findall(r"--[\w-]+", told.getvalue()))


@cache
def keys():
    """Keys of configs, and arguments and words of the code that reads configs."""
    folders = ("configs", "tokenformer_vit/training")
    files = [file for each in folders for file in ROOT.glob(f"{each}/**/*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    words = {each.value for each in nodes if isinstance(each, ast.Constant)}
    return words | {each.arg for each in nodes if isinstance(each, ast.arg | ast.keyword)}


def wrong_names(page):
    """Yield what a page names and nobody finds."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", FENCE.sub("", text)):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            yield target
    for name in FILE.findall("\n".join(code(text))):
        places = [
            place.glob(name.rstrip("./")) for place in (ROOT, page.parent, ROOT / "tokenformer_vit")
        ]
        places += [(ROOT / each).rglob(name) for each in FOLDERS if "/" not in name]
        if not name.startswith(MADE) and not any(map(any, places)):
            yield name
    yield from set(KEY.findall("\n".join(code(text)))) - keys()
    for call in filter(None, map(CALL.search, code(text))):
        ours = "tokenformer" in call[1] or call[2] in ("train", "test")
        if ours and call[2] not in cli.COMMANDS:
            yield call[0]
        elif call[2] not in ("lm-eval", "timm"):
            given = re.findall(r"(?<![\w-])--[a-z][\w-]*", call[0])
            yield from set(given) - options(call[2] if ours else "")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_exists(page):
    assert not list(wrong_names(page))


def test_what_is_wrong_is_found(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "# A heading\n[right](#a-heading) [wrong](#another) `configs/digits_demo.py`, `no.py`"
        "`model.masks=dict(new=1)` `model.config.depth=3`"
        "`configs/no.py`, `--resume`, `--resum`, `tokenformer-vit trane`\n```sh\n"
        "torchrun --nproc_per_node=8 tools/train.py x.py --amp \\\n --batchsize=8 # --no\n```\n"
    )
    wrong = {
        "#another",
        "no.py",
        "configs/no.py",
        "--resum",
        "masks",
        "tokenformer-vit trane",
        "--batchsize",
        "x.py",
    }
    assert set(wrong_names(page)) == wrong


def test_the_front_page_names_every_command_and_the_citation_this_version():
    front = (ROOT / "README.md").read_text("utf-8")
    assert not [name for name in cli.COMMANDS if f"`{name}`" not in front]
    assert f"\nversion: {tokenformer_vit.__version__}\n" in (ROOT / "CITATION.cff").read_text()

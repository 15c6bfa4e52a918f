"""Every link, file, module, command and option that a page names exists; `make lint` runs this."""

import contextlib
import io
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import tokenformer_vit
from tokenformer_vit import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("ablations", "examples", "tokenformer_vit", "tools")
FOLDERS = (*SOURCES, "configs", "tests", ".github")
PAGES = [
    *ROOT.glob("[CRS]*.md"),
    *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md")),
]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FILE = re.compile(rf"(?<![\w/.-])(?:[\w*][\w*./-]*\.(?:py|md)\b|(?:{'|'.join(FOLDERS)})/[\w*./-]*)")
MADE = (
    "path/to/",
    "work_dirs/",
    "data/",
    "build/",
    "my_",
    "photos",
    "QUESTION_",
    "NAME",
)  # by users


def code(text):
    """All code of a page: each line of a block, and each span."""
    blocks = "\n".join(FENCE.findall(text)).replace("\\\n", " ").splitlines()
    return blocks + [
        " ".join(span.split()) for span in re.findall("`([^`]+)`", FENCE.sub("", text))
    ]


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@cache
def options(command):
    """The options of a command; of "", those of all commands and scripts."""
    if not command:
        files = [file for each in SOURCES for file in (ROOT / each).rglob("*.py")]
        written = re.findall(r'"(--[\w-]+)"', "".join(file.read_text("utf-8") for file in files))
        return set(written).union(*map(options, cli.COMMANDS))
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return set(re.findall(r"--[\w-]+", told.getvalue()))


def is_missing(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return True
    return False


def wrong_names(page):
    """Yield what a page names and nobody finds."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", FENCE.sub("", text)):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            yield target
    for name in FILE.findall("\n".join(code(text))):
        near = (ROOT, page.parent, ROOT / "tokenformer_vit") if "/" in name else (ROOT,)
        found = [any(place.glob(name.rstrip("./"))) for place in near]
        if "/" not in name:
            found += [any((ROOT / each).rglob(name)) for each in FOLDERS]
        if not name.startswith(MADE) and not any(found):
            yield name
    modules = re.findall(r"(?<![\w/.-])tokenformer_vit(?:\.[A-Za-z_]\w*)+", text)
    for module, names in re.findall(r"from (tokenformer_vit[\w.]*) import ([\w, ]+)", text):
        modules += [f"{module}.{name.strip()}" for name in names.split(",")]
    yield from filter(is_missing, modules)
    for line in code(text):
        call = re.search(r"(tokenformer[-_]vit |tools/|ablations/|^--)([a-z][\w-]*)(.*)", line)
        if not call or call[2] in ("lm-eval", "timm"):
            continue
        ours = "tokenformer" in call[1] or call[2] in ("train", "test")
        if ours and call[2] not in cli.COMMANDS:
            yield f"{call[1]}{call[2]}"
        else:
            given = re.findall(r"(?<![\w-])--[a-z][\w-]*", f"{call[0]}".partition(" #")[0])
            yield from set(given) - options(call[2] if ours else "")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    yield from set(re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(code(text)))) - {*targets}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_exists(page):
    assert not list(wrong_names(page))


def test_what_is_wrong_is_found(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("""# A heading
[right](#a-heading) [wrong](#another) [wrong too](nowhere.md)
`configs/digits_demo.py`, `configs/no_such.py`, `nowhere.py`, `tokenformer_vit.growth.shrink`
`tokenformer-vit train CONFIG --resume`, `tokenformer-vit trane`, `--resume`, `--resum`, `make domo`
```sh
torchrun --nproc_per_node=8 tools/train.py configs/digits_demo.py --launcher pytorch \\
    --batchsize=128  # --no-option
```
```python
from tokenformer_vit.growth import grow, grew
```
""")
    assert set(wrong_names(page)) == {
        *("#another", "nowhere.md", "configs/no_such.py", "nowhere.py", "domo", "--resum"),
        *("tokenformer_vit.growth.shrink", "tokenformer_vit.growth.grew", "--batchsize"),
        "tokenformer-vit trane",
    }


def test_the_front_page_names_every_command_and_the_citation_this_version():
    front = (ROOT / "README.md").read_text("utf-8")
    assert not [name for name in cli.COMMANDS if f"`{name}`" not in front]
    assert f"\nversion: {tokenformer_vit.__version__}\n" in (ROOT / "CITATION.cff").read_text()

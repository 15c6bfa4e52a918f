"""Every file, module, command and option that a page names exists. `make lint` runs this file."""

import ast
import contextlib
import io
import re
import runpy
import shlex
import signal
from functools import cache
from pathlib import Path

import pytest

import tokenformer_vit
from tokenformer_vit.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tokenformer_vit"
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS = ("ablations", "configs", "examples", "tests", "tokenformer_vit", "tools")
PAGES = sorted(
    [ROOT / name for name in NAMES]
    + list((ROOT / ".github").rglob("*.md"))
    + [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
)
PASS_ON = ("lm-eval", "timm")  # commands whose options are those of another program
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)


def prose(page):
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page, *languages):
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [body for _, language, body in found if language in languages]


def code(page):
    """All code of a page: a string for each span and for each line of a block."""
    spans = [" ".join(span.split()) for _, span in SPAN.findall(prose(page))]
    lines = [block.replace("\\\n", " ").splitlines() for block in blocks(page, "sh", "bash", "")]
    return spans + [line for block in lines for line in block]


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    return sections(page).keys()


def sections(page):
    """The text below each heading of a page, up to the next heading, by anchor."""
    _, *parts = re.split(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    names = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in parts[::2])
    return {name.replace(" ", "-"): text for name, text in zip(names, parts[1::2], strict=True)}


@cache
def definitions(module):
    """The names that a module's file binds, or None if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return None
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


def resolves(name):
    """Whether a dotted name is a module of the package, or something in one."""
    module, _, rest = name.partition(".")
    while rest:
        word, _, rest = rest.partition(".")
        if definitions(f"{module}.{word}") is None:
            return word in (definitions(module) or ())
        module = f"{module}.{word}"
    return True


def file_exists(page, name):
    """Whether a name on a page is a file in the root, the page's folder or the package."""
    if "/" not in name:
        return any(ROOT.glob(name)) or any(next((ROOT / f).rglob(name), None) for f in FOLDERS)
    pattern = name.removeprefix("./")
    return any(next(folder.glob(pattern), None) for folder in (ROOT, page.parent, PACKAGE))


@cache
def options(script):
    """The options of a command, or of a script in the repository, from its ``--help``."""
    handler = signal.getsignal(signal.SIGINT)
    found = set()
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        is_command = script.startswith("tokenformer-vit ")
        patch.setattr("sys.argv", [*(script.split() if is_command else [script]), "--help"])
        script = "tokenformer_vit/__main__.py" if is_command else script
        patch.syspath_prepend(str((ROOT / script).parent))
        patch.setattr("logging.raiseExceptions", True)
        with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    found.update(re.findall(r"--[\w-]+", told.getvalue().partition("\n\n")[0]))
    signal.signal(signal.SIGINT, handler)
    return found


def called(line):
    """Our command or script that a shell line runs, with its options; or None."""
    words = shlex.split(line, comments=True)
    for number, word in enumerate(words):
        if word == "tokenformer-vit" and words[number + 1 :]:
            name = words[number + 1]
            if not name[0].islower():  # an option, a placeholder, or a clone's folder
                return None
            if name not in COMMANDS:
                return f"tokenformer-vit {name}", None
            if name in PASS_ON:
                return None
            word, number = f"tokenformer-vit {name}", number + 1
        is_script = word.startswith(("ablations/", "examples/", "tools/")) and word.endswith(".py")
        if is_script or word.startswith("tokenformer-vit "):
            after = words[number + 1 :]
            if "|" in after:
                after = after[: after.index("|")]
            return word, {each.partition("=")[0] for each in after if each.startswith("--")}
    return None


def broken_links(page):
    """Links to files or headings that do not exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        foreign = target.startswith(("http:", "https:", "mailto:"))
        if not foreign and (not there.exists() or (anchor and anchor not in anchors(there))):
            yield target


def missing_files(page):
    """Files of the repository that do not exist; what a run or a user makes is not looked for."""
    made = ("path/to/", "work_dirs/", "data/", "build/", "my_", "photos", "QUESTION_")
    folder = rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w*./-]*"
    for text in code(page):
        for name in re.findall(rf"[\w*][\w*./-]*\.(?:py|md)\b|{folder}", text):
            if not name.startswith(made) and not file_exists(page, name.rstrip("./")):
                yield name


def missing_modules(page):
    """Dotted names of the package that do not exist, in text and in imports."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"(?<![\w/.-])tokenformer_vit(?:\.[A-Za-z_]\w*)+", text)
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    return (name for name in names if not resolves(name))


def wrong_commands(page):
    """Commands of ours that do not exist, and options that a command does not have."""
    for line in code(page):
        call = called(line) if re.search(r"tokenformer-vit |\.py", line) else None
        if call is None:
            continue
        script, given = call
        if given is None:
            yield script
        elif given and (script.startswith("tokenformer-vit ") or (ROOT / script).is_file()):
            yield from (f"{script} {option}" for option in given - options(script))


def unknown_options(page):
    """Options named without a command that no command has."""
    spans = (span for _, span in SPAN.findall(prose(page)))
    named = {span.split()[0].partition("=")[0] for span in spans if span.startswith("--")}
    if not named:
        return set()
    scripts = [f"tokenformer-vit {name}" for name in COMMANDS if name not in PASS_ON]
    return named.difference(*map(options, [*scripts, "ablations/softmax.py"]))


def unknown_targets(page):
    """Targets of make, sessions of nox and extras of pip that do not exist."""
    text = "\n".join(code(page))
    extras = re.findall(r"(?:pip install (?:-e )?'?|tokenformer-vit)\.?\[([\w,]+)\]", text)
    for file, defined, named in (
        ("Makefile", r"^([\w-]+):", re.findall(r"\bmake ([a-z][\w-]*)", text)),
        ("noxfile.py", r"^def (\w+)\(session", re.findall(r"\bnox -s ([a-z]+)", text)),
        ("setup.py", r'^ {8}"(\w+)": ', ",".join(extras).split(",") if extras else []),
    ):
        source = (ROOT / file).read_text(encoding="utf-8")
        yield from set(named) - set(re.findall(defined, source, re.MULTILINE))


CHECKS = (
    broken_links,
    missing_files,
    missing_modules,
    wrong_commands,
    unknown_options,
    unknown_targets,
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_exists(page, check):
    assert not list(check(page))


def test_each_check_finds_what_is_wrong(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        """
# A heading
[right](#a-heading) [wrong](#another) [wrong too](nowhere.md)
`configs/digits_demo.py`, `configs/no_such.py`, `ablations/soft*.py`, `nowhere/at_all.py`
`tokenformer_vit.growth.grow`, `tokenformer_vit.growth.shrink`
`tokenformer-vit train CONFIG --resume`, `tokenformer-vit trane`, `--resume`, `--resum`
`make demo`, `make domo`, `nox -s floor-3.11`, `nox -s flour`, `pip install -e '.[dev,div]'`
```sh
torchrun --nproc_per_node=8 tools/train.py configs/digits_demo.py --launcher pytorch \\
    --batchsize=128 | tee --append log   # --no-option
```
```python
from tokenformer_vit.growth import grow, grew
```
""",
        encoding="utf-8",
    )
    assert [set(check(page)) for check in CHECKS] == [
        {"#another", "nowhere.md"},
        {"configs/no_such.py", "nowhere/at_all.py"},
        {"tokenformer_vit.growth.shrink", "tokenformer_vit.growth.grew"},
        {"tokenformer-vit trane", "tools/train.py --batchsize"},
        {"--resum"},
        {"domo", "flour", "div"},
    ]


def test_the_figures_of_the_claims_are_in_their_tables():
    page = ROOT / "ablations" / "README.md"
    rows = re.findall(r"^\|.+\|$", sections(page)["what-we-know-about-tokenformers"], re.MULTILINE)
    checked = 0
    for row in rows[2:]:
        _, claim, _, found, _, record, _ = (cell.strip() for cell in row.split("|"))
        links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", record)]
        pages = [(page.parent / name, anchor) for name, _, anchor in links if anchor]
        there = "".join(sections(other)[anchor] for other, anchor in pages)
        figures = re.findall(r"\d+\.\d+", found)
        assert [figure for figure in figures if figure not in there] == [], claim
        checked += len(figures)
    assert checked > 20


def test_the_figures_of_the_front_page_are_in_their_tables():
    rows = re.findall(r"^\|.+TABLES\.md#(\S+)\)\) (\|.+)$", prose(ROOT / "README.md"), re.MULTILINE)
    tables = sections(ROOT / "ablations" / "TABLES.md")
    for anchor, results in rows:
        figures = re.findall(r"\d+\.\d+", results)
        assert [figure for figure in figures if figure not in tables[anchor]] == [], anchor
    assert len(rows) == 5


def test_the_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {tokenformer_vit.__version__}\n" in citation


def test_the_front_page_is_short_and_names_every_command():
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert front.count("\n") < 150
    for command in ("git clone REPOSITORY tokenformer-vit && cd", "make demo", "make test"):
        assert command in front
    assert not [name for name in COMMANDS if f"`{name}`" not in front]

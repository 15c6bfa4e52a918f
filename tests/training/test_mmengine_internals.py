"""The installed mmengine and mmpretrain have the private names that the package uses."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import mmengine
import mmpretrain
import pytest
import torch
from mmengine.optim import LinearLR, OptimWrapper

import tokenformer_vit
from tokenformer_vit.training import mmengine_internals
from tokenformer_vit.training.mmengine_internals import (
    INTERNALS,
    accumulation,
    base_files,
    checkpoint_schemes,
    set_last_values,
)

VERSIONS = f"mmengine {mmengine.__version__}, mmpretrain {mmpretrain.__version__}"
# Of other libraries: PyTorch's compiled call, a named tuple's methods, os._exit.
NOT_THEIRS = {"_asdict", "_compiled_call_impl", "_exit", "_make", "_replace"}
# PyTorch's operators on many tensors, and the part of Adam that makes the state.
NOT_THEIRS |= {"_foreach_add_", "_foreach_copy_", "_foreach_lerp_", "_foreach_sub_"}
NOT_THEIRS |= {"_fused_adamw_", "_init_group"}
NOT_THEIRS |= {"_iterator", "_pos_embed"}  # of PyTorch's DataLoader, and of timm's ViT


@pytest.mark.parametrize("each", INTERNALS, ids=lambda each: f"{each.owner.__name__}.{each.name}")
def test_the_installed_version_has_it(each):
    where = f"{each.owner.__name__}.{each.name} of {VERSIONS}, needed because: {each.why}"
    if each.parameters is not None:
        method = inspect.getattr_static(each.owner, each.name, None)
        assert method is not None, f"there is no {where}"
        method = getattr(method, "__func__", method)
        assert tuple(inspect.signature(method).parameters) == each.parameters, where
    else:
        source = inspect.getsource(each.owner)
        assignment = rf"(self\.|cls\.|^    ){each.name}(: [^=]+)? (=|\+=) "
        assert re.search(assignment, source, re.MULTILINE), f"nothing sets {where}"


def test_every_private_name_in_use_is_listed():
    """An attribute `other._name` is of this package, of INTERNALS, or of another library."""
    folder = Path(tokenformer_vit.__file__).parent
    own, used = set(NOT_THEIRS), {}
    parts = ("training", "experiments", "cli")  # OpenMMLab appears nowhere else
    for file in (file for part in parts for file in (folder / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if isinstance(node.ctx, ast.Store) and of_self:
                    own.add(node.attr)
                used[node.attr] = file.relative_to(folder)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    own |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    theirs = {name: str(file) for name, file in used.items() if name not in own}
    listed = {each.name for each in INTERNALS}
    assert not {name: file for name, file in theirs.items() if name not in listed}
    here = Path(mmengine_internals.__file__).name
    through = {name for name, file in theirs.items() if Path(file).name == here}
    assert {"_resume", "_accumulative_counts", "_schemes", "_get_base_files"} <= through


def wrapper(accumulative_counts=1):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    return OptimWrapper(optimizer, accumulative_counts=accumulative_counts)


def test_batches_of_a_step():
    assert accumulation(SimpleNamespace(optim_wrapper=wrapper(3))) == 3


def test_the_present_rates_of_a_schedule():
    scheduler = LinearLR(wrapper(), start_factor=0.1, end=4, by_epoch=False)
    set_last_values(scheduler, [0.25])
    assert scheduler.get_last_value() == [0.25]


def test_files_that_a_config_inherits_from(tmp_path):
    (tmp_path / "own.py").write_text("_base_ = ['a.py', 'b.yaml']\n")
    assert base_files(str(tmp_path / "own.py")) == ["a.py", "b.yaml"]


def test_prefixes_of_checkpoints():
    assert {"", "http://", "https://", "open-mmlab://"} <= checkpoint_schemes().keys()

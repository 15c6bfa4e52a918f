"""Records name what is installed."""

import timm

from tokenformer_vit.records import environment


def test_environment_leaves_out_what_is_not_installed():
    versions = environment(("torch", "timm", "no_such_package"))["versions"]
    assert versions.keys() == {"python", "torch", "timm"}
    assert versions["timm"] == timm.__version__


def test_environment_where_python_does_not_know_what_distributions_contain(monkeypatch):
    monkeypatch.setattr("tokenformer_vit.records.packages_distributions", dict)
    versions = environment(("timm", "no_such_package"))["versions"]
    assert versions == {"python": versions["python"], "timm": timm.__version__}

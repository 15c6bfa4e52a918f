from importlib.util import find_spec

# Without `pip install '.[language]'` there is nothing to test.
collect_ignore_glob = [] if find_spec("transformers") and find_spec("datasets") else ["test_*.py"]

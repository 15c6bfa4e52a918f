"""Render ablations/TABLES.md, the charts, and the tables of all READMEs from records.

python ablations/tables.py           writes them
python ablations/tables.py --check   fails if one of them is out of date
"""

from importlib import import_module

from tokenformer_vit.cli import run
from tokenformer_vit.experiments import Question
from tokenformer_vit.experiments.tables import main

NAMES = (
    *("softmax", "layernorm", "gelu", "tau", "key_scale", "eps", "pairs", "recipes"),
    *("budget", "growth", "stages", "nested", "mae", "tuning"),
    *("lm_transformer", "lm_growth", "lm_stages", "growth_start"),
    *("lm_schedules", "lm_continue", "lm_languages"),
)
QUESTIONS: list[Question] = [import_module(name).QUESTION for name in NAMES]

if __name__ == "__main__":
    run(lambda _: main(QUESTIONS))

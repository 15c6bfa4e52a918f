"""The six zero-shot tasks of the paper on local files, by lm-evaluation-harness.

Prompts, answers and metrics are the harness's own. All its other tasks run by
``tokenformer-vit lm-eval``, which is the harness's own command.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tokenformer_vit.errors import InputError, first_fault

# Compute standard errors in this process: each worker would import everything again.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

import lm_eval
from datasets import Dataset, DatasetDict
from lm_eval.models import huggingface
from lm_eval.tasks import TaskManager

_HFLM: Any = huggingface.HFLM  # its decorator hides the type
_BOOTSTRAP = 1000  # samples for the standard error of LAMBADA's perplexity


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes:
        name: Name of the task in the harness.
        split: Split of the data that is evaluated.
        fields: Name and type of each field of an item. Other fields are ignored.
        valid: Tells whether the fields of an item fit each other.
        convert: Turns an item of the file into an item of the hub.
    """

    name: str
    split: str
    fields: Mapping[str, Any]
    valid: Callable[[dict[str, Any]], bool] = bool
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict

    @property
    def file(self) -> str:
        """Name of the local file, which has one JSON object a line."""
        return f"{self.name}_{self.split.replace('validation', 'val')}.jsonl"


def _hellaswag_item(item: dict[str, Any]) -> dict[str, Any]:
    """Split a query "activity: context" into the fields of the hub.

    The endings complete an unfinished sentence. On the hub this sentence is the field ctx_b, and
    the harness capitalises it. In the query it follows the last full stop and begins with a small
    letter.
    """
    activity, _, context = item["query"].partition(": ")
    *sentences, last = re.split(r"(?<=[.!?]) ", context)
    begun = last if sentences and last[:1].islower() else ""
    return {
        "activity_label": activity,
        "ctx_a": context.removesuffix(begun).rstrip() if begun else context,
        "ctx_b": begun,
        "endings": item["endings"],
        "label": str(item["label"]),
    }


def _has_answer(item: dict[str, Any]) -> bool:
    """Tell whether the answer to a question of ARC is one of its choices."""
    text, label = (item["choices"][key] for key in ("text", "label"))
    return len(text) == len(label) and item["answerKey"] in label


_STRICT = ConfigDict(strict=True)
_Answer = Annotated[str, Field(min_length=1)]


class _Choices(BaseModel):
    text: list[_Answer]
    label: list[str]


_ARC = {"question": str, "choices": _Choices, "answerKey": str}

TASKS = {
    "lambada": Task("lambada_openai", "test", {"text": Annotated[str, Field(pattern=" ")]}),
    "hellaswag": Task(
        "hellaswag",
        "validation",
        {"query": Annotated[str, Field(pattern=": ")], "endings": list[_Answer], "label": int},
        valid=lambda item: 0 <= item["label"] < len(item["endings"]),
        convert=_hellaswag_item,
    ),
    "piqa": Task(
        "piqa",
        "validation",
        {"goal": str, "sol1": _Answer, "sol2": _Answer, "label": Annotated[int, Field(ge=0, le=1)]},
    ),
    "arc_easy": Task("arc_easy", "test", _ARC, valid=_has_answer),
    "arc_challenge": Task("arc_challenge", "test", _ARC, valid=_has_answer),
    "winogrande": Task(
        "winogrande",
        "validation",
        {
            "sentence": Annotated[str, Field(pattern="_")],
            "option1": _Answer,
            "option2": _Answer,
            "answer": Literal["1", "2"],
        },
    ),
}


def read_items(task: Task, folder: Path) -> list[dict[str, Any]]:
    """Read the items of a task from its local file.

    Args:
        task: The task.
        folder: Folder with :attr:`Task.file`.

    Returns:
        Items with the fields that they have on the hub.

    Raises:
        InputError: If there is no such file, or an item does not fit the task.
    """
    path = folder / task.file
    if not path.is_file():
        raise InputError(f"there is no file {path}, which must hold the items of {task.name}")
    fields: Any = {name: (kind, ...) for name, kind in task.fields.items()}
    schema = create_model(task.name, __config__=_STRICT, **fields)
    items: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                item = schema.model_validate_json(line).model_dump()
            except ValidationError as error:
                raise InputError(
                    f"{path}, line {number}: {first_fault(error)}; correct it"
                ) from error
            if not task.valid(item):
                raise InputError(
                    f"{path}, line {number}: the answer is not one of the choices; correct it"
                )
            items.append(task.convert(item))
    if not items:
        raise InputError(f"{path} is empty; it must hold the items of {task.name}")
    return items


class Harness(_HFLM):
    """A model and its tokenizer for the harness.

    Args:
        model: Causal language model of transformers.
        tokenizer: Tokenizer of the model.
        context: Largest number of tokens that the model reads at once. The harness cuts off the
            beginning of longer prompts.
        batch_size: Number of sequences computed at once.
        amp: Compute in bfloat16 under torch.autocast. The log-softmax stays float32.

    Raises:
        InputError: If the tokenizer has no token that begins or ends a text, which the harness
            needs for an empty prompt.
    """

    def __init__(
        self, model: Any, tokenizer: Any, context: int, batch_size: int = 8, amp: bool = False
    ) -> None:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no token that begins or ends a text, which zero-shot tasks "
                "need: set eos_token in its tokenizer_config.json"
            )
        # The harness warns about each prompt that it cuts.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=context,
            batch_size=batch_size,
            mixed_precision_dtype="bfloat16" if amp else None,
            softmax_dtype="float32",
            trust_remote_code=False,
        )

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """Check that the model can read every answer before the first one is computed."""
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self.max_length:
            raise InputError(
                f"an answer has {longest} tokens, but the model reads {self.max_length} at once: "
                "leave this task out"
            )
        return super()._loglikelihood_tokens(requests, *args, **kwargs)


def run_task(
    harness: Harness,
    name: str,
    items: list[dict[str, Any]] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate a model on a task.

    Args:
        harness: The model.
        name: Name of the task in :data:`TASKS`.
        items: Items from :func:`read_items`; None downloads them from the Hugging Face hub.
        limit: Number of items, counted from the first one; None for all.
        seed: Seed of Python, NumPy and PyTorch; the harness sets all three.

    Returns:
        ``n``, the number of items; ``version``, the version of the task in the harness; and every
        metric of the harness, such as ``acc``, with its standard error, such as ``acc_stderr``
        (None for a single item).

    Raises:
        InputError: If the items cannot be downloaded, or an answer is longer than the context.
    """
    task = TASKS[name]
    # Only the folder of this task: searching all of the thousands takes long.
    folder = Path(lm_eval.__file__).parent / "tasks" / task.name.partition("_")[0]
    manager = TaskManager(include_defaults=False, include_path=str(folder))
    spec: Any = task.name
    if items is not None:
        data = DatasetDict({task.split: Dataset.from_list(items)})
        own = {
            "task": task.name,
            "custom_dataset": lambda **_: data,
            "dataset_kwargs": {},
            **dict.fromkeys(("training_split", "validation_split", "test_split")),
            f"{task.split}_split": task.split,
        }
        # In a group, the harness keeps its own definition and changes only these entries.
        spec = {"group": "local", "task": [own]}
    try:
        loaded = manager.load([spec])["tasks"][task.name]
    except Exception as error:  # the hub's libraries raise errors of many types
        if items is not None:
            raise
        raise InputError(
            f"the items cannot be downloaded from the Hugging Face hub ({type(error).__name__}): "
            "give a folder of local files (--task-data)"
        ) from error
    evaluate: Any = lm_eval.simple_evaluate
    with redirect_stdout(sys.stderr):  # the harness prints its progress to both
        results = evaluate(
            model=harness,
            tasks=[loaded],
            num_fewshot=0,
            limit=limit,
            log_samples=False,
            bootstrap_iters=_BOOTSTRAP,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            task_manager=manager,
        )
    found = {
        key.removesuffix(",none"): value if isinstance(value, float) else None
        for key, value in results["results"][task.name].items()
        if key.endswith(",none")
    }
    count = results["n-samples"][task.name]["effective"]
    return {"n": count, "version": results["versions"][task.name], **found}

"""The six zero-shot tasks of the paper, by lm-evaluation-harness.

Prompts, answers and metrics are the harness's own. The items come from local files, or, without
them, from where the harness takes them: Hugging Face's hub.
"""

import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from tokenformer_vit.errors import InputError, first_fault

# Standard errors are drawn in this process: workers would import everything again. To be set
# before the harness computes one.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

try:
    import lm_eval
    from lm_eval.models import huggingface
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise InputError(
        "zero-shot tasks need lm-evaluation-harness: `pip install -e '.[evaluation]'`"
    ) from error
from datasets import Dataset, DatasetDict

__all__ = ["TASKS", "Harness", "Task", "read_items", "run_task"]

_HFLM: Any = huggingface.HFLM  # its decorator hides the type
_BOOTSTRAP = 1000  # samples for the standard error of LAMBADA's perplexity


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes:
        name: Of the harness.
        folder: Where the harness defines it, below its ``tasks``.
        split: The part of the data that is asked.
        metric: Which the table has.
        file: Name of the local file of items, one JSON object a line.
        fields: What each item has; what else it has is left out.
        valid: Tells whether an item's answer is one of its choices, and so on.
        item: Turns an item of the file into one of the hub.

    Source:
        The authors' README takes the zero-shot benchmark "described by mamba", that is, accuracy
        normalised by the answers' lengths for HellaSwag and ARC-challenge, and plain accuracy for
        the others: Mamba, arXiv:2312.00752, Appendix E.2.3.
    """

    name: str
    folder: str
    split: str
    metric: str
    file: str
    fields: Any
    valid: Callable[[dict[str, Any]], bool] = bool
    item: Callable[[dict[str, Any]], dict[str, Any]] = dict


def _hellaswag_item(item: dict[str, Any]) -> dict[str, Any]:
    """Take a query "activity: context" apart, as the harness wants it.

    On the hub the beginning of a sentence that the endings complete is a field of its own, ctx_b,
    which the harness capitalises. In the query it is what follows the last full stop with a small
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


def _answer_is_a_choice(item: dict[str, Any]) -> bool:
    text, label = (item["choices"][key] for key in ("text", "label"))
    return len(text) == len(label) and item["answerKey"] in label


_Answer = Annotated[str, Field(min_length=1)]


class _Lambada(TypedDict):
    text: str


class _Hellaswag(TypedDict):
    query: str
    endings: list[_Answer]
    label: int


class _Piqa(TypedDict):
    goal: str
    sol1: _Answer
    sol2: _Answer
    label: Annotated[int, Field(ge=0, le=1)]


class _Choices(TypedDict):
    text: list[_Answer]
    label: list[str]


class _Arc(TypedDict):
    question: str
    choices: _Choices
    answerKey: str


class _Winogrande(TypedDict):
    sentence: str
    option1: _Answer
    option2: _Answer
    answer: Literal["1", "2"]


TASKS = {
    "lambada": Task(
        "lambada_openai",
        "lambada",
        "test",
        "acc",
        "lambada_openai_test.jsonl",
        _Lambada,
        valid=lambda item: " " in item["text"],
    ),
    "hellaswag": Task(
        "hellaswag",
        "hellaswag",
        "validation",
        "acc_norm",
        "hellaswag_val.jsonl",
        _Hellaswag,
        valid=lambda item: ": " in item["query"] and 0 <= item["label"] < len(item["endings"]),
        item=_hellaswag_item,
    ),
    "piqa": Task(
        "piqa",
        "piqa",
        "validation",
        "acc",
        "piqa_val.jsonl",
        _Piqa,
    ),
    "arc_easy": Task(
        "arc_easy",
        "arc",
        "test",
        "acc",
        "arc_easy_test.jsonl",
        _Arc,
        valid=_answer_is_a_choice,
    ),
    "arc_challenge": Task(
        "arc_challenge",
        "arc",
        "test",
        "acc_norm",
        "arc_challenge_test.jsonl",
        _Arc,
        valid=_answer_is_a_choice,
    ),
    "winogrande": Task(
        "winogrande",
        "winogrande",
        "validation",
        "acc",
        "winogrande_val.jsonl",
        _Winogrande,
        valid=lambda item: "_" in item["sentence"],
    ),
}


def read_items(task: Task, folder: Path) -> list[dict[str, Any]]:
    """Read the items of a task from its local file.

    Args:
        task: Which.
        folder: Holds :attr:`Task.file`.

    Returns:
        Them, with the fields that they have on the hub.

    Raises:
        InputError: If there is no such file, or an item lacks something.
    """
    path = folder / task.file
    if not path.is_file():
        raise InputError(f"there is no {path}, which the items of {task.name} are read from")
    items: list[dict[str, Any]] = []
    adapter: Any = TypeAdapter(task.fields)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                item = adapter.validate_json(line, strict=True)
            except ValidationError as error:
                raise InputError(f"{path}, line {number}: {first_fault(error)}") from error
            if not task.valid(item):
                raise InputError(f"{path}, line {number}: its answer does not fit its question")
            items.append(task.item(item))
    if not items:
        raise InputError(f"{path} is empty")
    return items


class Harness(_HFLM):
    """A model and its tokenizer, as the harness calls them.

    Args:
        model: Causal language model of transformers.
        tokenizer: Its tokenizer.
        context: Most tokens that it reads at once; of longer prompts the harness leaves the
            beginning out.
        batch_size: Sequences computed at once.
        amp: Compute in bfloat16 where torch.autocast does; the log-softmax is float32.

    Raises:
        InputError: If no token of the tokenizer begins or ends a text: the harness puts it where a
            prompt is empty.
    """

    def __init__(
        self, model: Any, tokenizer: Any, context: int, batch_size: int = 8, amp: bool = False
    ) -> None:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no token that begins or ends a text, which zero-shot tasks "
                "need: set eos_token in its tokenizer_config.json"
            )
        # It warns of a model that is given rather than named, and of each prompt that is cut.
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
        """See before the first is computed that the model can read all answers."""
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self.max_length:
            raise InputError(
                f"an answer has {longest} tokens, and the model reads {self.max_length} at once: "
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
    """Ask a model all items of a task.

    Args:
        harness: The model.
        name: Of the task, in :data:`TASKS`.
        items: As :func:`read_items` returns them; None takes them from Hugging Face's hub.
        limit: Ask so many of the first only.
        seed: Of Python, NumPy and PyTorch, which the harness sets.

    Returns:
        ``n`` and ``version``, how many items were asked and which version of the harness's
        definition they follow; and every metric of the harness, such as ``acc``, with its standard
        error such as ``acc_stderr`` (None for a single item).

    Raises:
        InputError: If the items cannot be fetched, or an answer is longer than the context.
    """
    task = TASKS[name]
    manager = TaskManager(
        include_defaults=False,  # thousands, which take long to look through
        include_path=str(Path(lm_eval.__file__).parent / "tasks" / task.folder),
    )
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
        # Within a group the harness takes its own definition and changes just what is said here.
        spec = {"group": "local", "task": [own]}
    try:
        loaded = manager.load([spec])["tasks"][task.name]
    except Exception as error:  # whatever the hub's libraries raise
        if items is not None:
            raise
        raise InputError(
            f"its items cannot be fetched from Hugging Face's hub ({type(error).__name__}); "
            "give a folder of local files (--task-data)"
        ) from error
    evaluate: Any = lm_eval.simple_evaluate
    with redirect_stdout(sys.stderr):  # where the progress is told, too
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

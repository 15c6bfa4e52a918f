"""The stages of ``tokenformer-vit benchmark --all``: what is measured, in this order."""

import shlex
from collections.abc import Mapping
from typing import NamedTuple


class Stage(NamedTuple):
    """One child process.

    The command and the paths have words in braces::

        {device}   short name of the device
        {records}  folder of the results; its folders are those of the repository
        {work}     folder of data and checkpoints that are not kept
        {data}     folder of the data sets
        {images}   folder with train/ and val/ of the images to train on

    Args:
        name: Name of the stage and of its log.
        minutes: Most minutes that it may take. It starts only if so many are left.
        command: Command without the interpreter.
        least: For a stage that keeps what it measured when it is stopped: fewest minutes for which
            it is worth starting.
        needs: Path without which the stage is skipped.
        makes: Path without which a finished stage runs again.
        takes: File that is copied to ``makes`` at the end.
    """

    name: str
    minutes: float
    command: str
    least: float | None = None
    needs: str = ""
    makes: str = ""
    takes: str = ""

    def arguments(self, words: Mapping[str, str]) -> list[str]:
        """Return the words of the command, with the words in braces replaced."""
        return [word.format_map(words) for word in shlex.split(self.command)]


_RESULTS = "{records}/tokenformer_vit/benchmarking/results"
_SPEED = f"benchmark --out {_RESULTS}/speed_tokenformer_base_matched_{{device}}.json --resume"
_LOOP = f"benchmark --loop configs/imagenet_base_matched.py --out {_RESULTS}/loop_"
_TRAINED = "{records}/configs/results/cifar10_tiny_full.json"
# One more seed a stage. Finished runs are skipped.
_THETA = (
    "ablations/softmax.py --config configs/cifar10_tiny_in_memory.py --data-root {images} --amp "
    "--cfg-options train_cfg.max_epochs=20 --jobs 3 --work-dir {work}/softmax "
    "--out {records}/ablations/results/softmax_cifar10_tiny_in_memory --seeds "
)

# By the kind of device. On a CPU the shapes are small: its figures only show that all stages run.
STAGES: dict[str, tuple[Stage, ...]] = {
    "cuda": (
        Stage(
            "tests",
            5,
            "pytest -q -m gpu --continue-on-collection-errors --junitxml={records}/../tests.xml "
            "tests",
            needs="tests",
        ),
        Stage(
            "speed-first",  # is our code faster than plain PyTorch?
            6,
            f"{_SPEED} --modes train --precisions autocast --batch-sizes 128 "
            "--backends auto reference",
            least=4,  # it has one group, which is kept only whole
        ),
        Stage("speed", 10, f"{_SPEED} --precisions autocast --batch-sizes 128 256", least=3),
        Stage(
            "data",
            2,
            "prepare-data {data}/cifar10 {work}/cifar10",
            needs="{data}/cifar10",
            makes="{images}/val",
        ),
        Stage(
            "train",
            7,
            "train configs/cifar10_tiny_in_memory.py --data-root {images} --amp --compile "
            "--work-dir {work}/cifar10_tiny --resume",
            needs="{images}/val",
            makes=_TRAINED,
            takes="{work}/cifar10_tiny/record.json",
        ),
        Stage("theta", 9, f"{_THETA}1", least=4, needs="{images}/val"),
        Stage(
            "language",
            5,
            "benchmark --lm 150m --num-tokens 1024 --precisions autocast --resume "
            f"--out {_RESULTS}/speed_lm_150m_1024_{{device}}.json",
            least=3,
        ),
        Stage(
            "loop",
            3,
            f"{_LOOP}imagenet_base_matched_{{device}}.json --amp --compile --steps 100 "
            "--warm-up 20",
        ),
        Stage(
            "profile",
            3,
            "benchmark --profile --precisions autocast --batch-sizes 128 --backends auto "
            f"--out {_RESULTS}/profile_tokenformer_base_matched_{{device}}.json",
        ),
        Stage("theta-2", 9, f"{_THETA}2", least=4, needs="{images}/val"),
        Stage("theta-3", 9, f"{_THETA}3", least=4, needs="{images}/val"),
    ),
    "cpu": (
        Stage(
            "tests",
            10,
            "pytest -q --junitxml={records}/../tests.xml tests/ops/test_gate.py",
            needs="tests",
        ),
        Stage(
            "speed",
            10,
            "benchmark --model tokenformer_tiny --baseline vit_tiny_patch16_224 --img-size 32 "
            "--depth 1 --precisions float32 --batch-sizes 2 --backends auto --rounds 3 --eager "
            f"--resume --device cpu --out {_RESULTS}/speed_tokenformer_tiny_{{device}}.json",
            least=1,
        ),
        Stage("data", 10, "prepare-data --digits {work}/digits", makes="{images}/val"),
        Stage(
            "train",
            10,
            "train configs/digits_demo_in_memory.py --data-root {images} --work-dir {work}/train "
            "--resume --cfg-options train_cfg.max_epochs=4",
            needs="{images}/val",
            makes="{records}/configs/results/digits_demo_in_memory.json",
            takes="{work}/train/record.json",
        ),
        Stage(
            "theta",
            10,
            "ablations/softmax.py --config configs/digits_demo_in_memory.py --data-root {images} "
            "--cfg-options train_cfg.max_epochs=4 --variants gelu_l2 --work-dir {work}/softmax "
            "--out {records}/ablations/results/softmax_digits_demo_in_memory --seeds 1",
            least=1,
            needs="{images}/val",
        ),
        Stage(
            "language",
            10,
            "benchmark --lm 150m --num-tokens 16 --depth 1 --precisions float32 --batch-sizes 1 "
            "--backends auto --modes decode --rounds 3 --eager --device cpu --resume "
            f"--out {_RESULTS}/speed_lm_150m_16_{{device}}.json",
            least=1,
        ),
        Stage(
            "loop",
            10,
            f"{_LOOP}imagenet_base_matched_5_steps_{{device}}.json --small-tensors --steps 5 "
            "--warm-up 2",
        ),
        Stage(
            "profile",
            10,
            "benchmark --profile --model tokenformer_tiny --baseline vit_tiny_patch16_224 "
            "--img-size 32 --depth 1 --precisions float32 --batch-sizes 2 --backends auto --eager "
            f"--device cpu --out {_RESULTS}/profile_tokenformer_tiny_{{device}}.json",
        ),
    ),
}

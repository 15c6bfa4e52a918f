"""The variants of a growth in stages: a trained small model is enlarged, and trained on."""

from collections.abc import Callable, Iterator
from typing import Any

from .fields import Field
from .variants import PAIRS, ModelChange, Outside, Part, Shape, Variant, arguments, lasting

STAGES = (10, 20)  # length of a stage, in % of the large model's training
FULL = "the full training"
ACCOUNTS = ("sunk", "shared", "counted")  # in names of variants
# Start of the new pairs, with its name in tables.
_INITS = {
    "zero_key": "zero keys",
    "duplicate": "duplicates",
    "random": "random, τ kept",
    "released": "random, as released",
}


def accounts(times: tuple[int, ...]) -> tuple[tuple[str, float], ...]:
    """Return the accounts of the small model's cost: its share in the cost of a large model.

    Args:
        times: How many times as large each large model is. The family is the small model and these.
    """
    return (
        ("small model sunk", 0.0),
        (f"shared by {len(times) + 1}", 1 / (len(times) + 1)),
        ("counted", 1.0),
    )


def in_stages_of(
    field: Field, reference: ModelChange, times: tuple[int, ...] = (2, 3)
) -> tuple[Variant, ...]:
    """List the variants of a question about growth in stages.

    The small model has the pairs of the config's model, divided by the largest of ``times``. Each
    model is trained to its end by the config's schedule, which every stage has anew.

    Args:
        field: Images or language.
        reference: Turns the config's model into the Transformer that grows by Net2Net.
        times: How many times as large each large model is.
    """
    family = _Family(field, reference, times)
    return tuple(family.variants())


class _Family:
    """A small model, and those that are several times as large; arguments as above."""

    def __init__(self, field: Field, reference: ModelChange, times: tuple[int, ...]) -> None:
        self.field, self.reference, self.times = field, reference, times

    def variants(self) -> Iterator[Variant]:
        """Yield each variant after the variants that it starts from."""
        other = self.field.transformer
        yield Variant("small", "small", self.ours(1), line="small")
        label = f"{other}, small"
        yield Variant("reference", label, self.theirs(1), line=label, reference=True)
        for times in self.times:
            yield Variant(f"x{times}", self.scratch(times), self.ours(times), **self.on(times))
            name, label = f"x{times}_reference", f"{other}, × {times}, from scratch"
            yield Variant(name, label, self.theirs(times), line=label, reference=True)
            for stage in STAGES:
                yield from self.budgets(times, stage)
                yield from self.grown(times, stage)

    def scratch(self, times: int) -> str:
        """Name a model from scratch."""
        return f"× {times}, from scratch"

    def on(self, times: int) -> dict[str, Any]:
        """Return the line of the models from scratch."""
        return {"line": self.scratch(times)}

    def budgets(self, times: int, stage: int) -> Iterator[Variant]:
        """Yield the large model from scratch with the FLOPs of a stage, in each account."""
        for name, (account, share) in zip(ACCOUNTS, accounts(self.times), strict=True):
            yield Variant(
                f"x{times}_{name}_{stage}",
                f"{self.scratch(times)}, cost of {stage} %, {account}",
                self.ours(times),
                outside=lasting(stage / 100 + share / times, self.field.limit),
                against=((FULL, f"x{times}"),),
                **self.on(times),
            )

    def grown(self, times: int, stage: int) -> Iterator[Variant]:
        """Yield the small model as it is, grown in each way, and Net2Net, all trained on."""
        prefix = f"x{times}_"
        same, net2net = f"{prefix}same_{stage}", f"{prefix}net2net_{stage}"
        full = (FULL, f"x{times}")
        line = f"small, not grown, cost of × {times}"
        yield Variant(
            same,
            f"{line}, {stage} %",
            arguments(),
            outside=lasting(stage / 100 * times, self.field.limit),
            start="small",
            against=(full,),
            line=line,
        )
        against = (
            full,
            *(
                (f"from scratch, {account}", f"{prefix}{name}_{stage}")
                for name, (account, _) in zip(ACCOUNTS, accounts(self.times), strict=True)
            ),
            ("not grown", same),
            ("Net2Net", net2net),
        )
        for init, label in _INITS.items():
            line = f"× {times}, {label}"
            yield Variant(
                f"{prefix}{init}_{stage}",
                f"{line}, {stage} %",
                arguments(),
                outside=self.growth(self.pairs, times, stage, init=init),
                grown=True,
                start="small",
                against=against,
                line=line,
            )
        line = f"{self.field.transformer}, × {times}, Net2Net"
        yield Variant(
            net2net,
            f"{line}, {stage} %",
            arguments(),
            outside=self.growth(self.hidden, times, stage),
            reference=True,
            grown=True,
            start="reference",
            against=((FULL, f"{prefix}reference"),),
            line=line,
        )

    def pairs(self, shape: Shape, times: int) -> dict[str, int]:
        """Return the numbers of pairs, which are multiples of the small model's."""
        small = shape.pairs(1 / max(self.times))
        return {key: times * number for key, number in small.items()}

    def hidden(self, shape: Shape, times: int) -> dict[str, int]:
        """Return the number of hidden neurons, which is a multiple of the small model's."""
        small = shape.hidden(1 / max(self.times))["hidden_features"]
        return {"hidden_features": times * small}

    def ours(self, times: int) -> ModelChange:
        """Set the pairs of a TokenFormer."""

        def change(part: Part, shape: Shape) -> Part:
            sizes = self.pairs(shape, times)
            # The config's own model is written as in the config.
            same = all(getattr(shape, key) == sizes[key] for key in PAIRS)
            return part if same else self.field.sized(part, sizes)

        return change

    def theirs(self, times: int) -> ModelChange:
        """Set the hidden neurons of the Transformer."""

        def change(part: Part, shape: Shape) -> Part:
            return self.field.sized(self.reference(part, shape), self.hidden(shape, times))

        return change

    def growth(
        self, sizes: Callable[[Shape, int], dict[str, int]], times: int, stage: int, **how: str
    ) -> Outside:
        """Grow after the first iteration, in which the warm-up has hardly begun."""

        def outside(shape: Shape, length: int) -> dict[str, Any]:
            schedule = [{"iteration": 1, **sizes(shape, times)}]
            hook = {"type": "GrowthHook", "schedule": schedule, **how}
            return {"custom_hooks": [hook], **lasting(stage / 100, self.field.limit)(shape, length)}

        return outside

"""The variants of a growth in stages: a trained small model is enlarged, and trained on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reference:
    """A Transformer that grows by Net2Net.

    Args:
        label: Name in tables.
        change: Turns the config's model into it.
        prefix: Start of the names of its variants.
    """

    label: str
    change: ModelChange
    prefix: str = ""


@dataclass(frozen=True)
class Family:
    """A small model, and models that are several times as large.

    The small model has the pairs of the config's model, divided by the largest of ``times``. Each
    model is trained to its end by the config's schedule, and every stage has the schedule anew.

    Args:
        field: Images or language.
        references: The Transformers, of as many weights.
        times: How many times as large each large model is.
    """

    field: Field
    references: tuple[Reference, ...]
    times: tuple[int, ...]

    @property
    def accounts(self) -> tuple[tuple[str, float], ...]:
        """The accounts of the small model's cost: the share of it that a large model bears."""
        members = len(self.times) + 1
        return ("small model sunk", 0.0), (f"shared by {members}", 1 / members), ("counted", 1.0)

    @property
    def measured(self) -> tuple[str, ...]:
        """The variants whose layers are measured: models from scratch, and the long stages."""
        long = STAGES[-1]
        grown = (f"x{times}_{init}_{long}" for times in self.times for init in _INITS)
        return "small", *(f"x{times}" for times in self.times), *grown

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants of the question, each after the one that it starts from."""
        return tuple(self._variants())

    def _variants(self) -> Iterator[Variant]:
        yield Variant("small", "small", self._ours(1), against=self._theirs_of(""), line="small")
        for other in self.references:
            name, label = f"{other.prefix}reference", f"{other.label}, small"
            yield Variant(name, label, self._theirs(other, 1), line=label, reference=True)
        for times in self.times:
            label = f"× {times}, from scratch"
            against = self._theirs_of(f"x{times}_")
            yield Variant(f"x{times}", label, self._ours(times), against=against, line=label)
            for other in self.references:
                name, line = f"x{times}_{other.prefix}reference", f"{other.label}, {label}"
                yield Variant(name, line, self._theirs(other, times), line=line, reference=True)
            for stage in STAGES:
                yield from self._equal_budgets(times, stage)
                yield from self._grown(times, stage)

    def _theirs_of(self, size: str) -> tuple[tuple[str, str], ...]:
        """Return the Transformers of a size, which a TokenFormer from scratch is compared with."""
        return tuple(
            (f"{each.label}, from scratch", f"{size}{each.prefix}reference")
            for each in self.references
        )

    def _equal_budgets(self, times: int, stage: int) -> Iterator[Variant]:
        """Yield what the FLOPs of a stage could also train.

        The small model is trained on without growth. The large model is trained from scratch, with
        none, a part or all of the small model's FLOPs besides.
        """
        cost, line = (f"x{times}", stage / 100), f"× {times}, from scratch"
        yield Variant(
            f"x{times}_same_{stage}",
            f"small, not grown, cost of × {times}, {stage} %",
            arguments(),
            costs=(cost,),
            start="small",
            line="small, not grown",
        )
        for name, (account, share) in zip(ACCOUNTS, self.accounts, strict=True):
            yield Variant(
                f"x{times}_{name}_{stage}",
                f"{line}, cost of {stage} %, {account}",
                self._ours(times),
                costs=(cost, ("small", share)),
                against=((FULL, f"x{times}"),),
                line=line,
            )

    def _grown(self, times: int, stage: int) -> Iterator[Variant]:
        """Yield the small model grown in each way and trained on, and Net2Net."""
        net2net = {each: f"x{times}_{each.prefix}net2net_{stage}" for each in self.references}
        budgets = zip(ACCOUNTS, self.accounts, strict=True)
        against = (
            (FULL, f"x{times}"),
            *((f"scratch, {text}", f"x{times}_{name}_{stage}") for name, (text, _) in budgets),
            ("not grown", f"x{times}_same_{stage}"),
            *((f"{other.label}, Net2Net", name) for other, name in net2net.items()),
        )
        for init, label in _INITS.items():
            line = f"× {times}, {label}"
            yield Variant(
                f"x{times}_{init}_{stage}",
                f"{line}, {stage} %",
                arguments(),
                outside=self._growth(self._pairs, times, stage, init=init),
                grown=True,
                start="small",
                against=against,
                line=line,
            )
        for other, name in net2net.items():
            line = f"{other.label}, × {times}, Net2Net"
            yield Variant(
                name,
                f"{line}, {stage} %",
                arguments(),
                outside=self._growth(self._hidden, times, stage),
                reference=True,
                grown=True,
                start=f"{other.prefix}reference",
                against=((FULL, f"x{times}_{other.prefix}reference"),),
                line=line,
            )

    def _pairs(self, shape: Shape, times: int) -> dict[str, int]:
        """Return the numbers of pairs, which are multiples of the small model's."""
        small = shape.pairs(1 / max(self.times))
        return {key: times * number for key, number in small.items()}

    def _hidden(self, shape: Shape, times: int) -> dict[str, int]:
        """Return the number of hidden neurons, which is a multiple of the small model's."""
        small = shape.hidden(1 / max(self.times))["hidden_features"]
        return {"hidden_features": times * small}

    def _ours(self, times: int) -> ModelChange:
        """Set the pairs of a TokenFormer."""

        def change(part: Part, shape: Shape) -> Part:
            sizes = self._pairs(shape, times)
            # The config's own model is written as in the config.
            same = all(getattr(shape, key) == sizes[key] for key in PAIRS)
            return part if same else self.field.sized(part, sizes)

        return change

    def _theirs(self, other: Reference, times: int) -> ModelChange:
        """Set the hidden neurons of a Transformer."""

        def change(part: Part, shape: Shape) -> Part:
            return self.field.sized(other.change(part, shape), self._hidden(shape, times))

        return change

    def _growth(
        self, sizes: Callable[[Shape, int], dict[str, int]], times: int, stage: int, **how: str
    ) -> Outside:
        """Grow after the first iteration, in which the warm-up has hardly begun."""

        def outside(shape: Shape, length: int) -> dict[str, Any]:
            schedule = [{"iteration": 1, **sizes(shape, times)}]
            hook = {"type": "GrowthHook", "schedule": schedule, **how}
            return {"custom_hooks": [hook], **lasting(stage / 100, self.field.limit)(shape, length)}

        return outside

"""Charts of a question about several texts: how well each is known in the course of all stages."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .plots import band, label, save, scale
from .questions import Question
from .rows import Record, at_best_lr, finished
from .text_tables import chain, measure_of


def draw_texts(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw the perplexity of each text over the iterations of all stages into a PNG file.

    A panel for each text, a line for each variant that is a last stage; what stages share is drawn
    once. A vertical line is where a stage begins. Lines are means over seeds, with a band of one
    standard deviation; every variant is shown at its best learning rate.
    """
    figure = Figure(figsize=(2 + 4 * len(question.texts), 4.4), layout="constrained")
    panels = figure.subplots(1, len(question.texts), squeeze=False)[0]
    rows = {variant: finished(own) for variant, own in at_best_lr(question, records).items()}
    begun = {variant.start for variant in question.variants}
    last = [variant for variant in question.variants if variant.name not in begun]
    colours, handles, drawn, spans = {}, [], set(), {}
    for index, variant in enumerate(last):
        colours |= dict.fromkeys(chain(question, variant), f"C{index}")
    shared = [
        stage
        for stage in question.variants
        if sum(stage in chain(question, variant) for variant in last) > 1
    ]
    colours |= {stage: str(0.25 + 0.35 * number) for number, stage in enumerate(shared)}
    for variant in last:
        after = 0
        for stage in chain(question, variant):
            if not rows[stage]:
                break
            style = {
                "color": colours[stage],
                "label": label(stage, rows[stage], records),
                "linestyle": "--" if stage.reference else "-",
            }
            if stage not in drawn:
                drawn.add(stage)
                for axes, text in zip(panels, question.texts, strict=True):
                    name = measure_of(question, text).name
                    band(axes, rows[stage], "validation", "iteration", name, style, after)
                if stage in (variant, *shared):
                    handles.append(Line2D([], [], **style))
            end = after + rows[stage][0]["iterations"]
            spans.setdefault(after, (end, stage.text))
            after = end
    begins, ends = list(spans), [end for end, _ in spans.values()]
    middles = [(begin + end) / 2 for begin, end in zip(begins, ends, strict=True)]
    names = [f"on {text}" for _, text in spans.values()]
    for axes, text in zip(panels, question.texts, strict=True):
        axes.set(title=f"perplexity of {text}, in training", xlabel="iteration")
        scale(axes, question.field.measure)
        for begin in begins[1:]:
            axes.axvline(begin, color="0.6", linestyle=":", linewidth=1)
        above = axes.secondary_xaxis("top")
        above.set_xticks(middles, names, fontsize="small")
        above.tick_params(length=0)
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    save(figure, path)

"""Tables of numbers that several commands print."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_ENDLESS = 10_000  # characters of a line; more than any table has


def print_table(table: Table) -> None:
    """Print a table of short words and numbers, and never cut a number.

    A file or a pipe has no width, so the table gets all that it needs. A terminal that is too
    narrow shows it without lines between the columns. If that is still too wide, cells are broken
    between words, and then the lines of the table are longer than those of the terminal.
    """
    console = Console()
    free = console.options.update(max_width=_ENDLESS)
    if not console.is_terminal:
        console.width = max(console.width, Measurement.get(console, free, table).maximum)
    elif Measurement.get(console, free, table).maximum > console.width:
        table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
        table.collapse_padding = True
    for column in table.columns:
        cells = (column.header, *column.cells, column.footer)
        column.min_width = max(Measurement.get(console, free, cell).minimum for cell in cells)
    console.print(table, crop=False)

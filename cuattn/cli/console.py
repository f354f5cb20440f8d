"""What the command line prints with: rich on a terminal that has it, aligned plain text everywhere else."""

import sys

__all__ = ["open_console"]


def open_console():
    """Return a console: rich's when standard output is a terminal and rich can be imported, else a plain one."""
    if sys.stdout.isatty():
        try:
            import rich  # noqa: F401
        except ImportError:
            pass
        else:
            return _Rich()
    return _Plain()


class _Plain:
    """Aligned text on standard output, a line of progress per step on standard error."""

    def section(self, title, pairs):
        """Print names and values under a title."""
        print(title)
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            print(f"  {name:<{width}}  {value}")

    def table(self, title, header, rows):
        """Print a table; all columns but the first two are numbers and go to the right."""
        print(title)
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for row in (header, *rows):
            cells = [
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  " + "  ".join(cells).rstrip())

    def line(self, text, good=True):
        """Print a line."""
        print(text)

    def progress(self, items, label):
        """Yield the items, telling on standard error which one is being worked on."""
        for count, item in enumerate(items, 1):
            print(f"[{count}/{len(items)}] {label(item)}", file=sys.stderr)
            yield item


class _Rich:
    """The same through rich."""

    def __init__(self):
        from rich.console import Console

        self._console = Console(highlight=False)

    def section(self, title, pairs):
        """Print names and values under a title."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in pairs:
            table.add_row(name, Text(value))
        self._console.print(table)

    def table(self, title, header, rows):
        """Print a table; all columns but the first two are numbers and go to the right."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for column, name in enumerate(header):
            table.add_column(name, justify="left" if column < 2 else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def line(self, text, good=True):
        """Print a line, red when it is bad news."""
        self._console.print(text, style="green" if good else "bold red", markup=False)

    def progress(self, items, label):
        """Yield the items under a progress bar that names the one being worked on."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task("", total=len(items))
            for item in items:
                bar.update(task, description=label(item))
                yield item
                bar.advance(task)

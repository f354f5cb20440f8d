"""Redraw everything that is shown from the committed rows, without a GPU: pictures, tables, the READMEs' sections.

python -m bench.redraw                   # pictures and text
python -m bench.redraw --text            # text alone
python -m bench.redraw --folder FOLDER   # pictures and tables of the files in another folder
"""

import argparse
import re
import textwrap
from pathlib import Path

from bench import report, style
from bench.rows import RESULTS, ROOT
from bench.sections import PEER_TABLES, SECTIONS
from bench.sections.speed import said

BEGIN, END = "<!-- {}: written by python -m bench.redraw -->", "<!-- /{} -->"
INTRO = """
Everything below was measured by the commands that it names; `python -m bench.reproduce` runs them all on a machine
with a GPU, `python -m bench.redraw` makes the pictures and tables again from the committed rows (`pip install -e
".[bench]"`; the rivals are PyTorch, JAX and their kin, installed beside it).  Results are checked before they are
timed; rivals run in turn in one process.  Machines and versions stand at the end; the long tables are in
[results/tables.md](results/tables.md).
""".strip()


def available(folder=RESULTS, sections=SECTIONS):
    """Yield every section whose rows are there: its name, itself, its rows."""
    for name, section in sections.items():
        files = dict.fromkeys(folder / f"{command.split()[0]}.json" for command in section.commands)
        found = [row for path in files if path.exists() for row in report.read(path)]
        rows = report.framed([row for row in found if row["case"].split("/")[0] in section.tables])
        if len(rows) and (rows["status"] == "ok").any():
            yield name, section, rows


def block(name, section, rows, shows, link, folder):
    """Return a section in markdown: its title, what stands above, the frame of `shows`, the picture, the command."""
    table = shows and style.table(shows(rows[rows["status"] == "ok"]))
    picture = f"![{section.title}]({link}{name}.png)" if (folder / f"{name}.png").exists() else ""
    commands = ", ".join(f"`python -m bench.{command}`" for command in section.commands)
    return "\n\n".join(filter(None, [section.title, fill(section.about), table, picture, commands]))


def fill(text, indent=""):
    """Return a paragraph, or an item of a list, in lines."""
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False)


def measured(folder=RESULTS):
    """Return what stands between the marks of ``bench/README.md``: every section, and the machines."""
    parts, machines = [], {}
    for name, section, rows in available(folder):
        for machine in rows.loc[rows["status"] != "unsupported", "machine"].unique():
            machines.setdefault(machine, []).append(name)
        if section.table or section.figure:
            parts.append("### " + block(name, section, rows, section.table, "results/", folder))
    listed = [fill(f"- {machine}: {', '.join(names)}", "  ") for machine, names in sorted(machines.items())]
    return "\n\n".join([INTRO, *parts, "### Machines and versions", "\n".join(listed)])


def speed(folder=RESULTS):
    """Return what stands between the marks of the README: a picture, the summary in words."""
    ((name, _, rows),) = available(folder, {"speed": SECTIONS["speed"]})
    picture = f"![Speed of cuattn over that of the fastest rival](bench/results/{name}.png)"
    words, slow = said(rows[rows["status"] == "ok"])
    return "\n\n".join([picture, fill(words), "\n".join(f"- {of}" for of in slow)])


def tables(folder=RESULTS):
    """Return ``tables.md``: the long tables, every case beside every peer among them, and why cells are empty."""
    parts = ["# Every table", "Written by `python -m bench.redraw` from the rows beside this file."]
    for name, section, rows in available(folder, PEER_TABLES | SECTIONS):
        if section.details:
            parts.append("## " + block(name, section, rows, section.details, "", folder))
        if section.details and rows["reason"].notna().any():
            reasons = rows.dropna(subset="reason").groupby(["runner", "status", "reason"], sort=False)["label"]
            parts.append(style.table(reasons.agg(lambda labels: ", ".join(labels.unique())).rename("cases").to_frame()))
    return "\n\n".join(parts) + "\n"


WRITTEN = {ROOT / "README.md": ("speed", speed), ROOT / "bench" / "README.md": ("measured", measured)}


def insert(text, mark, section):
    """Return a page with what stands between its marks replaced."""
    begin, end = BEGIN.format(mark), END.format(mark)
    found, count = re.subn(f"{begin}.*{end}", lambda _: f"{begin}\n\n{section}\n\n{end}", text, flags=re.DOTALL)
    if not count:
        raise ValueError(f"the page has no place for the results: expected {begin} and {end}")
    return found


def draw(folder=RESULTS):
    """Draw every picture."""
    from bench import denoise, mask_gallery, overview

    for name, section, rows in available(folder, PEER_TABLES | SECTIONS):
        if section.figure:
            figure = section.figure(rows[rows["status"] == "ok"])
            style.save(figure, folder / f"{name}.png", vector=name in SECTIONS)
    style.save(mask_gallery.figure(), folder / "masks.png", vector=True)
    for _, _, rows in available(folder, {"lengths": SECTIONS["lengths"]}):
        style.save(overview.figure(rows[rows["status"] == "ok"]), folder / "overview.png")
    denoise.picture(denoise.photograph(), folder / "denoise.png")


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", action="store_true", help="leave the pictures as they are")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of rows, pictures and tables")
    arguments = parser.parse_args()
    if not arguments.text:
        draw(arguments.folder)
    (arguments.folder / "tables.md").write_text(tables(arguments.folder))
    if arguments.folder == RESULTS:
        for path, (mark, section) in WRITTEN.items():
            path.write_text(insert(path.read_text(), mark, section()))
    print(f"{arguments.folder} is up to date")


if __name__ == "__main__":
    main()

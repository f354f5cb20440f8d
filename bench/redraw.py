"""Redraw everything that is shown from the committed rows, without a GPU: pictures, tables, the README's section.

python -m bench.redraw                   # pictures and text
python -m bench.redraw --text            # text alone
python -m bench.redraw --folder FOLDER   # pictures and tables of the files in another folder
"""

import argparse
import textwrap
from pathlib import Path

from bench import report, style
from bench.rows import RESULTS, ROOT
from bench.sections import LONG, SECTIONS

BEGIN, END = "<!-- measured: written by python -m bench.redraw -->", "<!-- /measured -->"
CPU_BEGIN, CPU_END = "<!-- cpu: written by python -m bench.redraw -->", "<!-- /cpu -->"
VERSIONS = ("cupy-cuda13x", "cupy-cuda12x", "torch", "cuda", "nvrtc", "cudnn", "flash-attn-4")
PEER_FILES = ("hopper", "portable")
README = [name for name in SECTIONS if name != "cpu"]


def block(section, folder, link, brief=False):
    """Return a section's title, its text (or, in brief, its summary), its picture and its command."""
    say = section.summary if brief else section.text
    picture = f"![{section.title}]({link}{section.name}.png)" if (folder / f"{section.name}.png").exists() else ""
    return "\n\n".join(filter(None, [section.title, _fill(say()) if say else "", picture, f"`{section.command}`"]))


def available(folder=RESULTS, names=tuple(SECTIONS)):
    """Yield every section whose rows are there."""
    for name in names:
        kind = SECTIONS[name]
        runs, frame = report.read(path for file in kind.files or [name] if (path := folder / f"{file}.json").exists())
        mine = frame[frame["table"].str.startswith(kind.prefix)] if len(frame) else frame
        if len(mine) and (mine["status"] == "ok").any():
            section = kind(frame, name, runs)
            if section.text().count("\n|") > 1:
                yield section


def readme(folder=RESULTS):
    """Return the README's section, between its marks."""
    intro = (
        "Everything below was measured by the commands that it names; `python -m bench.reproduce` runs them all on a "
        "machine with a GPU, `python -m bench.redraw` makes the pictures and tables again from the committed rows "
        '(`pip install -e ".[bench]"`; the rivals are PyTorch, JAX and their kin, installed beside it).  Results are '
        "checked before they are timed; rivals run in turn in one process.  The long tables are in "
        "[bench/results/tables.md](bench/results/tables.md)."
    )
    parts, machines = [], {}
    for section in available(folder, README):
        brief = section.name in LONG
        if not brief or section.figure:
            parts.append("### " + block(section, folder, "bench/results/", brief))
        used = set(section.frame.loc[section.frame["status"] != "unsupported", "run"])
        for machine in dict.fromkeys(_machine(run) for run in section.runs if run["id"] in used):
            machines.setdefault(machine, []).append(section.name)
    listed = (f"- {machine}: {', '.join(names)}" for machine, names in sorted(machines.items()))
    lines = "\n".join(textwrap.fill(item, 118, subsequent_indent="  ", break_long_words=False) for item in listed)
    return "\n\n".join([BEGIN, _fill(intro), lines, *parts, END])


def cpu(folder=RESULTS):
    """Return the README's paragraph on the CPU, between its marks."""
    (section,) = available(folder, ["cpu"])
    where = "; ".join(sorted({run["device"] for run in section.runs}))
    text = f"In one run ({where}; `{section.command}`, all samples are in `bench/results/cpu.json`):"
    return "\n\n".join([CPU_BEGIN, _fill(f"{text} {section.summary()}"), CPU_END])


def _fill(text):
    """Wrap paragraphs; leave tables and lists alone."""
    return "\n\n".join(
        part if part.startswith(("|", "-", "!", "#")) else textwrap.fill(part, 118, break_long_words=False)
        for part in text.split("\n\n")
    )


def _machine(run):
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in VERSIONS if name in run["versions"])
    driver = f", driver {run['driver']}" if run.get("driver") else ""
    trees = ", ".join(f"{name} {tree[:12]}" for name, tree in run["trees"].items() if name in ("kernels", "cuattn"))
    commit = f"commit {run['commit']}" if run.get("commit") else f"trees {trees}"
    return f"{run['device']}{driver}, {versions}, {commit}"


def tables(folder=RESULTS):
    """Return ``tables.md``: every case beside every peer, then the studies' long tables."""
    parts = ["# Every table", "Written by `python -m bench.redraw` from the rows beside this file."]
    for path in _peer_files(folder):
        parts.append(f"## {path.stem}")
        seen = set()
        for key, found, rows in report.tables(report.read([path])[1]):
            picture = report.picture(key[0])
            if key[0] not in seen and (folder / picture).exists():
                parts.append(f"![{key[0]}]({picture})")
            seen.add(key[0])
            parts.append(report.markdown(key, found, rows))
    parts += ["## " + block(section, folder, "") for section in available(folder, (*LONG, "cpu"))]
    return "\n\n".join(parts) + "\n"


def _peer_files(folder):
    return [path for file in PEER_FILES if (path := folder / f"{file}.json").exists()]


def insert(text, section):
    """Return a README with the section replaced that begins and ends with the same marks."""
    first, last = section.splitlines()[0], section.splitlines()[-1]
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"the README has no place for the results: expected {first} and {last}")
    return before + section + after


def draw(folder=RESULTS):
    """Draw every picture."""
    from bench import denoise, mask_gallery

    for section in available(folder):
        if section.figure:
            style.save(section.figure(), folder / f"{section.name}.png")
    for path in _peer_files(folder):
        report.draw(report.read([path])[1], folder)
    style.save(mask_gallery.figure(), folder / "masks.png")
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
        path = ROOT / "README.md"
        path.write_text(insert(insert(path.read_text(), readme()), cpu()))
    print(f"{arguments.folder} is up to date")


if __name__ == "__main__":
    main()

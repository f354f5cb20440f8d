"""Build the site: guides, benchmarks and gallery from their rooms, the reference from docstrings.

    python .site/build.py [FOLDER]             # by default dist/site; needs  pip install -e ".[docs]"
    python .site/build.py [FOLDER] --outside   # asks the web whether links to other sites lead somewhere

Every warning is an error, a link that leads nowhere and a name without a page among them.
"""

import argparse
import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PICTURES = ROOT / "bench" / "results"
GALLERY = ROOT / "bench" / "gallery"
FURTHER = {"denoise": ("denoise", "Non-local means"), "masks": ("mask_gallery", "Masks")}  # scripts in bench/ itself

GUIDES = {  # page of the repository: its place on the site, in the order of the contents
    "cuattn/guides/frameworks.md": "guides/frameworks.md",
    "cuattn/masks/README.md": "guides/masks.md",
    "cuattn/tracing/README.md": "guides/functions.md",
    "cuattn/guides/merging.md": "guides/merging.md",
    "cuattn/guides/dropout.md": "guides/dropout.md",
    "cuattn/guides/derivatives.md": "guides/derivatives.md",
    "cuattn/guides/means.md": "guides/means.md",
    "cuattn/pairwise/README.md": "guides/pairwise.md",
    "cuattn/distributed/README.md": "guides/distributed.md",
    "cuattn/guides/accuracy.md": "guides/accuracy.md",
    "cuattn/guides/plans.md": "guides/plans.md",
    "kernels/README.md": "guides/kernels.md",
    "cuattn/reference/README.md": "guides/papers.md",
    "cuattn/cli/README.md": "guides/command.md",
}
OTHERS = {
    "README.md": "index.md",
    "bench/README.md": "benchmarks/index.md",
    "bench/results/tables.md": "benchmarks/tables.md",
    "bench/NOTES.md": "benchmarks/notes.md",
    ".github/CHANGELOG.md": "changelog.md",
}
MODULES = {  # whose public names have a page each
    "cuattn": "Attention",
    "cuattn.masks": "Masks",
    "cuattn.errors": "Errors",
    "cuattn.rng": "Random numbers of dropout",
    "cuattn.pairwise": "Sums over pairs of points",
    "cuattn.sklearn": "Estimators of scikit-learn",
    "cuattn.distributed": "Ranks",
    "cuattn.torch": "PyTorch",
    "cuattn.jax": "JAX",
    "cuattn.transformers": "Hugging Face Transformers",
    "cuattn.reference": "The papers' algorithms, executable",
    "cuattn.io_model": "Accesses to memory, in closed form",
}
NEEDS = {f"cuattn.{name}": name for name in ("sklearn", "torch", "jax", "transformers")}


def places():
    """Return the place on the site of every page of the repository."""
    further = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "cuattn" / "guides").glob("*.md"))
    found = GUIDES | {page: f"guides/{Path(page).name}" for page in further if page not in GUIDES} | OTHERS
    return {page: place for page, place in found.items() if (ROOT / page).exists()}


def rewritten(text, page, known):
    """Return a page whose links lead to other pages of the site, to pictures that are copied, or stay."""
    here = Path(known[page]).parent

    def link(found):
        target, anchor = found["target"], found["anchor"] or ""
        path = (ROOT / page).parent.joinpath(target).resolve()
        path = path / "README.md" if path.is_dir() else path
        name = path.relative_to(ROOT).as_posix()
        if name in known:
            return f"]({os.path.relpath(known[name], here)}{anchor})"
        if path.suffix == ".png":
            return f"]({os.path.relpath(Path('pictures', path.name), here)})"
        raise SystemExit(f"{page}: {target} is no page of the site; say it as code, or add it in {__file__}")

    return re.sub(r"\]\((?!https?:|#)(?P<target>[^)#\s]+)(?P<anchor>#[\w-]+)?\)", link, text)


def contents(*pages, caption=None, hidden=True):
    """Return a table of contents in Markdown."""
    options = [":maxdepth: 1"] + [":hidden:"] * hidden + [f":caption: {caption}"] * bool(caption)
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def write(folder, place, text):
    """Write a page."""
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_guides(folder):
    """Copy the repository's pages; the README is the first one."""
    known = places()
    for page, place in known.items():
        text = rewritten((ROOT / page).read_text(), page, known)
        if page == "README.md":
            last = ["changelog"] * (".github/CHANGELOG.md" in known)
            text += contents("guides/index", "api/index", "gallery/index", "benchmarks/index", *last)
        if place == "benchmarks/index.md":
            text += contents("tables", "notes")
        write(folder, place, text)
    names = [Path(place).stem for place in known.values() if place.startswith("guides/")]
    coming = [name for name in names if name.startswith("coming_from")]
    guides = contents(*(name for name in names if name not in coming), hidden=False)
    write(folder, "guides/index.md", "# Guides\n" + guides + contents(*coming, caption="Other libraries", hidden=False))


def write_reference(folder):
    """Write a page per module, with a line and a page for each public name."""
    there = {name: title for name, title in MODULES.items() if importlib.util.find_spec(NEEDS.get(name, "cuattn"))}
    for name, title in there.items():
        module = importlib.import_module(name)
        names = [x for x in module.__all__ if not isinstance(getattr(module, x), type(os))]
        if name == "cuattn.errors":
            names = [x for x in names if isinstance(getattr(module, x), type)]
        if name == "cuattn":
            elsewhere = ("cuattn.errors", "cuattn.masks")
            names = [x for x in names if not getattr(module, x).__module__.startswith(elsewhere)]
        heading = f"{title}: ``{name}``"
        about = [heading, "=" * len(heading), "", f".. automodule:: {name}", ""]
        table = [f".. currentmodule:: {name}", "", ".. autosummary::", "   :toctree: generated", "   :nosignatures:"]
        write(folder, f"api/{name}.rst", "\n".join([*about, *table, "", *(f"   {x}" for x in sorted(names)), ""]))
    guide = ":doc:`what functions may be made of </guides/functions>`"
    about = [".. py:module:: cuattn.tracing", "", f"Internal; the guide says {guide}."]
    heading = "Score and mask functions: ``cuattn.tracing``"
    write(folder, "api/cuattn.tracing.rst", "\n".join([heading, "=" * len(heading), "", *about, ""]))
    there["cuattn.tracing"] = heading
    write(folder, "api/index.md", "# Reference\n" + contents(*there, hidden=False))


def write_gallery(folder):
    """Write a page per example: what it says of itself, its picture, its code."""
    examples = {f"gallery-{path.stem}": (path, None) for path in sorted(GALLERY.glob("*.py"))}
    examples |= {picture: (ROOT / "bench" / f"{script}.py", title) for picture, (script, title) in FURTHER.items()}
    examples = {picture: of for picture, of in examples.items() if (PICTURES / f"{picture}.png").exists()}
    shown = []
    for picture, (path, title) in examples.items():
        about, _, further = ast.get_docstring(ast.parse(path.read_text())).partition("\n")
        title = title or about.split(":")[0].rstrip(".")
        command = "" if path.parent != GALLERY else f"`python -m bench.gallery {path.stem}`"
        further = re.sub(r"(?m)^ +(python .*)$", r"`\1`\n", further.strip())
        text = [f"# {title}", about, further, f"![{title}](../pictures/{picture}.png)", command]
        code = f"```python\n{path.read_text()}```\n"
        write(folder, f"gallery/{path.stem}.md", "\n\n".join([*filter(None, text), code]))
        seen = f"[![{title}](../pictures/{picture}.png)]({path.stem}.md)\n\n[{title}]({path.stem}.md)"
        shown.append(f"```{{container}} example\n{seen}\n```")
    about = "Examples from the sciences, each of a screen of code and some seconds on a CPU: `python -m bench.gallery`."
    names = contents(*(path.stem for path, _ in examples.values()))
    grid = "\n".join(["````{container} examples", *shown, "````"])
    write(folder, "gallery/index.md", "\n\n".join(["# Gallery", about, names, grid, ""]))


def main():
    """Gather the pages in a temporary folder, and build them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist" / "site")
    parser.add_argument("--outside", action="store_true", help="check links to other sites")
    arguments = parser.parse_args()
    out, builder = arguments.folder.resolve(), "linkcheck" if arguments.outside else "html"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "pages")
        shutil.copytree(PICTURES, folder / "pictures", ignore=shutil.ignore_patterns("*.json", "*.md", "*.svg"))
        write_guides(folder)
        write_reference(folder)
        write_gallery(folder)
        options = ["-q", "-W", "--keep-going", "-j", "auto", "-c", str(HERE), "-d", f"{name}/trees"]
        command = [sys.executable, "-m", "sphinx", "-b", builder, *options, str(folder), str(out)]
        done = subprocess.run(command, env={**os.environ, "CUATTN_ROOT": str(ROOT)})
    if done.returncode == 0 and not arguments.outside:
        print(f"{out / 'index.html'}: {len(list(out.rglob('*.html')))} pages")
    return done.returncode


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())

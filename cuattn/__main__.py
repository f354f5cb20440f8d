"""``python -m cuattn``, as ``cuattn``: a report, a self-check, and attention on files."""

from cuattn.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Write the index of the course into README.md. Run it after a change to course_lib/index.py; a test asks for it."""

from pathlib import Path

from course_lib.index import readme_table

README = Path(__file__).resolve().parents[1] / "README.md"
START = "<!-- index: written by tools/index.py -->"
END = "<!-- end of index -->"


def with_index(text: str) -> str:
    """README's text with the present index between the two marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"README.md: expected {START} and {END}")
    return f"{before}{START}\n\n{readme_table()}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_index(README.read_text(encoding="utf-8")), encoding="utf-8")

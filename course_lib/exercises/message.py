"""What a learner reads: plain text in a terminal, HTML in a notebook, the same words in both."""

import html
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 100
# Okabe-Ito colours; the mark before the title says the same for those who do not see them.
COLOURS = {"solved": "#0072B2", "wrong": "#D55E00", "unsolved": "#888888", "note": "#888888"}
MARKS = {"solved": "✓ ", "wrong": "✗ ", "unsolved": "○ ", "note": ""}


@dataclass
class Message:
    """A title and, below it, paragraphs, tables and code in the order they were added."""

    status: str
    title: str
    parts: list[tuple[str, object]] = field(default_factory=list)

    def say(self, text: str) -> "Message":
        self.parts.append(("text", text))
        return self

    def table(self, rows: Sequence[Sequence[str]]) -> "Message":
        self.parts.append(("table", rows))
        return self

    def code(self, source: str) -> "Message":
        self.parts.append(("code", source.strip("\n")))
        return self

    def text(self) -> str:
        lines = [MARKS[self.status] + self.title]
        for kind, part in self.parts:
            if kind == "text":
                for paragraph in part.split("\n"):
                    lines += textwrap.wrap(paragraph, WIDTH, initial_indent="  ", subsequent_indent="  ") or [""]
            elif kind == "code":
                lines += ["", *("    " + line if line else "" for line in part.splitlines()), ""]
            else:
                lines += _aligned(part)
        return "\n".join(line.rstrip() for line in lines).rstrip()

    def html(self) -> str:
        body = [f"<strong>{html.escape(MARKS[self.status] + self.title)}</strong>"]
        for kind, part in self.parts:
            if kind == "text":
                words = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(part))
                body.append(f"<div>{words.replace(chr(10), '<br>')}</div>")
            elif kind == "code":
                body.append(f"<pre><code>{html.escape(part)}</code></pre>")
            else:
                body.append(_html_table(part))
        style = f"border-left: 4px solid {COLOURS[self.status]}; padding-left: 0.8em"
        return f'<div style="{style}">\n' + "\n".join(body) + "\n</div>"

    def show(self) -> None:
        """Display in a Jupyter kernel, print anywhere else."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if hasattr(shell, "kernel"):
            from IPython.display import display

            display({"text/plain": self.text(), "text/html": self.html()}, raw=True)
            return
        try:
            print(self.text())
        except UnicodeEncodeError:  # a console that knows no Greek
            encoding = sys.stdout.encoding or "ascii"
            print(self.text().encode(encoding, "replace").decode(encoding))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to equal width; a cell of several lines continues below itself."""
    cells = [[str(cell).split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(cells[0]))]
    return [
        "  "
        + "  ".join((cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
        for i in range(max(len(cell) for cell in row))
    ]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        lines = html.escape(str(text)).replace("\n", "<br>")
        return f'<td style="text-align: left; white-space: pre; font-family: monospace">{lines}</td>'

    return "<table>" + "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows) + "</table>"

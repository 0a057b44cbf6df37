"""Pure: the page that `magnetar quickstart` writes, one file that needs nothing else.

Owns: its text. The style (`report_page.css`, put into the page) follows the reader's choice of
a light or dark screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def page(
    *,
    title: str,
    verdict: str,
    is_good: bool,
    facts: Sequence[tuple[str, str, str]],
    plots: Sequence[str],
    pipeline: str,
    next_steps: Sequence[str],
    style: str,
) -> str:
    """`facts` are rows of name, value and remark."""
    # Everything that comes from outside is escaped; plots and style are made by us.
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in fact)}</tr>" for fact in facts
    )
    steps = "\n".join(f"<li><code>{escape(step)}</code></li>" for step in next_steps)
    # Style and plots are in the file: it can be sent to somebody and opened without a network.
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
<h1>{escape(title)}</h1>
<p class="{"good" if is_good else "bad"}"><strong>{escape(verdict)}</strong></p>
<table>
{rows}
</table>
<h2>Over time</h2>
{"".join(plots)}
<h2>The pipeline</h2>
<pre>{escape(pipeline)}</pre>
<h2>Next</h2>
<ul>
{steps}
</ul>
</html>
"""

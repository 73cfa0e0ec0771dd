"""Pages that load nothing, no other file and no network: tables, and pictures as inline SVG. The page of a comparison.

Comparison → HTML. A short script shows or hides methods by their legend, and copies a table as Markdown.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hurtle.errors import HurtleError
from hurtle.experiments.figures import as_svg, draw_improvements, draw_profiles, draw_task, new_figure, style_of
from hurtle.tracking.run_folder import write_whole

if TYPE_CHECKING:
    from hurtle.experiments.comparison import Comparison

STYLE = """
:root { color-scheme: light dark; --text: #1a202c; --dim: #4a5568; --line: #e2e8f0; --back: #ffffff; --chart: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --text: #e2e8f0; --dim: #a0aec0; --line: #2d3748; --back: #171923; --chart: #f7fafc }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
p, caption, .dim { color: var(--dim) }
.charts { display: flex; flex-wrap: wrap; gap: 1rem } .charts figure { margin: 0; flex: 1 1 420px; background: var(--chart);
  border: 1px solid var(--line); border-radius: 8px; padding: .5rem }
.charts svg { width: 100%; height: auto; display: block; font-family: system-ui, sans-serif }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; margin: .8rem 0; padding: 0; list-style: none }
.legend label { cursor: pointer } .legend svg { vertical-align: middle; margin-right: .45rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600 } button { font: inherit; font-size: .85rem; margin: .5rem 0 }
"""
SCRIPT = """
document.querySelectorAll('.legend input').forEach(box => box.addEventListener('change', () =>
  document.querySelectorAll(`[id$="-method-${box.value}"]`).forEach(part => part.style.display = box.checked ? '' : 'none')));
document.querySelectorAll('button').forEach(button => button.addEventListener('click', () => {
  const rows = [...button.parentElement.querySelectorAll('tr')].map(row => [...row.children].map(cell => cell.textContent));
  const lines = rows.map(cells => `| ${cells.join(' | ')} |`);
  lines.splice(1, 0, `|${rows[0].map(() => ' --- |').join('')}`);
  navigator.clipboard.writeText(lines.join('\\n'));
}));
"""


def write_page(found: Comparison, file: Path) -> Path:
    """Write the page.

    Raises:
        HurtleError: It cannot be written, or Matplotlib is missing.
    """
    text = page(found)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HurtleError(f"{file.parent} could not be made: {error.strerror or error}.") from error
    write_whole(file, text)
    return file


def page(found: Comparison) -> str:
    """The HTML."""
    styles = style_of(found.methods)
    title = f"{' and '.join(found.methods[:3])}{' …' * (len(found.methods) > 3)} on {', '.join(found.tasks[:3])}"
    title += " …" * (len(found.tasks) > 3)
    parts = [f"<h1>{escape(title)}</h1>", _about(found), _legend(found, styles)]
    for number, task in enumerate(found.tasks):
        charts = [_task_chart(found, task, x, styles, f"t{number}-{x}") for x in ("steps", "seconds")]
        parts.append(f'<h2>{escape(task)}</h2><div class="charts">{"".join(charts)}</div>')
    parts.append(f"<h2>Results</h2>{table(*found.table())}")
    if found.profiles:
        parts.append(f"<h2>Over all tasks</h2>{_profiles(found, styles)}{table(*found.tasks_table())}")
        parts.append("<p>Scores are normalized by task: 0 is its worst run of all methods, 1 the best one.</p>")
    if found.settings:
        parts.append(f"<h2>Settings that differ</h2>{table(*found.settings_table())}")
    parts.append(f"<h2>Runs</h2>{_runs(found)}")
    return whole_page(title, parts)


def whole_page(title: str, parts: list[str]) -> str:
    """The HTML of a page with these elements."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n'
        f"<body>{body}\n<script>{SCRIPT}</script></body></html>\n"
    )


def _about(found: Comparison) -> str:
    what = "the final evaluation" if found.is_evaluated else "the last training episodes"
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    return (
        "<p>Lines are the interquartile mean over runs, bands its 95 % interval (bootstrap over runs), returns in the table "
        f"those of {what}.</p>{f'<ul>{notes}</ul>' if notes else ''}"
    )


def _legend(found: Comparison, styles: dict[str, dict[str, Any]]) -> str:
    dashes = {"-": "", "--": "6 4", "-.": "6 3 1 3", ":": "1 3"}
    items = []
    for number, method in enumerate(found.methods):
        colour, dash = styles[method]["color"], dashes[styles[method]["linestyle"]]
        line = f'<line x2="26" y1="5" y2="5" x1="0" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
        items.append(
            f'<li><label><input type="checkbox" checked value="{number}"> <svg width="26" height="10">{line}</svg>'
            f"{escape(method)}</label></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _task_chart(found: Comparison, task: str, x: str, styles: dict[str, dict[str, Any]], name: str) -> str:
    figure = new_figure(5.4, 3.6)
    axes = figure.add_subplot()
    draw_task(axes, found, task, x, styles)
    axes.set_title("")
    return svg_figure(figure, name, f"{found.metric} against {x} on {task}")


def _profiles(found: Comparison, styles: dict[str, dict[str, Any]]) -> str:
    left, right = new_figure(5.4, 3.6), new_figure(5.4, 3.6)
    draw_profiles(left.add_subplot(), found, styles)
    draw_improvements(right.add_subplot(), found, styles)
    charts = svg_figure(left, "profile", "performance profile") + svg_figure(right, "improvement", "probability of improvement")
    return f'<div class="charts">{charts}</div>'


def svg_figure(figure: Any, name: str, described: str) -> str:
    """A drawing as an element of a page; `described` is for those who cannot see it."""
    return f'<figure role="img" aria-label="{escape(described)}">{as_svg(figure, name)}</figure>'


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table that can be copied as Markdown."""

    def row(cells: list[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table>{row(header, "th")}{body}</table><button>Copy as Markdown</button></div>'


def _runs(found: Comparison) -> str:
    rows = [
        [group.task, group.method, str(run.seed), run.state, f"{run.steps:,}", str(run.path)]
        for group in found.groups
        for run in group.runs
    ]
    return table(["task", "method", "seed", "state", "steps", "folder"], rows)

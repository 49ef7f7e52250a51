"""`convoy profile`: one offline HTML page that shows which rank waits for which."""

import html
from pathlib import Path

from pipeline import workspace
from pipeline.config import Config
from pipeline.errors import WorkspaceError
from pipeline.stages import read_train_report
from pipeline.traces import Traces, read_traces

_TEMPLATES = Path(__file__).with_name("templates")
_WIDTH, _ROW, _LEFT = 1000, 34, 70
_MOST_MEETINGS = 200


def write_profile(config: Config, root: Path) -> Path:
    """Write the page on the last training's traces beside the report, and give its path.

    Raises WorkspaceError when there was no training, or it recorded none.
    """
    run = workspace.RUNS / read_train_report().fingerprint[:16]
    page = render_profile(config.dataset, read_traces(root / run), run)
    path = root / workspace.PROFILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise WorkspaceError(f"{path} could not be written ({error.strerror})") from error
    return path


def render_profile(title: str, traces: Traces, directory: Path) -> str:
    """The page as HTML; `directory` is where the traces lie."""
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'\"><title>{name}: profile</title><style>{style}</style></head>"
        f'<body><header><p class="kicker">Profile of the last training</p><h1>{name}</h1></header>'
        f"<main><section><h2>Which rank waits for which</h2>{_say_who_waits(traces)}</section>"
        f"<section><h2>Collectives on one time line</h2>{draw_time_line(traces)}"
        "<p class=muted>A bar begins when the rank arrives and ends when the collective is done; "
        "clocks are aligned by the ends.</p></section>"
        f"<section><h2>Each collective</h2>{_list_meetings(traces)}</section></main>"
        f"<footer><p>The traces themselves, for Perfetto or chrome://tracing: "
        f"<code>{html.escape(str(directory))}/trace-*.json.gz</code>. They hold names of "
        "operations and no content of a record.</p></footer></body></html>\n"
    )


def _say_who_waits(traces: Traces) -> str:
    if len(traces.spans) == 1:
        return "<p>There is one rank: it waits for nobody.</p>"
    if not traces.meetings:
        return (
            "<p>In this layout ranks speak in groups of their own, and a trace does not say in "
            "which: the bars below show how long each was in its collectives.</p>"
        )
    ranked = sorted(traces.waited.items(), key=lambda item: -item[1])
    rows = "".join(
        f'<tr><th scope="row">{rank}</th><td class="number">{last}</td>'
        f'<td class="number">{waited:.2f}</td></tr>'
        for (rank, last), waited in ranked
    )
    (rank, last), most = ranked[0]
    return (
        f"<p>Most of all rank {rank} waits for rank {last}: {most:.1f} ms in "
        f"{len(traces.meetings)} collectives.</p>"
        '<div class="scroll"><table id="waits" class="compact"><thead><tr><th scope="col">Rank</th>'
        '<th scope="col" class="number">waits for rank</th>'
        f'<th scope="col" class="number">ms</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def draw_time_line(traces: Traces) -> str:
    """A row of bars for each rank, as an SVG element."""
    end = max((span.end for own in traces.spans.values() for span in own), default=0.0)
    scale = (_WIDTH - _LEFT) / end if end else 0.0
    parts = []
    for row, (rank, own) in enumerate(traces.spans.items()):
        top = row * _ROW
        parts.append(f'<text x="0" y="{top + 20}" fill="var(--ink)">rank {rank}</text>')
        parts += [
            f'<rect x="{_LEFT + span.start * scale:.2f}" y="{top + 6}" height="20" '
            f'width="{max(0.5, (span.end - span.start) * scale):.2f}" fill="var(--part-4)" '
            f'opacity="0.75"><title>{span.name}: {span.start:.2f} to {span.end:.2f} ms</title>'
            "</rect>"
            for span in own
        ]
    height = len(traces.spans) * _ROW + 22
    parts.append(
        f'<text x="{_LEFT}" y="{height - 4}" fill="var(--muted)">0</text>'
        f'<text x="{_WIDTH}" y="{height - 4}" text-anchor="end" fill="var(--muted)">'
        f"{end:.1f} ms</text>"
    )
    words = f"Collectives of {len(traces.spans)} ranks over {end:.1f} ms"
    return (
        f'<svg role="img" aria-label="{words}" viewBox="0 0 {_WIDTH} {height}" width="100%" '
        f'font-size="13">{"".join(parts)}</svg>'
    )


def _list_meetings(traces: Traces) -> str:
    longest = sorted(traces.meetings, key=lambda meeting: -max(meeting.waits.values()))
    shown = sorted(longest[:_MOST_MEETINGS], key=lambda meeting: meeting.start)
    if not shown:
        return "<p>None that all ranks take part in.</p>"
    ranks = "".join(f'<th scope="col" class="number">rank {r} waited</th>' for r in traces.spans)
    rows = "".join(
        f'<tr><th scope="row">{meeting.name}</th><td class="number">{meeting.start:.2f}</td>'
        f'<td class="number">{meeting.last}</td>'
        + "".join(f'<td class="number">{wait:.2f}</td>' for wait in meeting.waits.values())
        + "</tr>"
        for meeting in shown
    )
    return (
        f"<p>{len(shown)} of {len(traces.meetings)}, those with the longest waits; in ms.</p>"
        '<div class="scroll"><table id="meetings" class="compact"><thead><tr>'
        '<th scope="col">Collective</th><th scope="col" class="number">at</th>'
        f'<th scope="col" class="number">last to arrive</th>{ranks}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )

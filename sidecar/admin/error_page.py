"""The pages of the error codes.

Law: self-contained and without script: one style sheet, named by its hash in a policy that forbids everything else.
All text is escaped; `` `code` `` in it becomes code. Nothing of a request is shown but a code that was not found.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from html import escape

from aiohttp import web

from config.errors import ErrorCode
from config.keys import nearest

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6577;--line:#dfe3ea;--page:#f6f7f9;--card:#fff;--link:#1f5fd0;
--transient:#8a5a00;--permanent:#4a5468;--critical:#b3261e;--code:#eef1f6}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--line:#2c3442;--page:#12161d;--card:#1a202a;
--link:#7aa7ff;--transient:#f0b44c;--permanent:#a9b4c7;--critical:#ff8a80;--code:#252d3a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:46rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
a{color:var(--link);text-decoration:none}a:hover,a:focus{text-decoration:underline}
nav{font-size:.9rem;margin-bottom:1.5rem}
h1{font:600 1.75rem/1.2 ui-monospace,SFMono-Regular,Menlo,monospace;margin:0 0 .75rem;overflow-wrap:anywhere}
h2{font-size:.8rem;letter-spacing:.08em;text-transform:uppercase;color:var(--soft);margin:2rem 0 .5rem}
.lead{font-size:1.15rem;margin:0 0 1.25rem}
.facts{display:flex;flex-wrap:wrap;gap:.5rem;margin:0;padding:0;list-style:none}
.facts li{border:1px solid var(--line);border-radius:999px;padding:.15rem .75rem;font-size:.85rem;
background:var(--card)}
.facts b{color:var(--soft);font-weight:400;margin-right:.35rem}
.TRANSIENT{color:var(--transient)}.PERMANENT{color:var(--permanent)}.CRITICAL{color:var(--critical)}
section.next{border:1px solid var(--line);border-left:4px solid var(--link);border-radius:.5rem;background:var(--card);
padding:1rem 1.25rem;margin-top:2rem}
section.next h2{margin-top:0}section.next p{margin:0}
li{margin:.25rem 0}ul{padding-left:1.25rem;margin:0}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--code);border-radius:.25rem;
padding:.1em .35em;overflow-wrap:anywhere}
table{width:100%;border-collapse:collapse;background:var(--card);border:1px solid var(--line);font-size:.92rem}
th,td{text-align:left;padding:.5rem .75rem;border-top:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;border-top:0}
main:has(table){max-width:70rem}td:last-child{min-width:18rem}
td:first-child{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:.85rem}
.wide{overflow-x:auto}
""".strip()
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Vary": "Accept",
}
_RETRY = {
    "retryable": "sent again when that is safe",
    "conditional": "sent again only with an idempotency key",
    "fatal": "never sent again",
}
_PASSING_AND_FATAL = "not sent again here; the app may send it again later"
"""Of a code that is TRANSIENT: "never" would say that it does not pass."""
_CODE = re.compile(r"`([^`]+)`")


def respond(page: str, status: int = 200) -> web.Response:
    return web.Response(text=page, status=status, content_type="text/html", charset="utf-8", headers=_HEADERS)


def of(entry: ErrorCode) -> str:
    """What one code means and what to do."""
    facts = [
        ("", f'<span class="{escape(entry.category)}">{escape(entry.category)}</span>'),
        ("severity", escape(entry.severity)),
        ("retry", escape(_retry(entry))),
        ("status", str(entry.status)),
    ]
    if entry.policy is not None:
        facts.append(("policy", escape(entry.policy)))
    shown = "".join(f"<li>{f'<b>{name}</b>' if name else ''}{value}</li>" for name, value in facts)
    parts = [
        '<nav><a href="/errors">All error codes</a></nav>',
        f"<h1>{escape(entry.code)}</h1>",
        f'<p class="lead">{_text(entry.description)}</p>',
        f'<ul class="facts">{shown}</ul>',
        f'<section class="next"><h2>What to do</h2><p>{_text(entry.resolution)}</p></section>',
        _listed("What usually lies behind it", map(_text, entry.causes)),
        _listed("What it looks like", map(_text, entry.examples)),
        _listed("Related", map(_link, entry.related)),
    ]
    return _page(entry.code, parts)


def _retry(entry: ErrorCode) -> str:
    if entry.retry == "fatal" and entry.category == "TRANSIENT":
        return _PASSING_AND_FATAL
    return _RETRY.get(entry.retry, entry.retry)


def overview(registry: Mapping[str, ErrorCode]) -> str:
    """Every code in one table."""
    rows = "".join(
        f'<tr><td>{_link(entry.code)}</td><td class="{escape(entry.category)}">{escape(entry.category.lower())}</td>'
        f"<td>{escape(entry.retry)}</td><td>{entry.status}</td><td>{_text(entry.description)}</td></tr>"
        for entry in registry.values()
    )
    head = "<tr><th>Code</th><th>Category</th><th>Retry</th><th>Status</th><th>What happened</th></tr>"
    lead = "Every way a call can go wrong. The same word stands in answers, metrics, traces, logs and dead letters."
    return _page(
        "Error codes",
        [
            "<h1>Error codes</h1>",
            f'<p class="lead">{lead}</p>',
            f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>',
        ],
    )


def missing(code: str, registry: Mapping[str, ErrorCode]) -> str:
    """For a code that is not there."""
    near = nearest(code, registry)
    hint = f"<p>Did you mean {_link(near)}?</p>" if near is not None else ""
    return _page(
        "Unknown error code",
        [
            '<nav><a href="/errors">All error codes</a></nav>',
            "<h1>Unknown error code</h1>",
            f'<p class="lead">There is no code <code>{escape(code[:60])}</code>.</p>{hint}',
        ],
    )


def _page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · Sidecar</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _listed(title: str, items: Iterable[str]) -> str:
    rows = "".join(f"<li>{item}</li>" for item in items)
    return f"<h2>{title}</h2><ul>{rows}</ul>" if rows else ""


def _link(code: str) -> str:
    return f'<a href="/errors/{escape(code)}">{escape(code)}</a>'


def _text(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))

"""From what people paste to the lines that vLLM printed: encodings, colours, quotes, prefixes and notebooks.

A *record* is one message of a log. It may be wrapped over several lines, each with its own prefix; a message of a new
level, a blank line or a code fence ends it. A *logical line* is a line with its backslash continuations: a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
_LOST_COLOURS = re.compile(r"\[(?:\d{1,3}(?:;\d{1,3})*)?m")  # what is left of a colour where the escape was lost
_QUOTES = re.compile(r"^(?:\s{0,3}[>▎│┃]\s?)+")

# What stands before a line in other programs' output. They are taken off again and again, as they come in any order.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?\s+",  # ISO times
        r"(?:stdout|stderr) [FP] ",  # the container runtime of Kubernetes
        r"\[pod/[^\]]+\]\s*",  # kubectl logs --prefix
        r"[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d [\w.-]+ [\w./-]+(?:\[\d+\])?: ",  # journald
        r"\s*[\w.-]*\s*\|\s+(?=\(|\[|INFO|WARN|ERROR|DEBUG)",  # docker compose, Buildkite
        r"\s*\([\w.<>:]+(?: [\w.<>:]+)*[ ,]*(?:pid=\d+)(?:, ip=[\d.]+)?\)\s*",  # (EngineCore_DP0 pid=12), Ray
        r"\s*\((?:APIServer|EngineCore|Worker)\w*\)\s*",
        r"\s*\[rank\d+\]:\s*",
    )
)
_LEVEL = re.compile(
    r"\s*(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)"
    r"(?::\s+|\s+(?:\d[\d-]* [\d:.]+ )?(?:\[[\w./-]+:\d+\]|[\w./-]+\.py:\d+\]|[\w.]+:)\s*)"
)
NARROWEST_TERMINAL = 60
_FENCE = re.compile(r"\s*(?:```|~~~)")
_FLAG_LINE = re.compile(r"""\s*(?:-\s+)?["']?--?[a-z]""")
# Of a list in YAML: an item, and a line that ends with a flag whose value may be the next item.
_ITEM = re.compile(r"\s*-\s+[^\s-]")
_BARE_FLAG = re.compile(r"""(?:^|\s)-\s+["']?--?[A-Za-z][\w-]*["']?$""")


@dataclass(frozen=True, slots=True)
class Record:
    """One message, as its logical lines. `cut` says of each whether it fills the terminal that it was copied from."""

    lines: tuple[str, ...]
    cut: tuple[bool, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.lines).split())

    @property
    def uncut_text(self) -> str | None:
        """The same with cut lines joined as they are: a terminal cuts in the middle of a word. None without any."""
        if not any(self.cut[:-1]):
            return None
        joined = "".join(f"{line}{'' if cut else ' '}" for line, cut in zip(self.lines, self.cut, strict=True))
        return " ".join(joined.split())


@dataclass(frozen=True, slots=True)
class _Line:
    """A logical line; `opens` says that a record begins here, `cut` that it fills the width of the text."""

    text: str
    opens: bool
    cut: bool = False


def decode(raw: bytes) -> str:
    """Any file as text: UTF-8 and UTF-16 with or without a mark, and nothing that cannot be read raises."""
    for mark, encoding in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if raw.startswith(mark):
            return raw.decode(encoding, errors="replace")
    head = raw[:4096]
    if head and head.count(0) > len(head) // 4:  # PowerShell's > writes UTF-16, some editors drop its mark
        return raw.decode("utf-16-le" if head[1::2].count(0) > head[0::2].count(0) else "utf-16-be", errors="replace")
    return raw.decode("utf-8", errors="replace")


def records(text: str) -> Iterator[Record]:
    """Messages, each on one line whatever it was wrapped to."""
    parts: list[_Line] = []
    for line in (*_logical_lines(text), _Line("", opens=True)):
        if line.opens and parts:
            yield Record(tuple(part.text for part in parts), tuple(part.cut for part in parts))
            parts = []
        parts.append(line)


def _logical_lines(text: str) -> list[_Line]:
    """The text without what was put around it, line by line."""
    lines: list[_Line] = []
    opens, continued = True, False
    raws = _unpacked(text).splitlines()
    width = _terminal_width([len(raw) for raw in raws])
    for raw in raws:
        line, is_message = _bare(raw)
        if _FENCE.match(line) or not line.strip():
            opens, continued = True, False
            continue
        before = lines[-1].text if lines and not opens else ""
        is_flag = bool(_FLAG_LINE.match(line) and _FLAG_LINE.match(before))
        is_flag = is_flag or bool(_ITEM.match(line) and _BARE_FLAG.search(before))
        bare = line.strip().rstrip("\\").rstrip()
        if continued or is_flag:
            lines[-1] = _Line(f"{lines[-1].text} {bare}", lines[-1].opens)
        else:
            lines.append(_Line(bare, opens or is_message, cut=len(raw) == width))
        opens, continued = False, line.rstrip().endswith("\\")
    return lines


def _terminal_width(lengths: list[int]) -> int | None:
    """How wide the terminal was that a text was copied from: several lines are as long as the longest."""
    widest = max(lengths, default=0)
    return widest if widest >= NARROWEST_TERMINAL and lengths.count(widest) > 1 else None


def _bare(raw: str) -> tuple[str, bool]:
    """(the line without prefixes, whether a level was among them)."""
    line = _QUOTES.sub("", _LOST_COLOURS.sub("", _ESCAPES.sub("", raw)))
    while True:
        shorter = line
        for prefix in _PREFIXES:
            shorter = prefix.sub("", shorter, count=1) if prefix.match(shorter) else shorter
        if level := _LEVEL.match(shorter):
            return shorter[level.end() :], True
        if shorter == line:
            return line, False
        line = shorter


def _unpacked(text: str) -> str:
    """Notebooks and container logs are JSON around the text; the rest is as it is."""
    start = text.lstrip()[:1]
    if start != "{":
        return text
    try:
        whole = json.loads(text)
    except ValueError:
        return "\n".join(_log_entry(line) for line in text.splitlines())
    return "\n".join(_notebook(whole)) if isinstance(whole, dict) and "cells" in whole else _log_entry(text)


def _log_entry(line: str) -> str:
    """One line of `docker logs` as JSON, or of a structured log; any other line unchanged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    found = next((entry[name] for name in ("log", "message", "msg", "textPayload") if name in entry), line)
    return str(found).rstrip("\n")


def _notebook(whole: dict[str, object]) -> Iterator[str]:
    """Sources and outputs of every cell, in order."""
    cells = whole["cells"]
    for cell in cells if isinstance(cells, list) else ():
        if not isinstance(cell, dict):
            continue
        yield _joined(cell.get("source"))
        outputs = cell.get("outputs")
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, dict):
                data = output.get("data")
                plain = data.get("text/plain") if isinstance(data, dict) else None
                yield "\n".join(map(_joined, (output.get("text"), plain, output.get("traceback"))))


def _joined(lines: object) -> str:
    if isinstance(lines, list):
        return "".join(str(line) if str(line).endswith("\n") else f"{line}\n" for line in lines)
    return str(lines or "")

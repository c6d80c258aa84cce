"""A run's page as others get it: without the places and the names of the machines that it was made on.

sent(held("run", Ask({}, (Path("runs/demo"),))))
"""

import re
from typing import Any

# Where a path begins: at a root, a drive, a share, a home, or a URL that names a file of a machine. A slash within a
# word ("tokens/s", "runs/demo") begins none, but for that of an option ("-I/usr/include").
_URL = r"\b(?:file|ssh|scp|sftp|smb|nfs|hdfs):(?://[^\s/'\"]*)?(?=[/\\])"
_ROOT = r"(?:(?<![\w.~/:\\])|(?<=\s-\w)|(?<=\A-\w))/+|(?<=:)/(?![/\s])"
_HOME, _DRIVE, _SHARE = r"(?<!\w)~(?:[A-Za-z_][\w.-]*)?[/\\]+", r"(?<!\w)[A-Za-z]:(?:\\+|/(?!/))", r"(?<![\w\\])\\\\+"
_BEGINS = rf"(?i:{_URL})[/\\]+|{_HOME}|{_DRIVE}|{_SHARE}|{_ROOT}"
# A name in the middle: punctuation and up to five blanks may be in it, if a separator comes behind. Numbers and units
# before a slash are no names: "1/200", "tokens/s".
_WORD = r"(?:[^\s/\\:;,'\"()\[\]{}<>|]|[:;,'\"(\[{<>|](?=[\w.-])|[)\]}](?=[\w./\\-]))+"
_UNIT = r"(?<!\s\d)(?<!\s(?:it|or|\d\d|[kKMGT]B))(?<!\s(?:and|\d\d\d|[KMGT]iB))(?<!tokens)(?<!samples)(?<!steps)"
_BETWEEN = rf"(?:{_WORD}(?:[ ](?!-){_WORD}){{0,5}}{_UNIT}[/\\]+)"
_LAST = r"[^\s/\\:;,'\"()\[\]{}<>|]*"
_PATH = re.compile(rf"(?P<begins>{_BEGINS})(?P<between>{_BETWEEN}*)(?P<last>{_LAST})")
_QUOTED = re.compile(rf"(?P<quote>['\"`])(?P<path>(?:{_BEGINS})[^'\"`\n]*)(?P=quote)")
_WHOLE = re.compile(rf"(?:{_BEGINS})[^\n]*")
_SENTENCE = re.compile(r"[:;,]\s")
_SAID = ("text", "command", "left_out")  # keys of sentences; what begins as a path elsewhere is one, whatever is in it
_HOMES = re.compile(r"(?i)(?:/home|/users|[a-z]:[\\/]+users)[\\/]+[^\\/]+[\\/]*")
_ALONE = re.compile(r"/[^/\\]*")  # a name at the root is no place: "/s", "/ 2"
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
_HOST = re.compile(r"\brank \d+ on (\S+)")  # of run_events.py


def sent(view: dict[str, Any]) -> dict[str, Any]:
    """The same view: of a path its last part is left, and of a host nothing. What a log says beyond that stays."""
    page = view["payload"]
    told = [one["text"] for run in page["shown"] for one in run["events"]]
    hosts = {found for text in told for found in _HOST.findall(text)}
    places = _places([[run["directory"], run["job"], run["environment"]] for run in page["shown"]])
    shown = [
        run | {"events": [one | {"text": _unnamed(_nearer(one["text"], places), hosts)} for one in run["events"]]}
        for run in page["shown"]
    ]
    parts = {"parts": placeless(view["parts"])} if "parts" in view else {}
    return view | {"payload": placeless(page | {"shown": shown, "notes": []})} | parts


def placeless(value: Any, said: bool = True) -> Any:
    """Every text of it, in which a path is its last part. `said`: texts may be sentences."""
    if isinstance(value, str):
        return _scrubbed(value, said) if "/" in value or "\\" in value else value
    if isinstance(value, dict):
        return {placeless(name, False): placeless(one, name in _SAID) for name, one in value.items()}
    return [placeless(one, said) for one in value] if isinstance(value, list | tuple) else value


def _scrubbed(text: str, said: bool) -> str:
    text = _LOGIN.sub("", text)
    if _WHOLE.fullmatch(text) and not _ALONE.fullmatch(text) and not (said and _SENTENCE.search(text)):
        return _last(text)  # blanks are its own
    text = _QUOTED.sub(lambda found: found["quote"] + _last(found["path"]) + found["quote"], text)
    return _PATH.sub(_left, text)


def _left(found: re.Match[str]) -> str:
    return found[0] if _ALONE.fullmatch(found[0]) else _last(found[0])


def _last(path: str) -> str:
    """The last part; of a directory with a separator behind it, and of somebody's home, nothing."""
    name = re.split(r"[/\\]", path)[-1]
    return "..." if not name or _HOMES.fullmatch(re.sub(r"(?i)^file:(//[^/]*)?", "", path)) else name


def _places(value: Any) -> list[str]:
    """Every text that is a path as a whole, and the folders above it, the longest first."""
    if isinstance(value, dict | list):
        found = {one for inner in (value.values() if isinstance(value, dict) else value) for one in _places(inner)}
        return sorted(found, key=len, reverse=True)
    if not isinstance(value, str) or not _WHOLE.fullmatch(value):
        return []
    parts = value.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts), 2, -1)]


def _nearer(text: str, places: list[str]) -> str:
    """With a plain name for the folders that are known: theirs may have any characters."""
    for place in places:
        text = re.sub(rf"(?<![\w.~/]){re.escape(place)}/+", "/-/", text) if place in text else text
    return text


def _unnamed(text: str, hosts: set[str]) -> str:
    text = re.sub(r", rank 0 on \S+$", "", text)
    for host in hosts:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "its host", text)
    return text

"""Makes a run's page shareable: without the paths and host names of the machines that it was made on.

make_shareable(answered_view("run", Ask({}, (Path("runs/demo"),))))
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
_MAX_PATH_CHARACTERS, _MAX_PATH_DEPTH = 4096, 64
_SENTENCE_KEYS = ("text", "command", "left_out")  # under other keys, text that begins as a path is one
_HOMES = re.compile(r"(?i)(?:/home|/users|[a-z]:[\\/]+users)[\\/]+[^\\/]+[\\/]*")
_ALONE = re.compile(r"/[^/\\]*")  # a name at the root is no place: "/s", "/ 2"
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
_HOST = re.compile(r"\brank \d+ on (\S+)")  # in the text of a start (`run_files._start_event`)


def make_shareable(view: dict[str, Any]) -> dict[str, Any]:
    """The view with only the last part of each path, and no host names. Other text of logs stays."""
    page = view["payload"]
    texts = [event["text"] for run in page["shown"] for event in run["events"]]
    hosts = {host for text in texts for host in _HOST.findall(text)}
    places = _places([[run["directory"], run["job"], run["environment"]] for run in page["shown"]])
    shown = [
        run
        | {
            "events": [
                event | {"text": _without_hosts(_without_folders(event["text"], places), hosts)}
                for event in run["events"]
            ]
        }
        for run in page["shown"]
    ]
    parts = {"parts": without_paths(view["parts"])} if "parts" in view else {}
    return view | {"payload": without_paths(page | {"shown": shown, "notes": []})} | parts


def without_paths(value: Any, *, may_be_sentence: bool = True) -> Any:
    """The value, with paths in all of its texts cut to their last part. A text that begins as a path is one as a whole,
    unless it `may_be_sentence`."""
    if isinstance(value, str):
        return _scrub(value, may_be_sentence=may_be_sentence) if "/" in value or "\\" in value else value
    if isinstance(value, dict):
        return {
            without_paths(name, may_be_sentence=False): without_paths(inner, may_be_sentence=name in _SENTENCE_KEYS)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_paths(inner, may_be_sentence=may_be_sentence) for inner in value]
    return value


def _scrub(text: str, *, may_be_sentence: bool) -> str:
    text = _LOGIN.sub("", text)
    if _WHOLE.fullmatch(text) and not _ALONE.fullmatch(text) and not (may_be_sentence and _SENTENCE.search(text)):
        return _last_part(text)  # blanks belong to the path
    text = _QUOTED.sub(lambda match: match["quote"] + _last_part(match["path"]) + match["quote"], text)
    return _PATH.sub(lambda match: match[0] if _ALONE.fullmatch(match[0]) else _last_part(match[0]), text)


def _last_part(path: str) -> str:
    """The last part of a path; "..." for a path that ends with a separator, and for somebody's home."""
    name = re.split(r"[/\\]", path)[-1]
    return "..." if not name or _HOMES.fullmatch(re.sub(r"(?i)^file:(//[^/]*)?", "", path)) else name


def _places(value: Any) -> list[str]:
    """All texts in a value that are paths as a whole, and the folders above them, the longest first. To limit memory, a
    text longer than any path of Linux is skipped, and of a deep path only the upper folders are listed."""
    if isinstance(value, dict | list):
        places = {place for inner in (value.values() if isinstance(value, dict) else value) for place in _places(inner)}
        return sorted(places, key=len, reverse=True)
    if not isinstance(value, str) or len(value) > _MAX_PATH_CHARACTERS or not _WHOLE.fullmatch(value):
        return []
    parts = value.split("/")[:_MAX_PATH_DEPTH]
    return ["/".join(parts[:count]) for count in range(len(parts), 2, -1)]


def _without_folders(text: str, places: list[str]) -> str:
    """The text with "/-/" for each known folder, whose names may have characters that `_PATH` does not match."""
    for place in places:
        text = re.sub(rf"(?<![\w.~/]){re.escape(place)}/+", "/-/", text) if place in text else text
    return text


def _without_hosts(text: str, hosts: set[str]) -> str:
    text = re.sub(r", rank 0 on \S+$", "", text)
    for host in hosts:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "its host", text)
    return text

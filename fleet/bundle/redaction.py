"""Take secrets out of texts: those that the inventory knows, wherever they stand, and what looks like one."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REMOVED = "<removed>"
# A shorter one is part of other words: its own place is emptied by its name.
SHORTEST = 5
# Of a key in a record, before = or : in a text, or of an option.
_PLAIN = (
    r"(?:[\w.-]*(?:passw(?:or)?d|passphrase|passwd|secret|token|api[_-]?key|apikey|private[_-]?key|credential|authorization"
    r"|access[_-]?key|become_pass|ssh_pass|webhook|cookie|(?:amz|goog)-signature"
    r"|(?:account|client|deploy|encryption|master|shared|signing|ssh|storage)[_-]?key)[\w.-]*"
    r"|[\w.-]*_(?:auth|pass|pwd))"
)
# In prose, as before a count of what passed, these are words as others.
_WORDS = r"(?:pass|auth)"
SENSITIVE = rf"(?:{_PLAIN}|{_WORDS})"
# What these name is a path or the name of a secret, which a report needs.
NAMES_ONE = re.compile(r".*(?:_file|_path|_seconds|_keep)\Z|notify_webhook_secret\Z|release_key\Z")
_REST = r"[^\s'\"<>]+"
_HOOKS = r"(?:hooks?|discord|hc-ping|healthchecks|ifttt|ntfy|office|opsgenie|pagerduty|telegram|webhook|zapier)"
_PARAMETER = r"[\w.-]*(?:key|token|sig|signature|secret|password|auth)[\w.-]*="
_KEY_KINDS = (
    r"(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"AIza[\w-]{35}",
    r"AGE-SECRET-KEY-1[A-Z0-9]{20,}",
    r"GOCSPX-[\w-]{16,}",
    r"SG\.[\w-]{16,}\.[\w-]{16,}",
    r"dapi[0-9a-f]{32}\b",
    r"dckr_pat_[\w-]{16,}",
    r"dop_v1_[0-9a-f]{32,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    r"eyJ[A-Za-z0-9_-]{40,}={0,2}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"github_pat_\w{20,}",
    r"glpat-[\w-]{16,}",
    r"glsa_[A-Za-z0-9_]{20,}",
    r"hf_[A-Za-z0-9]{20,}",
    r"hv[bs]\.[\w-]{20,}",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[\w-]{16,}",
    r"sk-[\w-]{20,}",
    r"[rs]k_(?:live|test)_\w{16,}",
    r"tskey-[\w-]{16,}",
    r"xapp-[\w-]{10,}",
    r"xox[abprs]-[A-Za-z0-9-]{10,}",
    r"ya29\.[\w-]{20,}",
)
_PEM = r"[A-Z0-9 ]*PRIVATE KEY-----"
_BEFORE = r"(?<![\w.-])"
_NAMED = rf"{_BEFORE}{SENSITIVE}"
# In quotation marks that are themselves within a text of JSON, in some of their own, as YAML's lines further in, or
# bare: to what ends it and is not followed by more of it.
_VALUE = (
    r"(?P<marks>\\+[\"'])[^\n]*?(?P=marks)|\"(?:\\.|[^\"\\\n])*\"|'(?:''|\\.|[^'\\\n])*'"
    r"|[|>][+-]?\d?[ \t]*(?:\n[ \t]+[^\n]*)+"
    r"|(?:[^\s,;\"'}\]\[{<>\\]|[,;\"'}\]\[{<>\\](?=[^\s,;:\"'}\]\[{<>\\]))+"
)
# What was removed already, and a list of numbers, which is no secret.
_NO_VALUE = r"(?!<removed>[,;}\])]*(?:[\s\"'\\]|\Z)|\[\s*-?\d[\d.]*\s*[,\]])"
_IS_WORDS = r"(?:\\*[\"']\s*(?:=>|:=|[:=])|\s*(?:=>|:=|=)|\s*:(?=\s*\\*[\"']))"
# Commands whose user has no password beside it.
_NO_LOGIN = r"(?<!systemctl )(?<!journalctl )(?<!systemd-run )(?<!\bps )"
_KEYS_END = re.compile(rf"-----END {_PEM}")
_KEYS_LINE = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{12,}={0,2}[ \t]*\Z")
_MARKS = re.compile(r"\\*[\"']")


def _empty(found: re.Match[str]) -> str:
    """Keep a value's quotation marks, so that JSON is still JSON."""
    marks = _MARKS.match(found[2])
    mark = marks[0] if marks else ""
    return f"{found[1]}{mark}{REMOVED}{mark}"


PATTERNS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"-----BEGIN {_PEM}.*?(?:-----END {_PEM}|\Z)", re.DOTALL), REMOVED),
    # PuTTY's.
    (re.compile(r"(?m)^(Private-Lines:[^\n]*\n)(?:[A-Za-z0-9+/=]+\n?)+"), rf"\1{REMOVED}\n"),
    (re.compile(r"\$ANSIBLE_VAULT;[^\n]*(?:\s+[0-9a-f]{20,})*"), REMOVED),
    # Login and password of an address, and what follows the host of a webhook.
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/'\"<>]+@"), rf"\1{REMOVED}@"),
    (re.compile(rf"\b(https?://[^\s/'\"<>]*{_HOOKS}[^\s/'\"<>]*)/{_REST}", re.IGNORECASE), rf"\1/{REMOVED}"),
    (
        re.compile(rf"\b(https?://[^\s/'\"<>]+)/(?:[^\s'\"<>]*/)?(?:hooks?|webhooks?|services)/{_REST}"),
        rf"\1/{REMOVED}",
    ),
    (re.compile(rf"([?&]{_PARAMETER})[^&\s'\"<>]+", re.IGNORECASE), rf"\1{REMOVED}"),
    # Headers, whose values have several words.
    (
        re.compile(r"(?i)(?<![\w-])((?:proxy-)?authorization\\*[\"']?\s*[:=]\s*\\*[\"']?)[^\n\"'\\]+"),
        rf"\1{REMOVED}",
    ),
    (re.compile(r"(?i)(?<![\w-])((?:set-)?cookie: *)[^\n\"'\\]+"), rf"\1{REMOVED}"),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/._~-]{8,}=*", re.IGNORECASE), rf"\1 {REMOVED}"),
    # Commands: of curl and the like, of sshpass, a file .netrc, and options that name one.
    (re.compile(rf"(?<![\w-]){_NO_LOGIN}((?:-u|--user|--proxy-user)[\s=]+[^\s:]+:)\S+"), rf"\1{REMOVED}"),
    # Of databases: in a login's text, and as an option with its value beside it.
    (re.compile(r"(?i)((?:\A|[;\s\"'])pwd\s*=\s*)(?![/~])[^\s;\"']+"), rf"\1{REMOVED}"),
    (re.compile(r"\b((?:mariadb|mysql)[\w-]*\s(?:[^\n;|&]*\s)?-p)[^\s\"';|&]+"), rf"\1{REMOVED}"),
    (re.compile(r"\b(redis-cli\s(?:[^\n;|&]*\s)?-a\s+)[^\s\"']+"), rf"\1{REMOVED}"),
    # As /etc/shadow and htpasswd have them: a short password is found from these.
    (re.compile(r"\$(?:apr1|2[aby]|5|6|y)\$[./A-Za-z0-9$=,]{20,}"), REMOVED),
    (re.compile(r"\b(sshpass\s+-p\s*|login\s+\S+\s+password\s+)\S+"), rf"\1{REMOVED}"),
    (re.compile(rf"(?i)((?<![\w-])--?{SENSITIVE}(?:[ \t]+|\\*[\"'],\s*\\*[\"']))(?!-)[^\s\"'\\]+"), rf"\1{REMOVED}"),
    (re.compile(rf"\b(?:{'|'.join(_KEY_KINDS)})"), REMOVED),
    # A WireGuard key: 32 bytes as base64.
    (re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=(?![A-Za-z0-9+/=])"), REMOVED),
    (re.compile(rf"(?i)(\"{SENSITIVE}=)[^\"\n]+(?=\")"), rf"\1{REMOVED}"),
    (
        re.compile(
            rf"(?i)(name\\*[\"']?\s*[:=]\s*\\*[\"']?{SENSITIVE}\\*[\"']?,?\s+\\*[\"']?value\\*[\"']?\s*[:=]\s*)({_VALUE})"
        ),
        _empty,
    ),
    (re.compile(rf"(?i)(<{SENSITIVE}>)[^<]+(?=</)"), rf"\1{REMOVED}"),
    (re.compile(rf"(?i)({_NAMED}%3[ad](?:%2[027])*)[^\s&\"'%]+"), rf"\1{REMOVED}"),
    (re.compile(rf"(?i)({_BEFORE}{_PLAIN}\\*[\"']?\s*(?:=>|:=|[:=])\s*){_NO_VALUE}({_VALUE})"), _empty),
    (re.compile(rf"(?i)({_BEFORE}{_WORDS}{_IS_WORDS}\s*){_NO_VALUE}({_VALUE})"), _empty),
    # A line of YAML.
    (re.compile(rf"(?im)(^[ \t]*(?:- )?{_WORDS}:[ \t]+){_NO_VALUE}({_VALUE})(?=[ \t]*$)"), _empty),
)
_KEY = re.compile(rf"(?i){SENSITIVE}")
_OPTION = re.compile(rf"(?i)--?{SENSITIVE}")


class Redactor:
    """Removes secrets from texts and records, and proves that none is left."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {each for secret in secrets for each in _forms(secret) if len(each) >= SHORTEST}
        longest = sorted(found, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest))) if longest else None

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        for pattern, replacement in PATTERNS:
            text = pattern.sub(replacement, text)
        return _without_ends_of_keys(text)

    def file(self, name: str, text: str) -> str:
        """Return a file's text without secrets: as a record where its name says that it is one, and it is whole."""
        try:
            if name.endswith(".json"):
                return json.dumps(self.record(json.loads(text)), indent=1) + "\n"
            if name.endswith(".jsonl"):
                return "".join(f"{self._line(line)}\n" for line in text.removesuffix("\n").split("\n"))
        except ValueError:
            pass
        return self.text(text)

    def _line(self, line: str) -> str:
        try:
            return json.dumps(self.record(json.loads(line)))
        except ValueError:  # a journal's first line may be cut off
            return self.text(line)

    def record(self, value: Any) -> Any:
        """Return a record without secrets: the values of keys that name one, and each text by itself."""
        if isinstance(value, Mapping):
            named = {"value"} if _KEY.fullmatch(str(value.get("name", ""))) else set()
            return {
                self.text(str(key)): REMOVED if key in named else self._value(str(key), each)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                REMOVED if _OPTION.fullmatch(str(before)) and not str(each).startswith("-") else self.record(each)
                for before, each in zip(["", *value], value, strict=False)
            ]
        if isinstance(value, int | float):
            return REMOVED if self.leaks(str(value)) else value
        return self.text(value) if isinstance(value, str) else value

    def _value(self, key: str, value: Any) -> Any:
        if _KEY.fullmatch(key) and not NAMES_ONE.fullmatch(key) and value not in (None, "", [], {}, False, True):
            return REMOVED
        return self.record(value)

    def leaks(self, text: str) -> bool:
        """Whether a secret that the inventory knows is in a text."""
        return self._known is not None and self._known.search(text) is not None


def _without_ends_of_keys(text: str) -> str:
    """Empty keys whose beginning is before a journal's first line."""
    *before, rest = _KEYS_END.split(text)
    for number, part in enumerate(before):
        lines = part.split("\n")[:-1]  # what is in the line of the end itself is a journal's time
        while lines and _KEYS_LINE.search(lines[-1]):
            lines.pop()
        before[number] = "\n".join([*lines, REMOVED])
    return "".join([*before, rest])


def _forms(secret: str) -> Iterator[str]:
    """Yield how a secret may be written, also its lines, as of a key."""
    secret = secret.strip()
    yield from (secret, quote(secret), quote(secret, safe=""), quote_plus(secret), html.escape(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])
    yield shlex.quote(secret)
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(secret.encode()).decode()
        yield from (encoded, encoded.rstrip("="))
    if "\n" in secret:
        yield from (line.strip() for line in secret.splitlines())

"""Take secrets out of texts: those that the inventory knows, wherever they stand, and what looks like one."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REMOVED = "<removed>"
# A shorter one is part of other words: its own place is emptied by its name.
SHORTEST = 5
# Of a key in a record, or before = or : in a text.
SENSITIVE = (
    r"[\w.-]*(?:passw(?:or)?d|passphrase|passwd|secret|token|api[_-]?key|apikey|private[_-]?key|credential|authorization"
    r"|access[_-]?key|become_pass|ssh_pass|webhook)[\w.-]*"
)
# What these name is a path or the name of a secret, which a report needs.
NAMES_ONE = re.compile(r".*(?:_file|_path|_seconds|_keep)\Z|notify_webhook_secret\Z|release_key\Z")
_REST = r"[^\s'\"<>]+"
_HOOKS = r"(?:hooks?|discord|webhook|office|telegram|pagerduty|opsgenie)"
_PARAMETER = r"[\w.-]*(?:key|token|sig|signature|secret|password|auth)[\w.-]*="
_KEY_KINDS = (
    r"(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"xox[abprs]-[A-Za-z0-9-]{10,}",
    r"hf_[A-Za-z0-9]{20,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
)
_PEM = r"[A-Z0-9 ]*PRIVATE KEY-----"


def _empty(found: re.Match[str]) -> str:
    """Keep a value's quotation marks, so that JSON is still JSON."""
    mark = found[2][0] if found[2][0] in "\"'" else ""
    return f"{found[1]}{mark}{REMOVED}{mark}"


PATTERNS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"-----BEGIN {_PEM}.*?(?:-----END {_PEM}|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"\$ANSIBLE_VAULT;[^\n]*(?:\s+[0-9a-f]{20,})*"), REMOVED),
    # Login and password of an address, and what follows the host of a webhook.
    (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@'\"<>]+@"), rf"\1{REMOVED}@"),
    (re.compile(rf"\b(https?://[^\s/'\"<>]*{_HOOKS}[^\s/'\"<>]*)/{_REST}", re.IGNORECASE), rf"\1/{REMOVED}"),
    (
        re.compile(rf"\b(https?://[^\s/'\"<>]+)/(?:[^\s'\"<>]*/)?(?:hooks?|webhooks?|services)/{_REST}"),
        rf"\1/{REMOVED}",
    ),
    (re.compile(rf"([?&]{_PARAMETER})[^&\s'\"<>]+", re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/._~-]{8,}=*", re.IGNORECASE), rf"\1 {REMOVED}"),
    (re.compile(rf"\b(?:{'|'.join(_KEY_KINDS)})"), REMOVED),
    # A WireGuard key: 32 bytes as base64.
    (re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=(?![A-Za-z0-9+/=])"), REMOVED),
    (
        re.compile(rf"(?i)((?<![\w.-]){SENSITIVE}[\"']?\s*[:=]\s*)(\"[^\"\n]+\"|'[^'\n]+'|[^\s,;\"'}}\]\[{{]+)"),
        _empty,
    ),
)
_KEY = re.compile(rf"(?i){SENSITIVE}")


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
        return text

    def record(self, value: Any) -> Any:
        """Return a record without secrets: the values of keys that name one, and each text by itself."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._value(str(key), each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.record(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def _value(self, key: str, value: Any) -> Any:
        if _KEY.fullmatch(key) and not NAMES_ONE.fullmatch(key) and value not in (None, "", [], {}, False, True):
            return REMOVED
        return self.record(value)

    def leaks(self, text: str) -> bool:
        """Whether a secret that the inventory knows is in a text."""
        return self._known is not None and self._known.search(text) is not None


def _forms(secret: str) -> Iterator[str]:
    """Yield how a secret may be written, also its lines, as of a key."""
    secret = secret.strip()
    yield from (secret, quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1])
    yield base64.b64encode(secret.encode()).decode()
    if "\n" in secret:
        yield from (line.strip() for line in secret.splitlines())

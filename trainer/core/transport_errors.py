"""What TensorFlow and gRPC say when the network, or a server at its other end, is what went wrong.

One table: trying again may help after each of its rows. A row is precise where the same class of error may be the
user's own. Needs no TensorFlow: errors are given by the name of their class, as in tf.errors.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class TransportError(NamedTuple):
    """Errors of these classes whose message has this pattern; `why` says what has happened."""

    classes: tuple[str, ...]
    pattern: re.Pattern[str]
    why: str


OF_A_CALL = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
# The classes that gRPC gives to what breaks in the middle of a call; a program's own functions raise them as well.
AMBIGUOUS = ("UnknownError", "InternalError")
ANY = ("OpError",)


def whole_line(text: str) -> re.Pattern[str]:
    """Match a line of a message that says this and nothing else but TensorFlow's marks of an operation.

    A program's own error begins with its type, as "ConnectionResetError: ...", and so is another line.
    """
    before = r"^[ \t]*(\(\d+\) \w+:[ \t]*)?(\{\{function_node [^}]*\}\}[ \t]*)*"
    return re.compile(rf"{before}({text})[ \t]*(\[.*)?$", re.MULTILINE)


def phrase(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


PORT_TAKEN = phrase("could not start grpc server")
TABLE = (
    TransportError(OF_A_CALL, phrase(""), "a call was ended from outside: by a server, its end, or a deadline"),
    TransportError(AMBIGUOUS, whole_line("Stream removed"), "the connection broke before the answer came"),
    TransportError(AMBIGUOUS, whole_line(r"Received RST_STREAM with (error )?code \d+.*"), "a server reset the call"),
    TransportError(AMBIGUOUS, whole_line(r'\{"created":.*"description":"RST_STREAM".*\}'), "a server reset the call"),
    TransportError(AMBIGUOUS, whole_line("Socket closed|Transport closed"), "a server has ended"),
    TransportError(AMBIGUOUS, whole_line("Connection reset by peer|Broken pipe"), "a server has ended"),
    TransportError(AMBIGUOUS, whole_line("(recvmsg|sendmsg):.+"), "the socket failed"),
    TransportError(AMBIGUOUS, whole_line("GOAWAY received(;.*)?"), "a server asked for no more calls"),
    TransportError(AMBIGUOUS, whole_line("keepalive watchdog timeout"), "a server was silent"),
    TransportError(AMBIGUOUS, whole_line("failed to connect to all addresses(;.*)?"), "no process listens there"),
    TransportError(ANY, PORT_TAKEN, "the port is taken, as by the process before"),
    TransportError(ANY, phrase(r"unable to find a context_id matching"), "the server is a new process"),
    TransportError(ANY, phrase("unable to find the relevant tensor remote_handle"), "the server is a new process"),
    TransportError(ANY, phrase("unknown device"), "the server is a new process"),
    TransportError(ANY, phrase("primary device is not remote"), "the server is a new process"),
    TransportError(ANY, phrase(r"invalid rendezvous key \(src\)"), "the server is another coordinator's by now"),
    TransportError(ANY, phrase("iteration client id not found"), "the dispatcher lost its journal and its jobs"),
    TransportError(
        ANY,
        phrase("is neither a type of a primitive operation nor a name of a function registered"),
        "the server is a new process, without the traced functions",
    ),
    TransportError(
        ANY,
        phrase(
            r"could mean that the (resource|variable) (was|has been)|resource \S+ does not exist"
            r"|container \S+ does not exist"
        ),
        "the server is a new process, without the variables",
    ),
)


def transport_error(classes: tuple[str, ...], message: str) -> TransportError | None:
    """Return the row for an error, given the names of its class and the classes above it; None when there is none."""
    for row in TABLE:
        if set(row.classes) & set(classes) and row.pattern.search(message):
            return row
    return None

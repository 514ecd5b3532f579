"""What several of the scripts beside the tests do.

A `*_check.py` is a process of its own: TensorFlow is set up once in a process, and output and end are the program's.
"""

import http.server
import traceback

import numpy as np

POSTS = []  # what Posts was sent


def tried(part, *arguments, **named):
    """One program's error is one test's."""
    try:
        return part(*arguments, **named)
    except Exception as error:
        traceback.print_exc()
        return repr(error)


def distance(left, right):
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


class Posts(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        POSTS.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

#!/usr/bin/env python3
"""A receiver of timers' HTTP callbacks that believes only what is signed (Standard Webhooks), with Python's own library.

. data/env && python3 examples/webhook_receiver.py 9000

It prints each callback once, however often it is sent, and refuses what is forged or old.
"""

import base64
import hashlib
import hmac
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

SECRET = base64.b64decode(os.environ["TIDEMARK_WEBHOOK_SECRET"].removeprefix("whsec_"))
TOLERANCE = 300
SEEN = set()


def is_signed(headers, body):
    """Whether one of the signatures is ours. There are two while a secret is rotated."""
    name, moment = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not moment.isdigit() or abs(time.time() - int(moment)) > TOLERANCE:
        return False
    digest = hmac.new(SECRET, f"{name}.{moment}.".encode() + body, hashlib.sha256).digest()
    expected = "v1," + base64.b64encode(digest).decode()
    return any(hmac.compare_digest(expected, given) for given in headers.get("webhook-signature", "").split(" "))


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        signed = is_signed(self.headers, body)
        self.send_response(204 if signed else 401)
        self.end_headers()
        name = self.headers.get("webhook-id")
        if not signed:
            print("refused", flush=True)
        elif name not in SEEN:
            SEEN.add(name)
            print("received", body.decode(), flush=True)

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 9000), Receiver)
print("listening on", server.server_port, flush=True)
server.serve_forever()

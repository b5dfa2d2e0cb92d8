#!/usr/bin/env python3
"""Tidemark over plain NATS: no library of ours, only nats-py (`pip install nats-py`).

. data/env && python3 examples/plain_nats.py

Everything is a request on a subject with a JSON body; an error has headers and a body that says what is wrong.
"""

import asyncio
import json
import os
import uuid
from datetime import datetime, timezone

import nats


async def ask(nc, subject, body=None, headers=None):
    reply = await nc.request(subject, json.dumps(body or {}).encode(), timeout=5, headers=headers)
    answer = json.loads(reply.data)
    if reply.headers and "Nats-Service-Error-Code" in reply.headers:
        raise RuntimeError(f"{reply.headers['Nats-Service-Error-Code']} {answer['code']}: {answer['message']}")
    return answer


async def main():
    nc = await nats.connect(os.environ["NATS_URL"])

    # A key to count with. Only the operator may make one.
    await ask(nc, "tm.id.config.set-increment.python", {"base": 100})
    print("ids", (await ask(nc, "tm.id.increment.python", {"size": 3}))["id"])

    # The same request again gets the same answer.
    once = {"Idempotency-Key": str(uuid.uuid4())}
    first = await ask(nc, "tm.id.increment.python", headers=once)
    assert first == await ask(nc, "tm.id.increment.python", headers=once)

    # A timer that publishes in five seconds.
    heard = await nc.subscribe("python.reminders")
    timer = await ask(
        nc,
        "tm.timer.create.default",
        {"execute_in": "5s", "callback": {"type": "nats", "topic": "python.reminders", "payload": {"hello": "later"}}},
    )
    print("timer", timer["status"])

    # Usage is published into the stream. Only its acknowledgement says that it is kept.
    unit = f"python_{uuid.uuid4().hex[:8]}"
    await ask(
        nc,
        "tm.usage.unit-register",
        {
            "name": unit,
            "metric_kind": "gauge",
            "base_unit": "call",
            "schema": {"type": "object"},
            "allowed_sources": ["default"],
        },
    )
    record = {
        "usage_type": unit,
        "resource_id": "script",
        "value": 1,
        "event_timestamp": datetime.now(timezone.utc).isoformat(),
        "idempotency_key": str(uuid.uuid4()),
    }
    kept = await nc.jetstream().publish("usage.default.default", json.dumps(record).encode())
    print("usage is kept in", kept.stream)

    # What is wrong is said.
    try:
        await ask(nc, "tm.id.increment.nothing")
    except RuntimeError as error:
        print("refused:", error)

    message = await heard.next_msg(timeout=20)
    print("heard", json.loads(message.data))
    await nc.close()


asyncio.run(main())

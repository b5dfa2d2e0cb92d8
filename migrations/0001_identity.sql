-- Remembers when each stream and bucket that holds identity was created.
--
-- An empty counter bucket looks like a new deployment and would give every id again. So a start compares what JetStream
-- has with what stands here, and refuses one that is missing or was made anew.
create table jetstream_identity (
    stream      text        not null,
    -- As the server prints it, to the nanosecond; only ever compared for equality.
    created     text        not null,
    recorded_at timestamptz not null default now(),
    constraint jetstream_identity_pkey primary key (stream)
);

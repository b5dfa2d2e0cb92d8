-- Remembers each stream and bucket that holds identity: when it was created, and how far it had come.
--
-- An empty counter bucket looks like a new deployment and would give every id again; one that was restored from an old
-- backup would give some again. So a start compares what JetStream has with what stands here, and refuses a stream that is
-- missing, was made anew or was put back.
create table jetstream_identity (
    stream        text        not null,
    -- As the server prints it, to the nanosecond; only ever compared for equality.
    created       text        not null,
    -- The last sequence that a start has seen.
    last_sequence bigint      not null,
    recorded_at   timestamptz not null default now(),
    constraint jetstream_identity_pkey primary key (stream)
);

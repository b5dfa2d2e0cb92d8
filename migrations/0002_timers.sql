-- Timers: what is to be called, when, and what became of it. This is the truth; JetStream only wakes us.
create table timers (
    -- A UUIDv7 whose time is created_at: ids sort as timers were made.
    id               uuid        not null,
    tenant           text        not null,
    created_at       timestamptz not null,
    updated_at       timestamptz not null,
    -- The moment of the run that is next or under way.
    execute_at       timestamptz not null,
    -- When to act next: execute_at, or later when a failed attempt is to be repeated.
    due_at           timestamptz not null,
    callback_type    text        not null,
    -- Not jsonb: a payload is sent as it was given.
    callback_config  json        not null,
    -- What shares a bound on callbacks at once: a host and port, or NATS.
    destination      text        not null,
    -- Retries, recurrence, lateness, capture, checks: what few timers have.
    options          json,
    status           text        not null default 'pending',
    last_error       text,
    executed_at      timestamptz,
    late_by_ms       bigint,
    metadata         jsonb,
    idempotency_key  text,
    -- Tells whether a repeated request asks for the same.
    body_hash        bytea,
    -- Goes up with every change by a caller, so that two changes at once don't lose one.
    generation       integer     not null default 0,
    run              integer     not null default 1,
    attempt          integer     not null default 0,
    -- Attempts of this run that may be made in all.
    attempts_allowed integer     not null default 1,
    -- What a recurring timer becomes when the run under way is over: canceled or paused, if that was asked for meanwhile.
    after_run        text,
    -- Who is calling back, under which claim, and until when he is believed to.
    owner            text,
    claim            uuid,
    claimed_at       timestamptz,
    claim_until      timestamptz,
    response         json,
    traceparent      text,
    constraint timers_pkey primary key (id),
    constraint valid_status check
        (status in ('pending', 'paused', 'executing', 'completed', 'failed', 'canceled', 'skipped')),
    constraint valid_callback_type check (callback_type in ('http', 'nats'))
);

-- What is due.
create index timers_due on timers (due_at) where status = 'pending';
-- Claims that may have been left behind.
create index timers_claimed on timers (claim_until) where status = 'executing';
-- Lists, in both orders.
create index timers_by_creation on timers (tenant, id);
create index timers_by_time on timers (tenant, execute_at, id);
create unique index timers_idempotency on timers (tenant, idempotency_key) where idempotency_key is not null;

-- Every attempt to call back.
create table timer_attempts (
    timer_id   uuid        not null,
    run        integer     not null,
    attempt    integer     not null,
    started_at timestamptz not null,
    ended_at   timestamptz not null,
    status     text        not null,
    error      text,
    late_by_ms bigint      not null,
    response   json,
    constraint timer_attempts_pkey primary key (timer_id, run, attempt)
);

-- Old attempts leave in the order of their end.
create index timer_attempts_by_end on timer_attempts using brin (ended_at);

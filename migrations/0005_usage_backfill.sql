-- Backfills: a range of one tenant and type is archived and replaced, all of it or nothing.

-- Who replaced what and why. A row is the audit record, and does not change once it is completed or failed.
create table backfill_operations (
    id                      uuid        primary key,
    tenant_id               text        not null,
    usage_type              text        not null,
    range_start             timestamptz not null,
    range_end               timestamptz not null,
    mode                    text        not null,
    status                  text        not null,
    operator_id             text        not null,
    request_id              text,
    reason                  text        not null,
    events_added            bigint,
    events_archived         bigint,
    affects_invoiced_period boolean     not null,
    created_at              timestamptz not null default now(),
    completed_at            timestamptz,
    -- Why it failed.
    code                    text,
    message                 text,
    details                 jsonb,
    -- The ledger has its records; what remains is to open the range again.
    written                 boolean     not null default false,
    constraint valid_mode check (mode in ('blocking', 'non_blocking')),
    constraint valid_status check (status in ('pending', 'in_progress', 'completed', 'failed'))
);

-- The ranges that somebody works on, and how far he is. Unless the lease is renewed, it is over for him.
create table backfill_ranges (
    operation_id uuid        primary key references backfill_operations,
    tenant_id    text        not null,
    usage_type   text        not null,
    range_start  timestamptz not null,
    range_end    timestamptz not null,
    -- Whether live records wait.
    blocking     boolean     not null,
    phase        text        not null,
    done         bigint      not null default 0,
    total        bigint      not null default 0,
    lease_until  timestamptz not null,
    begun_at     timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- What was accepted before a backfill began must be known exactly: the time is that of the writing, when the range was
-- looked at, and not that of the transaction's beginning.
alter table usage_records alter column created_at set default clock_timestamp();

-- The backfill that added a record; backfill_operation_id is the one that archived it.
alter table usage_records add column added_by uuid;

-- What was taken back, once.
create table backfill_reversions (
    operation_id uuid        primary key references backfill_operations,
    operator_id  text        not null,
    request_id   text,
    reason       text        not null,
    at           timestamptz not null default now()
);

-- Replacement records until they are written. A server that crashes forgets them, and the backfill fails.
create unlogged table backfill_events (
    operation_id    uuid        not null,
    id              uuid        not null,
    source_id       text        not null,
    user_id         text,
    resource_id     text        not null,
    resource_type   text,
    metric_kind     text        not null,
    value           numeric     not null,
    event_timestamp timestamptz not null,
    idempotency_key text        not null,
    lineage         text,
    metadata        text,
    body_hash       bytea       not null,
    series          uuid,
    primary key (operation_id, id)
);

-- Published records that fell into a closed range, and later ones of the same counters.
create table usage_parked (
    position        bigint generated always as identity primary key,
    shard           integer     not null,
    tenant_id       text        not null,
    source_id       text        not null,
    -- When the stream had it; one that comes from quarantine came first before that.
    arrived_at      timestamptz not null,
    came_at         timestamptz not null,
    user_id         text,
    usage_type      text        not null,
    event_timestamp timestamptz not null,
    -- None for gauges, which need no order.
    series          uuid,
    -- The entry of quarantine that it comes from.
    replay_of       uuid,
    payload         bytea       not null
);

create index usage_parked_by_shard on usage_parked (shard, position);
create index usage_parked_by_tenant on usage_parked (tenant_id, arrived_at);

-- Until when a tenant has been invoiced.
create table usage_invoiced (
    tenant_id  text        primary key,
    until      timestamptz not null,
    updated_at timestamptz not null default now()
);

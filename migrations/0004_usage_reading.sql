-- Reading the ledger: pages by event time, the feed in the order of acceptance, and corrections.

-- Pages are ordered by (event_timestamp, id, revision), of one type or of all.
drop index usage_records_by_type;
create index usage_records_by_type on usage_records (tenant_id, usage_type, event_timestamp, id, revision);
create index usage_records_by_time on usage_records (tenant_id, event_timestamp, id, revision);

-- What the instances share and nobody else knows.
create table usage_secrets (
    name   text  primary key,
    secret bytea not null
);

insert into usage_secrets
select 'cursor', sha256(convert_to(string_agg(gen_random_uuid()::text, ''), 'UTF8')) from generate_series(1, 4);

-- How far each lane of a tenant's feed has come. A row is held until its transaction commits, so that nothing is ever
-- committed behind a position that somebody has seen.
create table usage_feed_heads (
    tenant_id text   not null,
    -- What the sink accepts, and what is changed afterwards: so neither waits for the other.
    lane      text   not null,
    position  bigint not null,
    primary key (tenant_id, lane),
    constraint valid_lane check (lane in ('live', 'corrections'))
) with (fillfactor = 70);

-- The feed itself: one row for all that one transaction wrote of a tenant.
create table usage_feed (
    tenant_id text        not null,
    lane      text        not null,
    -- The position of the last of them.
    position  bigint      not null,
    ids       uuid[]      not null,
    -- None if all are first ones.
    revisions integer[],
    -- Live: all that the stream had of this tenant until then is here or before.
    until     timestamptz not null,
    primary key (tenant_id, lane, position)
);

-- Ids are hashes: there is nothing to compress.
alter table usage_feed alter column ids set storage external;

-- All that the stream had until then is judged.
alter table usage_shards add column judged_until timestamptz;

-- Who corrected a record, and why.
create table usage_changes (
    id         uuid        not null,
    revision   integer     not null,
    action     text        not null,
    reason     text        not null,
    actor      text        not null,
    request_id text,
    at         timestamptz not null default now(),
    primary key (id, revision, action),
    constraint valid_action check (action in ('amended', 'deprecated'))
);

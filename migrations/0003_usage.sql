-- The usage ledger. Rows are only added; what is wrong with one is mended by another, or by its status.
create table usage_records (
    -- The record's identity: milliseconds of the idempotency key, then a hash of tenant, source, type, resource and key.
    -- So it is unique exactly where the key must be, and new rows touch the newest pages only.
    id                    uuid        not null,
    revision              integer     not null default 1,
    tenant_id             text        not null,
    source_id             text        not null,
    user_id               text,
    resource_id           text        not null,
    resource_type         text,
    usage_type            text        not null,
    metric_kind           text        not null,
    value                 numeric     not null,
    event_timestamp       timestamptz not null,
    idempotency_key       text        not null,
    status                text        not null default 'active',
    backfill_operation_id uuid,
    lineage               jsonb,
    metadata              jsonb,
    created_at            timestamptz not null default now(),
    -- Tells whether a repeat says the same.
    body_hash             bytea       not null,
    -- The readings of one counter: a hash of tenant, source, type and resource. Gauges have none.
    series                uuid,
    constraint usage_records_pkey primary key (id, revision),
    constraint valid_metric_kind check (metric_kind in ('counter', 'gauge')),
    constraint valid_status check (status in ('active', 'deprecated', 'archived'))
) partition by range (id);

create index usage_records_by_type on usage_records (tenant_id, usage_type, event_timestamp, id);
-- The neighbours of a reading that comes late.
create index usage_records_by_series on usage_records (series, event_timestamp) where series is not null;

-- Dated partitions, a week each, by the time in the id. What lies before or after them is in the edge partitions, so
-- that no row is ever without a place: keys that are no UUIDv7 count as very old.
create table usage_partitions (
    name      text        primary key,
    starts_at timestamptz not null,
    ends_at   timestamptz not null
);

create function usage_id_at(moment timestamptz) returns uuid immutable language sql as $$
    select (lpad(to_hex((extract(epoch from greatest(moment, 'epoch')) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- Makes dated partitions until the moment lies in one. Rows that were waiting for them in the edge move along.
create function usage_extend_partitions(until timestamptz) returns integer language plpgsql as $$
declare
    edge timestamptz;
    week record;
    made integer := 0;
begin
    select max(ends_at) into edge from usage_partitions;
    if edge > until then
        return 0;
    end if;
    -- Writers wait for us, so we don't wait long for a slow reader; there is time to try again.
    perform set_config('lock_timeout', '2s', true);
    lock table usage_partitions in exclusive mode;
    select max(ends_at) into edge from usage_partitions;
    alter table usage_records detach partition usage_records_future;
    while edge <= until loop
        select edge as starts_at, edge + interval '7 days' as ends_at,
            'usage_records_' || to_char(edge at time zone 'UTC', 'YYYYMMDD') as name into week;
        execute format('create table %I partition of usage_records for values from (%L) to (%L)',
            week.name, usage_id_at(week.starts_at), usage_id_at(week.ends_at));
        execute format('with moved as (delete from usage_records_future where id < %L returning *)
            insert into usage_records select * from moved', usage_id_at(week.ends_at));
        insert into usage_partitions values (week.name, week.starts_at, week.ends_at);
        edge := week.ends_at;
        made := made + 1;
    end loop;
    execute format('alter table usage_records attach partition usage_records_future for values from (%L) to (maxvalue)',
        usage_id_at(edge));
    return made;
end
$$;

do $$
declare
    -- Corrections reach back ninety days.
    edge timestamptz := (date_trunc('week', now() at time zone 'UTC') - interval '13 weeks') at time zone 'UTC';
begin
    execute format('create table usage_records_past partition of usage_records for values from (minvalue) to (%L)',
        usage_id_at(edge));
    execute format('create table usage_records_future partition of usage_records for values from (%L) to (maxvalue)',
        usage_id_at(edge));
    insert into usage_partitions values ('usage_records_past', '-infinity', edge);
    perform usage_extend_partitions(now() + interval '4 weeks');
end
$$;

-- How far each shard's stream has been written down. The row is the fence: whoever holds it is the one writer.
create table usage_shards (
    shard          integer     primary key,
    -- Sequences count within one life of the stream.
    stream_created text        not null,
    position       bigint      not null,
    updated_at     timestamptz not null default now()
);

-- The latest reading of each counter.
create table counter_heads (
    series          uuid        primary key,
    tenant_id       text        not null,
    source_id       text        not null,
    usage_type      text        not null,
    resource_id     text        not null,
    event_timestamp timestamptz not null,
    -- The greatest at that time.
    value           numeric     not null
) with (fillfactor = 70);

-- What the ledger has, so that nobody has to count.
create table usage_tallies (
    tenant_id  text        not null,
    source_id  text        not null,
    usage_type text        not null,
    records    bigint      not null,
    earliest   timestamptz not null,
    latest     timestamptz not null,
    primary key (tenant_id, source_id, usage_type)
) with (fillfactor = 70);

-- What came and what became of it, by the minute in which it came.
create table usage_minutes (
    tenant_id  text        not null,
    source_id  text        not null,
    minute     timestamptz not null,
    emitted    bigint      not null,
    accepted   bigint      not null,
    duplicates bigint      not null,
    rejected   bigint      not null,
    primary key (tenant_id, source_id, minute),
    constraint nothing_is_missing check (emitted = accepted + duplicates + rejected)
) with (fillfactor = 70);

create index usage_minutes_by_time on usage_minutes using brin (minute);

-- What was refused, as it came.
create table usage_quarantine (
    -- A UUIDv7: newest last.
    id              uuid        primary key,
    tenant_id       text        not null,
    source_id       text        not null,
    received_at     timestamptz not null,
    -- The user that the sender was bound to.
    user_id         text,
    idempotency_key text,
    code            text        not null,
    message         text        not null,
    details         jsonb,
    -- A record as JSON, or a whole message that could not be read.
    payload         bytea       not null,
    replayed_at     timestamptz
);

create index usage_quarantine_by_tenant on usage_quarantine (tenant_id, id);

-- Who changed what governs the ledger. What the ledger takes or refuses is audited by its own rows.
create table usage_audit (
    id         bigint generated always as identity primary key,
    at         timestamptz not null default now(),
    actor      text        not null,
    request_id text,
    operation  text        not null,
    tenant_id  text,
    details    jsonb       not null,
    -- Begun, done, or why it failed.
    outcome    text        not null default 'begun'
);

-- The historical database: usage records that are old and quiet, a week at a time, as they were when they moved. What is
-- corrected afterwards is in the operational database, which is right where both have a record.

create table usage_records (
    id                    uuid        not null,
    revision              integer     not null,
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
    status                text        not null,
    backfill_operation_id uuid,
    lineage               jsonb,
    metadata              jsonb,
    created_at            timestamptz not null,
    body_hash             bytea       not null,
    series                uuid,
    added_by              uuid,
    constraint usage_records_pkey primary key (id, revision)
) partition by range (id);

create index usage_records_by_type on usage_records (tenant_id, usage_type, event_timestamp, id, revision);
create index usage_records_by_time on usage_records (tenant_id, event_timestamp, id, revision);
create index usage_records_by_series on usage_records (series, event_timestamp) where series is not null;

create table usage_partitions (
    name           text        primary key,
    starts_at      timestamptz not null unique,
    ends_at        timestamptz not null,
    greatest_event timestamptz,
    -- The operational database has given it up; until then it may be written again.
    arrived        boolean     not null default false
);

create function usage_id_at(moment timestamptz) returns uuid immutable language sql as $$
    select (lpad(to_hex((extract(epoch from greatest(moment, 'epoch')) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- What retention has let go here, until the operational database has taken it off its tallies.
create table usage_gone (
    position   bigint  generated always as identity primary key,
    tenant_id  text    not null,
    source_id  text    not null,
    usage_type text    not null,
    records    bigint  not null,
    -- None if a whole week is gone.
    ids        uuid[],
    -- The week that is gone, in a row of its own.
    week       timestamptz
);

-- Tells this database from others.
create table usage_identity (
    only_one boolean primary key default true,
    id       uuid    not null default gen_random_uuid(),
    constraint only_one check (only_one)
);

insert into usage_identity default values;

create function usage_make_week(week text, from_moment timestamptz, to_moment timestamptz) returns void
language plpgsql as $$
begin
    perform pg_advisory_xact_lock(hashtext('usage weeks'));
    if not exists (select from usage_partitions where name = week) then
        execute format('create table %I partition of usage_records for values from (%L) to (%L)',
            week, usage_id_at(from_moment), usage_id_at(to_moment));
        insert into usage_partitions (name, starts_at, ends_at) values (week, from_moment, to_moment);
    end if;
end
$$;

-- Drops a week that has arrived, and notes what was in it. Returns how many rows that were.
create function usage_drop_week(week text) returns bigint language plpgsql as $$
declare
    began timestamptz;
    rows  bigint;
begin
    -- What is noted is committed in order.
    perform pg_advisory_xact_lock(hashtext('usage gone'));
    select starts_at into began from usage_partitions where name = week and arrived for update;
    if not found then
        return null;
    end if;
    execute format('insert into usage_gone (tenant_id, source_id, usage_type, records)
        select tenant_id, source_id, usage_type, count(*) from %I group by 1, 2, 3', week);
    insert into usage_gone (tenant_id, source_id, usage_type, records, week) values ('', '', '', 0, began);
    execute format('select count(*) from %I', week) into rows;
    execute format('drop table %I', week);
    delete from usage_partitions where name = week;
    return rows;
end
$$;

-- Drops the copy of a week that was never given up for it.
create function usage_discard_week(week text) returns void language plpgsql as $$
begin
    perform from usage_partitions where name = week and not arrived for update;
    if found then
        execute format('drop table %I', week);
        delete from usage_partitions where name = week;
    end if;
end
$$;

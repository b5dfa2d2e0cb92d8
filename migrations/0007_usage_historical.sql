-- Records that are old and quiet can move to a second database, a week at a time.

-- It came back from there to be corrected, and is there too, as it was. Here it is as it is.
alter table usage_records add column thawed boolean not null default false;

-- The weeks that are there, by the time in their ids.
create table usage_moved (
    starts_at      timestamptz primary key,
    ends_at        timestamptz not null,
    least_event    timestamptz not null,
    greatest_event timestamptz not null,
    moved_at       timestamptz not null default now()
);

-- Which database it is, and how much of what it let go is taken off the tallies.
create table usage_historical (
    only_one    boolean primary key default true,
    database_id uuid    not null,
    settled     bigint  not null default 0,
    constraint only_one check (only_one)
);

-- The latest reading of each counter that moved: whoever comes late is compared with it.
create table usage_floors (
    series          uuid        primary key,
    tenant_id       text        not null,
    source_id       text        not null,
    usage_type      text        not null,
    resource_id     text        not null,
    event_timestamp timestamptz not null,
    value           numeric     not null
);

-- The reading of a counter right before a moment, and right after it. Each part is ordered by itself, along its index.
create function usage_reading_before(of_series uuid, moment timestamptz) returns setof usage_floors stable language sql as $$
    select * from (
        (select series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value from usage_records
         where series = of_series and status = 'active' and event_timestamp < moment
         order by event_timestamp desc, value desc limit 1)
        union all
        (select * from usage_floors where series = of_series and event_timestamp < moment)
    ) as reading order by event_timestamp desc, value desc limit 1
$$;

create function usage_reading_after(of_series uuid, moment timestamptz) returns setof usage_floors stable language sql as $$
    select * from (
        (select series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value from usage_records
         where series = of_series and status = 'active' and event_timestamp > moment
         order by event_timestamp, value limit 1)
        union all
        (select * from usage_floors where series = of_series and event_timestamp > moment)
    ) as reading order by event_timestamp, value limit 1
$$;

-- A partition that has lost records since it was copied does not move.
alter table usage_partitions add column last_deleted timestamptz;

-- Tables that were partitions, and are to be dropped.
create table usage_detached (
    name      text        primary key,
    starts_at timestamptz not null,
    ends_at   timestamptz not null,
    -- How many of their rows are in the historical database. None if they are to be gone.
    copied    bigint
);

drop function usage_drop_partition(text, timestamptz);

-- Takes a dated partition out of the ledger if its events are all older, and it was written before. Its ids belong to an
-- empty one then, together with those that were taken out before it. Writers wait for an instant only: what takes long is
-- done to the table that is nobody's.
create function usage_detach_partition(wanted text, older_than timestamptz, copied bigint, copied_to uuid) returns boolean
language plpgsql as $$
declare
    old  usage_partitions;
    gone usage_partitions;
begin
    -- Whoever is slow is not waited for, and nobody waits behind us for long; there is time to try again.
    perform set_config('lock_timeout', '100ms', true);
    lock table only usage_records in access exclusive mode;
    -- Now nobody can have written to it without our knowing.
    select * into old from usage_partitions where name = wanted and not dropped and starts_at > '-infinity';
    if not found then
        return false;
    end if;
    if coalesce(old.greatest_event >= older_than or old.last_written >= older_than, false) then
        raise exception 'partition % is not old enough', old.name;
    end if;
    if copied is not null then
        if coalesce(old.last_deleted >= older_than, false) then
            raise exception 'partition % has lost records', old.name;
        end if;
        perform from usage_historical where database_id = copied_to for share;
        if not found then
            raise exception 'partition % was copied to another historical database', old.name;
        end if;
    end if;
    select * into gone from usage_partitions where dropped and ends_at = old.starts_at;
    execute format('lock table only %I in access exclusive mode nowait', old.name);
    if gone.name is not null then
        execute format('lock table only %I in access exclusive mode nowait', gone.name);
    end if;
    execute format('alter table usage_records detach partition %I', old.name);
    delete from usage_partitions where name = old.name;
    if gone.name is not null then
        execute format('alter table usage_records detach partition %I', gone.name);
        execute format('alter table usage_records attach partition %I for values from (%L) to (%L)',
            gone.name, usage_id_at(gone.starts_at), usage_id_at(old.ends_at));
        update usage_partitions set ends_at = old.ends_at where name = gone.name;
    else
        gone.name := 'usage_records_gone_' || to_char(old.ends_at at time zone 'UTC', 'YYYYMMDD');
        execute format('create table %I partition of usage_records for values from (%L) to (%L)',
            gone.name, usage_id_at(old.starts_at), usage_id_at(old.ends_at));
        insert into usage_partitions (name, starts_at, ends_at, dropped)
        values (gone.name, old.starts_at, old.ends_at, true);
    end if;
    insert into usage_detached values (old.name, old.starts_at, old.ends_at, copied);
    if copied is not null then
        insert into usage_moved (starts_at, ends_at, least_event, greatest_event)
        values (old.starts_at, old.ends_at, old.least_event, old.greatest_event);
    end if;
    return true;
end
$$;

-- Drops a table that was taken out, and returns how many rows it had. None if somebody else did.
create function usage_drop_detached(wanted text) returns bigint language plpgsql as $$
declare
    old  usage_detached;
    rows bigint;
begin
    select * into old from usage_detached where name = wanted for update;
    if not found then
        return null;
    end if;
    execute format('select count(*) from %I', old.name) into rows;
    if old.copied <> rows then
        raise exception '% has % rows, and % were copied', old.name, rows, old.copied;
    end if;
    if old.copied is null then
        execute format('update usage_tallies tally set records = tally.records - old.records from (
                select tenant_id, source_id, usage_type, count(*) as records from %I group by 1, 2, 3
            ) as old where (tally.tenant_id, tally.source_id, tally.usage_type) = (old.tenant_id, old.source_id, old.usage_type)',
            old.name);
        delete from usage_changes where id >= usage_id_at(old.starts_at) and id < usage_id_at(old.ends_at);
    end if;
    execute format('drop table %I', old.name);
    delete from usage_detached where name = old.name;
    return rows;
end
$$;

-- How long usage is kept, and what is dropped when its time has come.

-- `*` stands for all. Type over tenant over global.
create table usage_retention (
    tenant_id  text        not null,
    usage_type text        not null,
    days       integer     not null,
    updated_at timestamptz not null default now(),
    primary key (tenant_id, usage_type),
    constraint valid_days check (days between 7 and 2555)
);

-- What a partition has, widened with the insert and rounded to hours: so that nobody has to look into it.
alter table usage_partitions
    add column least_event    timestamptz,
    add column greatest_event timestamptz,
    add column last_written   timestamptz,
    -- Its rows were dropped; what comes late lands in an empty table.
    add column dropped        boolean not null default false;

do $$
declare
    partition record;
begin
    for partition in select name from usage_partitions loop
        execute format('update usage_partitions set (least_event, greatest_event, last_written) =
            (select min(event_timestamp), max(event_timestamp), max(created_at) from %I) where name = %L',
            partition.name, partition.name);
    end loop;
end
$$;

-- As before, and what is moved out of the edge is in the catalog.
create or replace function usage_extend_partitions(until timestamptz) returns integer language plpgsql as $$
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
    perform set_config('lock_timeout', '500ms', true);
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
        insert into usage_partitions (name, starts_at, ends_at) values (week.name, week.starts_at, week.ends_at);
        execute format('update usage_partitions set (least_event, greatest_event, last_written) =
            (select min(event_timestamp), max(event_timestamp), max(created_at) from %I) where name = %L',
            week.name, week.name);
        edge := week.ends_at;
        made := made + 1;
    end loop;
    execute format('alter table usage_records attach partition usage_records_future for values from (%L) to (maxvalue)',
        usage_id_at(edge));
    return made;
end
$$;

-- Drops a dated partition whose events are all older, and that was written before, and returns how many rows went. An
-- empty one takes its place, together with those that were dropped before it: ids stay where they belong.
create function usage_drop_partition(wanted text, older_than timestamptz) returns bigint language plpgsql as $$
declare
    old   usage_partitions;
    gone  usage_partitions;
    start timestamptz;
    rows  bigint;
    empty text;
begin
    -- For an instant nobody writes. Whoever is slow is not waited for; there is time to try again.
    perform set_config('lock_timeout', '500ms', true);
    lock table usage_partitions in exclusive mode;
    select * into old from usage_partitions where name = wanted and not dropped and starts_at > '-infinity';
    if not found then
        return 0;
    end if;
    execute format('alter table usage_records detach partition %I', old.name);
    -- Now nobody can have written to it without our knowing.
    if coalesce(old.greatest_event >= older_than or old.last_written >= older_than, false) then
        raise exception 'partition % is not old enough', old.name;
    end if;
    start := old.starts_at;
    select * into gone from usage_partitions where dropped and ends_at = old.starts_at;
    if found then
        start := gone.starts_at;
        execute format('alter table usage_records detach partition %I', gone.name);
    end if;
    empty := 'usage_records_gone_' || to_char(old.ends_at at time zone 'UTC', 'YYYYMMDD');
    execute format('create table %I partition of usage_records for values from (%L) to (%L)',
        empty, usage_id_at(start), usage_id_at(old.ends_at));
    if gone.name is not null then
        execute format('insert into usage_records select * from %I', gone.name);
        execute format('drop table %I', gone.name);
        delete from usage_partitions where name = gone.name;
    end if;
    execute format('update usage_tallies tally set records = tally.records - old.records from (
            select tenant_id, source_id, usage_type, count(*) as records from %I group by 1, 2, 3
        ) as old where (tally.tenant_id, tally.source_id, tally.usage_type) = (old.tenant_id, old.source_id, old.usage_type)',
        old.name);
    execute format('select count(*) from %I', old.name) into rows;
    execute format('drop table %I', old.name);
    delete from usage_changes where id >= usage_id_at(old.starts_at) and id < usage_id_at(old.ends_at);
    delete from usage_partitions where name = old.name;
    insert into usage_partitions (name, starts_at, ends_at, least_event, greatest_event, last_written, dropped)
    values (empty, start, old.ends_at, gone.least_event, gone.greatest_event, gone.last_written, true);
    return rows;
end
$$;

create index usage_feed_by_time on usage_feed using brin (until);

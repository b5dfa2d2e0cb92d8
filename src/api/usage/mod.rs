//! The usage ledger: what was consumed, by whom, of what, written down once.
//!
//! A record's tenant and source are proven, never named: by the subject over NATS, by the API key over HTTP. Besides these
//! requests, anything published to `usage.<tenant>.<source>` is taken in the same way.

mod backfill;
mod ledger;
mod limits;
mod metadata;
mod quarantine;
mod record;
mod retention;
mod units;

pub use backfill::{
    BACKFILL_DAYS, Backfill, BackfillAnswer, BackfillEvents, BackfillId, BackfillMode, BackfillPreview,
    BackfillProgress, BackfillReceived, BackfillRequest, BackfillReversion, BackfillStatus, Invoiced, MOST_EVENTS,
    ResourcePreview, SetInvoiced, TimeRange,
};
pub use ledger::{
    Amendment, Deprecation, FeedPage, FeedRequest, History, LedgerRecord, MOST_DAYS, MOST_OF_A_PAGE, MOST_OF_THE_FEED,
    PAGE, RecordChange, RecordId, RecordPage, RecordQuery, Status,
};
pub use limits::{EffectiveLimits, LimitOverrides, Limits};
pub use metadata::{Metadata, MetadataRequest, Minute, StorageHealth};
pub use quarantine::{LISTED, MOST_LISTED, Quarantine, QuarantineFilter, Quarantined, Replay, Replayed};
pub use record::{Ingested, Reason, RecordBodies, Rejection, UsageRecord};
pub use retention::{
    LEAST_RETENTION, MOST_RETENTION, Retention, RetentionReport, RetentionScope, RetiredPartition, RetiredRecords,
    SetRetention,
};
pub use units::{ChangedUnit, MetricKind, NewSource, NewUnit, Priority, Source, Sources, Unit, Units};

use super::{NoParameters, WholeBody, operation::operations};

/// Records of one message or request.
pub const MOST_RECORDS: usize = 1000;

/// Bytes of one record.
pub const MOST_RECORD_BYTES: usize = 16 * 1024;

/// Bytes of one message or request.
pub const MOST_BYTES: usize = 1024 * 1024;

operations! {
    service "usage" on Usage;

    /// Takes usage records, and answers with a verdict on each of them.
    ///
    /// Up to 1,000 records and 1 MiB. What is wrong with one record harms no other; a record that was taken before is a
    /// duplicate, which is success. While the database is away, or with `Prefer: respond-async`, the answer is 202: the
    /// records are kept and will be judged, and what is refused then is found in quarantine.
    ingest = Ingest(tenant, source): WholeBody<RecordBodies> => Ingested {
        verb: "ingest",
        scope: Usage,
        success: 200,
        deferred: 202,
        routes: [Post "/api/uc/v1/usage/records"],
    }

    /// The tenant's records by event time, a page at a time.
    ///
    /// The order is stable, by event time and id. A cursor holds for two days and goes with the filters that it was made
    /// for. A record that comes late may lie before a cursor: who must see every record reads the feed.
    query_records = QueryRecords(tenant): RecordQuery => RecordPage {
        verb: "query",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/records"],
    }

    /// The tenant's records in the order in which they were accepted, from a position; corrections come again.
    ///
    /// Nothing is ever committed behind a position, however late it comes. The watermark says until when everything has
    /// been seen. With `wait` an answer that would be empty is held back until there is something new.
    read_feed = ReadFeed(tenant): FeedRequest => FeedPage {
        verb: "feed",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/records/feed"],
    }

    /// One record, as it is now.
    get_record = GetRecord(tenant): RecordId => LedgerRecord {
        verb: "record",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/records/{id}"],
    }

    /// All revisions of a record, and who changed it and why.
    record_history = GetHistory(tenant): RecordId => History {
        verb: "history",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/records/{id}/history"],
    }

    /// Amends a record: the next revision takes its place, and the one before stays on record as deprecated.
    amend_record = AmendRecord(tenant): Amendment => LedgerRecord {
        verb: "amend",
        scope: Usage,
        success: 200,
        routes: [Patch "/api/uc/v1/usage/records/{id}"],
    }

    /// Withdraws a record. It stays on record as deprecated.
    deprecate_record = DeprecateRecord(tenant): Deprecation => LedgerRecord {
        verb: "deprecate",
        scope: Usage,
        success: 200,
        routes: [Post "/api/uc/v1/usage/records/{id}/deprecate"],
    }

    /// Replaces what the ledger has of one type in a range of time: what is there is archived, and these records take its
    /// place, all of it in one transaction or nothing.
    ///
    /// 201 when it is done, 202 while it goes on, 200 for a dry run, which does not judge whether a counter would go down. A
    /// range that another backfill works on is refused. More than 90 days back it needs the role `elevated`, or its own subject.
    submit_backfill = SubmitBackfill(tenant, source): BackfillRequest => BackfillAnswer {
        verb: "backfill",
        scope: Usage,
        success: 201,
        deferred: 202,
        preview: 200,
        privileged: Elevated SubmitElevatedBackfill,
        routes: [Post "/api/uc/v1/usage/backfill"],
    }

    /// The same, however far back.
    submit_elevated_backfill = SubmitElevatedBackfill(tenant, source): BackfillRequest => BackfillAnswer {
        verb: "backfill-elevated",
        scope: Elevated,
        success: 201,
        deferred: 202,
        preview: 200,
        routes: [],
    }

    /// More records for a backfill that was submitted as `staged`. What is sent again is a duplicate.
    send_backfill_events = SendBackfillEvents(tenant, source): BackfillEvents => BackfillReceived {
        verb: "backfill-events",
        scope: Usage,
        success: 200,
        routes: [Post "/api/uc/v1/usage/backfill/{id}/events"],
    }

    /// Carries out a backfill whose records are all there.
    commit_backfill = CommitBackfill(tenant): BackfillId => Backfill {
        verb: "backfill-commit",
        scope: Usage,
        success: 201,
        deferred: 202,
        routes: [Post "/api/uc/v1/usage/backfill/{id}/commit"],
    }

    /// Gives up a backfill that waits for records. Nothing has changed.
    cancel_backfill = CancelBackfill(tenant): BackfillId => Backfill {
        verb: "backfill-cancel",
        scope: Usage,
        success: 200,
        routes: [Post "/api/uc/v1/usage/backfill/{id}/cancel"],
    }

    /// A backfill: who, what, why, how far, and what became of it.
    get_backfill = GetBackfill(tenant): BackfillId => Backfill {
        verb: "backfill-status",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/backfill/{id}"],
    }

    /// Takes a backfill back: what it archived is active again, and what it added is archived. Once, and only while nobody
    /// has changed its records since. More than 90 days back it needs the role `elevated`, or its own subject.
    revert_backfill = RevertBackfill(tenant): BackfillReversion => Backfill {
        verb: "backfill-revert",
        scope: Usage,
        success: 200,
        deferred: 202,
        privileged: Elevated RevertElevatedBackfill,
        routes: [Post "/api/uc/v1/usage/backfill/{id}/revert"],
    }

    /// The same, however far back.
    revert_elevated_backfill = RevertElevatedBackfill(tenant): BackfillReversion => Backfill {
        verb: "backfill-revert-elevated",
        scope: Elevated,
        success: 200,
        deferred: 202,
        routes: [],
    }

    /// Until when the tenant has been invoiced.
    get_invoiced = GetInvoiced(tenant): NoParameters => Invoiced {
        verb: "invoiced",
        scope: Tenant,
        success: 200,
        routes: [Get "/api/uc/v1/admin/invoiced/{tenant}"],
    }

    /// Says until when the tenant has been invoiced, so that backfills know what they touch.
    set_invoiced = MarkInvoiced(tenant): SetInvoiced => Invoiced {
        verb: "invoiced-set",
        scope: Tenant,
        success: 200,
        routes: [Put "/api/uc/v1/admin/invoiced/{tenant}"],
    }

    /// How long a tenant's usage of a type is kept. `*` stands for all.
    get_retention = GetRetention(): RetentionScope => Retention {
        verb: "retention",
        scope: Operator,
        success: 200,
        routes: [Get "/api/uc/v1/admin/retention/{tenant}/{usage_type}"],
    }

    /// Sets how long a tenant's usage of a type is kept. `*` stands for all; type goes over tenant, and tenant over global.
    set_retention = ChangeRetention(): SetRetention => Retention {
        verb: "retention-set",
        scope: Operator,
        success: 200,
        routes: [Put "/api/uc/v1/admin/retention/{tenant}/{usage_type}"],
    }

    /// What would go now, because no policy keeps it.
    report_retention = ReportRetention(): NoParameters => RetentionReport {
        verb: "retention-report",
        scope: Operator,
        success: 200,
        routes: [Get "/api/uc/v1/admin/retention"],
    }

    /// Lets go now what no policy keeps, as is done every hour.
    apply_retention = ApplyRetention(): NoParameters => RetentionReport {
        verb: "retention-run",
        scope: Operator,
        success: 200,
        routes: [Post "/api/uc/v1/admin/retention/run"],
    }

    /// What was refused, newest first, with the reasons.
    list_quarantine = ListQuarantine(tenant): QuarantineFilter => Quarantine {
        verb: "quarantine",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/quarantine"],
    }

    /// Sends records from quarantine again, once the cause is mended. They are judged as of the time that they first came.
    replay_quarantine = ReplayQuarantine(tenant): Replay => Replayed {
        verb: "quarantine-replay",
        scope: Usage,
        success: 200,
        deferred: 202,
        routes: [Post "/api/uc/v1/usage/quarantine/replay"],
    }

    /// What the ledger has of the tenant: how much, since when, until when; and what came in each minute and what became
    /// of it.
    usage_metadata = GetMetadata(tenant): MetadataRequest => Metadata {
        verb: "metadata",
        scope: Usage,
        success: 200,
        routes: [Get "/api/uc/v1/usage/metadata"],
    }

    /// All units, by name.
    list_units = ListUnits(tenant): NoParameters => Units {
        verb: "units",
        scope: Key,
        success: 200,
        routes: [Get "/api/uc/v1/admin/units"],
    }

    /// Registers a unit: what a usage type is measured in, and which sources may send it.
    register_unit = RegisterUnit(): NewUnit => Unit {
        verb: "unit-register",
        scope: Operator,
        success: 201,
        routes: [Post "/api/uc/v1/admin/units"],
    }

    /// Changes a unit: what is given, and nothing else. What it measures stays.
    change_unit = ChangeUnit(): ChangedUnit => Unit {
        verb: "unit-change",
        scope: Operator,
        success: 200,
        routes: [Put "/api/uc/v1/admin/units/{name}"],
    }

    /// Registers a source that units can be bound to. Making an API key for a source registers it too.
    register_source = RegisterSource(): NewSource => Source {
        verb: "source-register",
        scope: Operator,
        success: 201,
        repeated: 200,
        routes: [Post "/api/uc/v1/admin/sources"],
    }

    /// All sources, by name.
    list_sources = ListSources(): NoParameters => Sources {
        verb: "sources",
        scope: Operator,
        success: 200,
        routes: [Get "/api/uc/v1/admin/sources"],
    }

    /// What limits a tenant's requests: its overrides, and what holds in effect.
    get_limits = GetLimits(tenant): NoParameters => Limits {
        verb: "limits",
        scope: Tenant,
        success: 200,
        routes: [Get "/api/uc/v1/admin/limits/{tenant}"],
    }

    /// Sets a tenant's limits. What is not given is inherited from the defaults.
    set_limits = SetLimits(tenant): LimitOverrides => Limits {
        verb: "limits-set",
        scope: Tenant,
        success: 200,
        routes: [Put "/api/uc/v1/admin/limits/{tenant}"],
    }

    /// What limits one source of a tenant, within the tenant's own limits.
    get_source_limits = GetSourceLimits(tenant, source): NoParameters => Limits {
        verb: "source-limits",
        scope: Tenant,
        success: 200,
        routes: [Get "/api/uc/v1/admin/limits/{tenant}/{source}"],
    }

    /// Sets the limits of one source of a tenant.
    set_source_limits = SetSourceLimits(tenant, source): LimitOverrides => Limits {
        verb: "source-limits-set",
        scope: Tenant,
        success: 200,
        routes: [Put "/api/uc/v1/admin/limits/{tenant}/{source}"],
    }
}

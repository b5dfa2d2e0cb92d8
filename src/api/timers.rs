//! Timers: a callback at a moment, once or again and again.
//!
//! A tenant's timers are its own. Over HTTP the tenant is the caller's; over NATS it stands in the subject.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{NoParameters, operation::operations};
use crate::error::Code;

/// Timers of one bulk call.
pub const MOST_IN_BULK: usize = 1000;

/// Timers of one page.
pub const MOST_LISTED: i64 = 200;

operations! {
    service "timer" on Timers;

    /// Sets a timer.
    ///
    /// With an `idempotency_key` (or the header `Idempotency-Key`) the same timer again is answered with the one that exists.
    create_timer = CreateTimer(tenant): NewTimer => TimerSummary {
        verb: "create",
        scope: Timers,
        success: 201,
        repeated: 200,
        message: "timer created successfully",
        routes: [Post "/timers"],
    }

    /// Sets up to 1,000 timers, each for itself: what is wrong with one harms no other.
    create_timers = CreateTimers(tenant): NewTimers => BulkResults {
        verb: "bulk",
        scope: Timers,
        success: 200,
        routes: [Post "/timers/bulk"],
    }

    /// Cancels up to 1,000 timers.
    cancel_timers = CancelTimers(tenant): TimerIds => BulkResults {
        verb: "bulk-cancel",
        scope: Timers,
        success: 200,
        routes: [Post "/timers/bulk/cancel"],
    }

    /// A timer with everything that is known of it. The values of callback headers are hidden from callers without the
    /// role `secrets`.
    get_timer = GetTimer(tenant): TimerId => Timer {
        verb: "get",
        scope: Timers,
        success: 200,
        privileged: Secrets GetTimerSecrets,
        routes: [Get "/timers/{id}"],
    }

    /// A timer with the values of its callback headers.
    get_timer_secrets = GetTimerSecrets(tenant): TimerId => Timer {
        verb: "get-secrets",
        scope: Secrets,
        success: 200,
        routes: [],
    }

    /// Timers, newest first if nothing else is asked for.
    ///
    /// Filters: `status`, and `metadata.<key>=<text>` for a member of the metadata. Pages by `offset`, or by `cursor` from
    /// the page before, which neither skips nor repeats when timers come and go meanwhile.
    list_timers = ListTimers(tenant): TimerFilter => TimerPage {
        verb: "list",
        scope: Timers,
        success: 200,
        routes: [Get "/timers"],
    }

    /// Changes a pending timer: what is given, and nothing else. Holds from the moment that it is answered.
    update_timer = UpdateTimer(tenant): ChangedTimer => TimerSummary {
        verb: "update",
        scope: Timers,
        success: 200,
        message: "timer updated successfully",
        routes: [Put "/timers/{id}"],
    }

    /// Cancels a timer that has not begun to fire. A recurring one that is firing right now ends with that run.
    cancel_timer = CancelTimer(tenant): TimerId => CanceledTimer {
        verb: "cancel",
        scope: Timers,
        success: 200,
        message: "timer canceled successfully",
        routes: [Delete "/timers/{id}"],
    }

    /// Fires a pending timer now. A recurring one goes on as it would have; this counts as one of its runs.
    fire_timer = FireTimer(tenant): TimerId => TimerSummary {
        verb: "fire",
        scope: Timers,
        success: 200,
        routes: [Post "/timers/{id}/fire"],
    }

    /// Tries a failed timer again, now.
    retry_timer = RetryTimer(tenant): TimerId => TimerSummary {
        verb: "retry",
        scope: Timers,
        success: 200,
        routes: [Post "/timers/{id}/retry"],
    }

    /// Holds a recurring timer until it is resumed. A run that is under way finishes first.
    pause_timer = PauseTimer(tenant): TimerId => TimerSummary {
        verb: "pause",
        scope: Timers,
        success: 200,
        routes: [Post "/timers/{id}/pause"],
    }

    /// Goes on with a paused timer, at its next time from now.
    resume_timer = ResumeTimer(tenant): TimerId => TimerSummary {
        verb: "resume",
        scope: Timers,
        success: 200,
        routes: [Post "/timers/{id}/resume"],
    }

    /// The newest attempts to call back, newest first, up to 200.
    list_attempts = ListAttempts(tenant): TimerId => Attempts {
        verb: "attempts",
        scope: Timers,
        success: 200,
        routes: [Get "/timers/{id}/attempts"],
    }

    /// What HTTP callbacks of the tenant are signed with (Standard Webhooks).
    webhook_secret = GetWebhookSecret(tenant): NoParameters => WebhookSecret {
        verb: "webhook-secret",
        scope: Secrets,
        success: 200,
        routes: [Get "/timers/webhook-secret"],
    }

    /// Makes a new webhook secret. For a while callbacks carry a signature by each of the two.
    rotate_webhook_secret = RotateWebhookSecret(tenant): NoParameters => WebhookSecret {
        verb: "webhook-secret-rotate",
        scope: Secrets,
        success: 200,
        routes: [Post "/timers/webhook-secret/rotate"],
    }
}

/// A UUIDv7. Text in every encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Id(pub Uuid);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl FromStr for Id {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self).map_err(|_| "must be a UUID")
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TimerId {
    #[schema(value_type = String)]
    pub id: Id,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TimerIds {
    /// At most 1,000.
    #[schema(value_type = Vec<String>)]
    pub ids: Vec<String>,
}

/// A timer to be set. Exactly one of `execute_at` and `execute_in`; with `recurrence` neither is needed.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewTimer {
    /// ISO 8601 with an offset, or a local time such as `2026-10-25T02:30:00` together with `timezone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execute_at: Option<String>,
    /// From now, such as `90s` or `2h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execute_in: Option<String>,
    /// An IANA name such as `Europe/Berlin`, for local times and for cron.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub callback: Option<Callback>,
    /// Anything, for the caller's own use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrence: Option<Recurrence>,
    /// What becomes of a timer that could not fire in time: `fire` (the default) or `skip`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_late: Option<OnLate>,
    /// How late is too late for `on_late: skip`; `5m` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_lateness: Option<String>,
    /// Unique among the tenant's timers, up to 255 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// Keep the status, the headers and the first 16 KiB of the answer to an HTTP callback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_response: Option<bool>,
    /// What the answer to an HTTP callback must be like; any status 2xx if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Expect>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewTimers {
    /// At most 1,000, each as for a single timer.
    #[schema(value_type = Vec<NewTimer>)]
    pub timers: Vec<Value>,
}

/// What a change may change: as for a new timer, and what is not given stays.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedTimer {
    #[schema(value_type = String)]
    pub id: Id,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execute_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execute_in: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub callback: Option<Callback>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrence: Option<Recurrence>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_late: Option<OnLate>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_lateness: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_response: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Expect>,
}

/// Where to and what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Callback {
    Http(HttpCallback),
    Nats(NatsCallback),
}

/// A POST of the payload as JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpCallback {
    pub url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<Value>,
}

/// A message with the payload as JSON. Where a stream takes the subject it is stored, once; elsewhere whoever listens hears
/// it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NatsCallback {
    /// The subject.
    pub topic: String,
    /// In the header `Tidemark-Key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<Value>,
}

/// How often a failed callback is tried again: after `initial_delay`, then twice as long, up to `max_delay`, each with some
/// chance in it. A `retry-after` of the receiver is honoured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Retry {
    /// The first one included.
    #[schema(minimum = 1, maximum = 100)]
    pub max_attempts: u32,
    #[serde(default = "initial_delay", with = "humantime_serde")]
    #[schema(value_type = String, default = "1s")]
    pub initial_delay: Duration,
    #[serde(default = "max_delay", with = "humantime_serde")]
    #[schema(value_type = String, default = "5m")]
    pub max_delay: Duration,
}

fn initial_delay() -> Duration {
    Duration::from_secs(1)
}

fn max_delay() -> Duration {
    Duration::from_secs(300)
}

/// Again and again, by exactly one of `cron` and `every`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Recurrence {
    /// Six fields from seconds to day of week, or five from minutes, in the timer's `timezone` (UTC if none).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
    /// At least `1s`, counted from the first run.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "humantime_serde")]
    #[schema(value_type = Option<String>)]
    pub every: Option<Duration>,
    /// So many runs at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub count: Option<u32>,
    /// No run after this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnLate {
    #[default]
    Fire,
    Skip,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// One of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Vec<u16>>,
    /// A JSON Schema that the body must be valid against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = TimerStatus)]
pub enum Status {
    /// Waits for its time.
    Pending,
    /// A recurring timer on hold.
    Paused,
    /// The callback is being made.
    Executing,
    Completed,
    Failed,
    Canceled,
    /// Was too late, and was not to fire then.
    Skipped,
}

impl Status {
    pub const ALL: &'static [Status] = &[
        Status::Pending,
        Status::Paused,
        Status::Executing,
        Status::Completed,
        Status::Failed,
        Status::Canceled,
        Status::Skipped,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "pending",
            Status::Paused => "paused",
            Status::Executing => "executing",
            Status::Completed => "completed",
            Status::Failed => "failed",
            Status::Canceled => "canceled",
            Status::Skipped => "skipped",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Status {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.iter().copied().find(|status| status.as_str() == text);
        found.ok_or_else(|| format!("{text:?} is no status"))
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TimerSummary {
    #[schema(value_type = String)]
    pub id: Id,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// Of a recurring timer, its next run.
    pub execute_at: DateTime<Utc>,
    pub callback_type: CallbackType,
    pub status: Status,
    /// When the last callback was over.
    pub executed_at: Option<DateTime<Utc>>,
    /// How long after its time it fired.
    pub late_by_ms: Option<i64>,
    /// The same timer was set before.
    #[serde(skip)]
    pub repeated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CallbackType {
    Http,
    Nats,
}

impl FromStr for CallbackType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "http" => Ok(CallbackType::Http),
            "nats" => Ok(CallbackType::Nats),
            _ => Err(format!("{text:?} is no type of callback")),
        }
    }
}

impl CallbackType {
    pub fn as_str(self) -> &'static str {
        match self {
            CallbackType::Http => "http",
            CallbackType::Nats => "nats",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Timer {
    #[schema(value_type = String)]
    pub id: Id,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// Of a recurring timer, its next run, or the one that is under way.
    pub execute_at: DateTime<Utc>,
    pub callback_type: CallbackType,
    pub callback_config: Callback,
    pub status: Status,
    pub last_error: Option<String>,
    pub executed_at: Option<DateTime<Utc>>,
    pub metadata: Option<Value>,
    pub late_by_ms: Option<i64>,
    /// Which run it is; 1 unless it recurs.
    pub run: u32,
    /// Attempts of this run so far.
    pub attempts: u32,
    /// When it is tried again, if it failed and has attempts left.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// The next run of a recurring timer.
    pub next_run_at: Option<DateTime<Utc>>,
    pub timezone: Option<String>,
    pub retry: Option<Retry>,
    pub recurrence: Option<Recurrence>,
    pub on_late: OnLate,
    pub max_lateness: Option<String>,
    pub idempotency_key: Option<String>,
    pub capture_response: bool,
    pub expect: Option<Expect>,
    /// The last answer, if answers are kept.
    pub response: Option<CapturedResponse>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CapturedResponse {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    /// The first 16 KiB. What is no UTF-8 is replaced.
    pub body: String,
    /// Whether there was more.
    pub truncated: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TimerFilter {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 200, default = 50)]
    pub limit: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, default = 0)]
    pub offset: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sort: Option<Sort>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Order>,
    /// The `next_cursor` of the page before, with the same sort, order and filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// Members of the metadata and their text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sort {
    #[default]
    CreatedAt,
    ExecuteAt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    Asc,
    #[default]
    Desc,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TimerPage {
    pub timers: Vec<TimerSummary>,
    /// All that the filters let through.
    pub total: i64,
    pub limit: i64,
    pub offset: i64,
    /// Where the next page begins, if this one is full.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CanceledTimer {
    #[schema(value_type = String)]
    pub id: Id,
    pub status: Status,
    /// Said when the timer was already firing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BulkResults {
    pub results: Vec<BulkResult>,
}

/// What became of one item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BulkResult {
    /// Its place in the request.
    pub index: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub id: Option<Id>,
    /// As in the envelope: 0 is success.
    pub code: u16,
    pub message: String,
}

/// The timer platform's number for an outcome.
pub fn number(code: Code) -> u16 {
    match code {
        Code::Internal | Code::Unavailable | Code::Exhausted | Code::RateLimited => 1,
        Code::NotFound => 3,
        Code::Unauthenticated | Code::Forbidden => 4,
        _ => 2,
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Attempts {
    pub attempts: Vec<Attempt>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Attempt {
    pub run: u32,
    pub attempt: u32,
    pub started_at: DateTime<Utc>,
    pub ended_at: DateTime<Utc>,
    /// `completed`, `failed` or `skipped`.
    pub status: Status,
    pub error: Option<String>,
    /// How long after its time it began.
    pub late_by_ms: i64,
    pub response: Option<CapturedResponse>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookSecret {
    /// `whsec_` and base64, as libraries for Standard Webhooks take it.
    pub secret: String,
    /// The one before, while callbacks are still signed with it too.
    pub previous: Option<String>,
}

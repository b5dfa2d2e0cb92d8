//! `tidemark timer`: timers of a running deployment.

use clap::{ArgGroup, Args, Subcommand};
use futures::StreamExt;
use serde_json::Value;

use super::{Failure, Outcome, print, print_row, print_to_reader, remote::Verbs, screen, show};
use crate::{
    api::{
        Name, NoParameters,
        timers::{
            Callback, ChangedTimer, HttpCallback, Id, NatsCallback, NewTimer, Recurrence, Retry, Status, Timer,
            TimerFilter, TimerId, TimerIds, TimerSummary,
        },
    },
    client::Client,
    config::Config,
};

#[derive(Debug, Args)]
pub struct TimerOptions {
    #[command(flatten)]
    verbs: Verbs<Verb>,
    /// Whose timers.
    #[arg(long, global = true, env = "TIDEMARK_TENANT", default_value = "default")]
    tenant: Name,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Set a timer that posts to a URL, or publishes to a NATS subject.
    Set(Box<NewTimerOptions>),
    /// Show a timer.
    Get {
        id: Id,
        /// With the values of its callback's headers
        #[arg(long)]
        secrets: bool,
    },
    /// List timers, newest first.
    List {
        /// Only those that are pending, paused, executing, completed, failed, canceled or skipped
        #[arg(long)]
        status: Option<Status>,
        /// At most so many
        #[arg(long, default_value_t = 50)]
        limit: i64,
    },
    /// Move a timer to another time.
    #[command(group(ArgGroup::new("time").args(["within", "at"]).required(true)))]
    Move {
        id: Id,
        #[command(flatten)]
        when: When,
    },
    /// Cancel timers.
    Cancel {
        #[arg(required = true)]
        ids: Vec<Id>,
    },
    /// Fire a pending timer now.
    Fire { id: Id },
    /// Try a failed timer again, now.
    Retry { id: Id },
    /// Hold a recurring timer.
    Pause { id: Id },
    /// Go on with a paused timer.
    Resume { id: Id },
    /// List the attempts of a timer, newest first.
    Attempts { id: Id },
    /// Print what becomes of timers, as it happens.
    Watch {
        /// End after so many
        #[arg(long)]
        count: Option<usize>,
    },
    /// Print the secret that HTTP callbacks are signed with.
    Secret {
        /// Make a new one. The old one counts for a while yet
        #[arg(long)]
        rotate: bool,
    },
}

#[derive(Debug, Args)]
pub struct When {
    /// From now, such as 90s or 2h
    #[arg(long = "in", value_name = "DURATION", conflicts_with = "at")]
    within: Option<String>,
    /// ISO 8601, or a local time with --zone
    #[arg(long, value_name = "TIME")]
    at: Option<String>,
    /// Such as Europe/Berlin, for local times and for --cron
    #[arg(long, value_name = "ZONE")]
    zone: Option<String>,
}

#[derive(Debug, Args)]
pub struct NewTimerOptions {
    #[command(flatten)]
    when: When,
    /// Post to it
    #[arg(long, conflicts_with = "topic", required_unless_present = "topic")]
    url: Option<String>,
    /// Publish to it
    #[arg(long)]
    topic: Option<String>,
    /// For NATS: what goes into the header Tidemark-Key
    #[arg(long, conflicts_with = "url")]
    key: Option<String>,
    /// JSON
    #[arg(long, value_parser = json)]
    payload: Option<Value>,
    /// Such as "Authorization: Bearer …"; may be repeated
    #[arg(long = "header", value_parser = header)]
    headers: Vec<(String, String)>,
    /// JSON, for your own use
    #[arg(long, value_parser = json)]
    metadata: Option<Value>,
    /// Again and again, such as "0 30 9 * * MON-FRI"
    #[arg(long, group = "rhythm", conflicts_with = "every")]
    cron: Option<String>,
    /// Again and again, such as 10m
    #[arg(long, group = "rhythm", value_parser = humantime::parse_duration)]
    every: Option<std::time::Duration>,
    /// So many runs at most
    #[arg(long, requires = "rhythm")]
    count: Option<u32>,
    /// How often a failed callback is tried in all
    #[arg(long)]
    attempts: Option<u32>,
    /// The same one stands for the same timer
    #[arg(long)]
    idempotency_key: Option<String>,
}

impl From<NewTimerOptions> for NewTimer {
    fn from(options: NewTimerOptions) -> Self {
        let headers = (!options.headers.is_empty()).then(|| options.headers.into_iter().collect());
        let callback = match (options.url, options.topic) {
            (Some(url), _) => Callback::Http(HttpCallback { url, headers, payload: options.payload }),
            (None, topic) => {
                let topic = topic.unwrap_or_default();
                Callback::Nats(NatsCallback { topic, key: options.key, headers, payload: options.payload })
            }
        };
        let recurs = options.cron.is_some() || options.every.is_some();
        let recurrence = Recurrence { cron: options.cron, every: options.every, count: options.count, until: None };
        let retry = options.attempts.map(|max_attempts| {
            let by_default = serde_json::json!({ "max_attempts": max_attempts });
            serde_json::from_value::<Retry>(by_default).expect("the rest has defaults")
        });
        Self {
            execute_at: options.when.at,
            execute_in: options.when.within,
            timezone: options.when.zone,
            callback: Some(callback),
            metadata: options.metadata,
            retry,
            recurrence: recurs.then_some(recurrence),
            idempotency_key: options.idempotency_key,
            ..Self::default()
        }
    }
}

fn json(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text)
}

fn header(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once(':').ok_or("must read NAME: VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

impl TimerOptions {
    pub async fn run(self, config: &Config) -> Outcome {
        let Self { verbs, tenant } = self;
        verbs.run(config, async |client: &Client, verb, json| converse(client, &tenant, verb, json).await).await
    }
}

async fn converse(client: &Client, tenant: &Name, verb: Verb, json: bool) -> Result<(), Failure> {
    let one = |id: Id| TimerId { id };
    match verb {
        Verb::Set(options) => {
            let timer = client.create_timer(tenant, &NewTimer::from(*options)).await?;
            show(json, &timer, || print(timer.id))
        }
        Verb::Get { id, secrets } => {
            let timer = match secrets {
                false => client.get_timer(tenant, &one(id)).await?,
                true => client.get_timer_secrets(tenant, &one(id)).await?,
            };
            show(json, &timer, || print_timer(&timer))
        }
        Verb::List { status, limit } => {
            let filter = TimerFilter { status, limit: Some(limit), ..TimerFilter::default() };
            let page = client.list_timers(tenant, &filter).await?;
            show(json, &page, || screen::Table::of(TIMER, &page.timers, cells))
        }
        Verb::Move { id, when: When { within, at, zone } } => {
            let change = ChangedTimer { id, execute_at: at, execute_in: within, timezone: zone, ..Default::default() };
            show_line(json, &client.update_timer(tenant, &change).await?)
        }
        Verb::Cancel { ids } => {
            let ids = ids.iter().map(Id::to_string).collect();
            let canceled = client.cancel_timers(tenant, &TimerIds { ids }).await?;
            show(json, &canceled, || {
                canceled.results.iter().try_for_each(|one| {
                    let id = one.id.map(|id| id.to_string()).unwrap_or_default();
                    print(format_args!("{id}\t{}", one.message))
                })
            })?;
            match canceled.results.iter().filter(|result| result.code != 0).count() {
                0 => Ok(()),
                count => Err(Failure(format!("{count} of {} were not canceled", canceled.results.len()))),
            }
        }
        Verb::Fire { id } => show_line(json, &client.fire_timer(tenant, &one(id)).await?),
        Verb::Retry { id } => show_line(json, &client.retry_timer(tenant, &one(id)).await?),
        Verb::Pause { id } => show_line(json, &client.pause_timer(tenant, &one(id)).await?),
        Verb::Resume { id } => show_line(json, &client.resume_timer(tenant, &one(id)).await?),
        Verb::Attempts { id } => {
            let history = client.list_attempts(tenant, &one(id)).await?;
            show(json, &history, || {
                screen::Table::of(["started", "run", "attempt", "status", "error"], &history.attempts, |one| {
                    let error = one.error.clone().unwrap_or_default();
                    let (run, attempt) = (format!("run {}", one.run), format!("attempt {}", one.attempt));
                    vec![screen::moment(one.started_at), run, attempt, screen::state(one.status.as_str()), error]
                })
            })
        }
        Verb::Watch { count } => watch(client, tenant, count.unwrap_or(usize::MAX), json).await,
        Verb::Secret { rotate } => {
            let secret = match rotate {
                false => client.webhook_secret(tenant, &NoParameters {}).await?,
                true => client.rotate_webhook_secret(tenant, &NoParameters {}).await?,
            };
            show(json, &secret, || print(&secret.secret))
        }
    }
}

/// Prints events until there were enough, or nobody reads them any more.
async fn watch(client: &Client, tenant: &Name, count: usize, json: bool) -> Result<(), Failure> {
    let mut events = client.follow(&format!("timer.{tenant}.>")).await?.take(count);
    while let Some(event) = events.next().await {
        let has_reader = match json {
            true => print_to_reader(String::from_utf8_lossy(&event.payload))?,
            false => {
                let fact: Value = serde_json::from_slice(&event.payload)?;
                let text = |member: &str| fact[member].as_str().unwrap_or_default().to_owned();
                let late = fact["late_by_ms"].as_i64().map(|late| format!("{late} ms late")).unwrap_or_default();
                print_to_reader(format_args!("{}\t{}\t{late}\t{}", text("id"), text("status"), text("error")))?
            }
        };
        if !has_reader {
            break;
        }
    }
    Ok(())
}

const TIMER: [&str; 5] = ["timer", "status", "due", "callback", "late"];

fn show_line(json: bool, timer: &TimerSummary) -> Result<(), Failure> {
    show(json, timer, || screen::Table::of(TIMER, [timer], cells))
}

fn cells(timer: &TimerSummary) -> Vec<String> {
    let late = timer.late_by_ms.map(|late| format!("{late} ms late")).unwrap_or_default();
    let (status, due) = (screen::state(timer.status.as_str()), screen::moment(timer.execute_at));
    vec![timer.id.to_string(), status, due, timer.callback_type.as_str().to_owned(), late]
}

fn print_timer(timer: &Timer) -> Result<(), Failure> {
    print_row("timer", &timer.id)?;
    print_row("status", &screen::state(timer.status.as_str()))?;
    print_row("execute at", &screen::moment(timer.execute_at))?;
    print_row("callback", &serde_json::to_string(&timer.callback_config)?)?;
    let rows: [(&str, Option<String>); 6] = [
        ("next run", timer.next_run_at.map(screen::moment)),
        ("next try", timer.next_attempt_at.map(screen::moment)),
        ("executed at", timer.executed_at.map(screen::moment)),
        ("late by", timer.late_by_ms.map(|late| format!("{late} ms"))),
        ("error", timer.last_error.clone()),
        ("metadata", timer.metadata.as_ref().map(Value::to_string)),
    ];
    rows.iter()
        .filter_map(|(name, value)| Some((name, value.as_ref()?)))
        .try_for_each(|(name, value)| print_row(name, value))
}

//! Setting timers: all that come at the same time in one statement.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use uuid::Uuid;

use super::{Entry, Store, TimerRow, bounded, column, row::columns, unavailable};
use crate::{
    api::timers::{Id, Status, TimerSummary},
    database::{is_locked, is_passing},
    error::{Code, Error, Result},
    timers::plan::Plan,
};

/// Rows of one statement.
const MOST_ROWS: usize = 2000;

/// How long a statement whose answer was lost is asked again.
const DEADLINE: Duration = Duration::from_secs(5);

/// Takes plans from many callers and writes them together.
#[derive(Clone)]
pub struct Inserter(mpsc::Sender<Submission>);

struct Submission {
    plans: Vec<Plan>,
    answer: oneshot::Sender<Vec<Result<Inserted>>>,
}

/// What became of a plan.
#[derive(Debug, Clone)]
pub struct Inserted {
    pub summary: TimerSummary,
    /// For the scheduler, if it is new.
    new: Option<Entry>,
}

impl Inserter {
    /// `kept` hears of every new timer before its caller does, even of one whose caller has left.
    pub fn start(store: Store, kept: impl Fn(Vec<Entry>) + Send + 'static) -> Self {
        let (submissions, mut waiting) = mpsc::channel::<Submission>(1024);
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while waiting.recv_many(&mut batch, MOST_ROWS).await > 0 {
                let mut rest = batch.drain(..).peekable();
                while let Some(first) = rest.next() {
                    let (mut plans, mut shares) = (first.plans, vec![first.answer]);
                    let mut sizes = vec![plans.len()];
                    while let Some(more) = rest.next_if(|more| plans.len() + more.plans.len() <= MOST_ROWS) {
                        sizes.push(more.plans.len());
                        plans.extend(more.plans);
                        shares.push(more.answer);
                    }
                    let answers = store.insert(plans).await;
                    kept(answers.iter().flatten().filter_map(|one| one.new.clone()).collect());
                    let mut answers = answers.into_iter();
                    for (share, size) in shares.into_iter().zip(sizes) {
                        let _ = share.send(answers.by_ref().take(size).collect());
                    }
                }
            }
        });
        Self(submissions)
    }

    /// Keeps the timers. The answers are in the same order.
    pub async fn insert(&self, plans: Vec<Plan>) -> Result<Vec<Result<Inserted>>> {
        let (answer, answered) = oneshot::channel();
        let gone = || Error::unavailable("the process is stopping");
        self.0.send(Submission { plans, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }
}

impl Store {
    async fn insert(&self, plans: Vec<Plan>) -> Vec<Result<Inserted>> {
        let (inserted, found) = match self.insert_until_known(&plans).await {
            Ok(outcome) => outcome,
            // Others need not wait with the one, nor with many.
            Err(Failed { error, in_doubt: false, waited: true }) if plans.len() > 1 => {
                let (deadline, mut answers) = (Instant::now() + DEADLINE, Vec::with_capacity(plans.len()));
                for plan in plans {
                    match Instant::now() < deadline {
                        true => answers.extend(Box::pin(self.insert(vec![plan])).await),
                        false => answers.push(Err(error.share())),
                    }
                }
                return answers;
            }
            Err(Failed { error, in_doubt, .. }) => {
                let failed = |plan: &Plan| match in_doubt {
                    // The statement may have been committed: then this is how to find the timer.
                    true => Error::unavailable(format!(
                        "PostgreSQL went away: whether timer {} was set is not known",
                        plan.id
                    ))
                    .details(serde_json::json!({ "id": Id(plan.id) })),
                    false => error.share(),
                };
                error.log("timer.create");
                return plans.iter().map(|plan| Err(failed(plan))).collect();
            }
        };
        // What is there under our own id we have made, by an attempt whose answer was lost.
        let ours: HashSet<Uuid> = inserted.into_iter().chain(found.iter().map(|row| row.id)).collect();
        let by_key: HashMap<(&str, &str), &TimerRow> = found
            .iter()
            .filter_map(|row| Some(((row.tenant.as_str(), row.idempotency_key.as_deref()?), row)))
            .collect();
        let answer = |plan: Plan| {
            if ours.contains(&plan.id) {
                let new = Entry { due_at: plan.execute_at, id: plan.id, destination: plan.destination.as_str().into() };
                return Ok(Inserted { summary: summary(&plan), new: Some(new) });
            }
            let key = plan.idempotency_key.as_deref().unwrap_or_default();
            match by_key.get(&(plan.tenant.as_str(), key)) {
                Some(row) if row.body_hash == plan.body_hash => Ok(Inserted { summary: row.repeated(), new: None }),
                Some(row) => Err(Error::new(
                    Code::Conflict,
                    format!("idempotency_key: timer {} has this key and another body", row.id),
                )
                .details(serde_json::json!({ "field": "idempotency_key", "id": Id(row.id) }))),
                None => Err(Error::internal("a row was neither inserted nor found")),
            }
        };
        plans.into_iter().map(answer).collect()
    }

    /// Repeats the statement until its outcome is known: rows have their ids, so a repeat changes nothing.
    async fn insert_until_known(&self, plans: &[Plan]) -> Result<(Vec<Uuid>, Vec<TimerRow>), Failed> {
        let deadline = Instant::now() + DEADLINE;
        let mut in_doubt = false;
        loop {
            let mut asked = false;
            let attempt = async {
                let mut connection = self.pool.acquire().await?;
                asked = true;
                let inserted = insert_rows(&mut connection, plans).await?;
                let found = match inserted.len() == plans.len() {
                    true => Vec::new(),
                    false => existing(&mut connection, plans).await?,
                };
                Ok((inserted, found))
            };
            let error = match bounded(attempt).await {
                Ok(outcome) => return Ok(outcome),
                Err(error) => error,
            };
            let (waited, passes) = (is_locked(&error), is_passing(&error));
            // What is refused as a whole is not written.
            in_doubt |= asked && passes && !waited;
            if waited || !passes || Instant::now() >= deadline {
                return Err(Failed { error: unavailable(error), in_doubt, waited });
            }
            tracing::warn!(error = %error, "setting timers is tried again");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Why timers are not set.
struct Failed {
    error: Error,
    /// Whether they may be all the same.
    in_doubt: bool,
    /// Whether somebody holds a timer with the same key.
    waited: bool,
}

/// The ids of those that are new. Who deletes a timer, and takes his time, keeps those waiting that have its key.
async fn insert_rows(connection: &mut sqlx::PgConnection, plans: &[Plan]) -> Result<Vec<Uuid>, sqlx::Error> {
    sqlx::query_scalar(
        "insert into timers (id, tenant, created_at, updated_at, execute_at, due_at, callback_type, callback_config,
             destination, options, metadata, idempotency_key, body_hash, attempts_allowed, traceparent)
         select id, tenant, created_at, created_at, execute_at, execute_at, callback_type, callback_config::json,
             destination, options::json, metadata::jsonb, idempotency_key, body_hash, attempts_allowed, traceparent
         from unnest($1::uuid[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::text[], $6::text[], $7::text[],
             $8::text[], $9::text[], $10::text[], $11::bytea[], $12::int[], $13::text[])
             as plan (id, tenant, created_at, execute_at, callback_type, callback_config, destination, options, metadata,
                 idempotency_key, body_hash, attempts_allowed, traceparent)
         where (select set_config('lock_timeout', '2s', true)) is not null
         on conflict do nothing
         returning id",
    )
    .bind(column(plans, |plan| plan.id))
    .bind(column(plans, |plan| plan.tenant.as_str()))
    .bind(column(plans, |plan| plan.created_at))
    .bind(column(plans, |plan| plan.execute_at))
    .bind(column(plans, |plan| plan.kind.as_str()))
    .bind(column(plans, |plan| plan.callback.as_str()))
    .bind(column(plans, |plan| plan.destination.as_str()))
    .bind(column(plans, |plan| plan.options.as_deref()))
    .bind(column(plans, |plan| plan.metadata.as_deref()))
    .bind(column(plans, |plan| plan.idempotency_key.as_deref()))
    .bind(column(plans, |plan| plan.body_hash.as_deref()))
    .bind(column(plans, |plan| plan.attempts_allowed))
    .bind(column(plans, |plan| plan.traceparent.as_deref()))
    .fetch_all(connection)
    .await
}

/// The timers that stand in the way of some of the plans.
async fn existing(connection: &mut sqlx::PgConnection, plans: &[Plan]) -> Result<Vec<TimerRow>, sqlx::Error> {
    let keyed = || plans.iter().filter_map(|plan| Some((plan.tenant.as_str(), plan.idempotency_key.as_deref()?)));
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from timers where id = any($1) union all select ",
        columns!(),
        // Each by the index: the condition repeats what the index says of itself.
        " from timers t join unnest($2::text[], $3::text[]) as wanted (wanted_tenant, wanted_key)
              on t.tenant = wanted_tenant and t.idempotency_key = wanted_key and t.idempotency_key is not null"
    ))
    .bind(column(plans, |plan| plan.id))
    .bind(keyed().map(|(tenant, _)| tenant).collect::<Vec<_>>())
    .bind(keyed().map(|(_, key)| key).collect::<Vec<_>>())
    .fetch_all(connection)
    .await
}

fn summary(plan: &Plan) -> TimerSummary {
    TimerSummary {
        id: Id(plan.id),
        created_at: plan.created_at,
        updated_at: plan.created_at,
        execute_at: plan.execute_at,
        callback_type: plan.kind,
        status: Status::Pending,
        executed_at: None,
        late_by_ms: None,
        repeated: false,
    }
}

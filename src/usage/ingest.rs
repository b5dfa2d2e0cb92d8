//! Taking records by request: the same way as those that are published, with an answer.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep};

use super::{
    Usage,
    buckets::Left,
    limits::Nested,
    record::{self, invalid, invalid_field},
    verdicts::{self, Verdict},
};
use crate::{
    api::{
        Call, Context, Handle, Name, ReplyHeaders,
        usage::{Ingest, Ingested, Priority},
    },
    error::{Code, Error, Result},
    jetstream::{Message, PublishError, publish_once},
};

impl Handle<Ingest> for Usage {
    async fn handle(&self, call: Call<Ingest>) -> Result<Ingested> {
        let ((tenant, source), body, context) = (&call.target, &call.request, &call.context);
        // On every answer, whatever it will be.
        let limits = self.limits.of(tenant.as_str(), source.as_str());
        self.show_limits(self.buckets.look(tenant, source, &limits).await, context);
        let unreadable = |error| self.refused(tenant, source, 1, error);
        let json = record::as_json(body.encoding, &body.bytes).map_err(unreadable)?;
        let records = record::split(&json).map_err(unreadable)?;
        let count = records.len();
        if count == 0 {
            return Err(invalid_field("records", "is empty"));
        }
        if let Some(closed) = self.ranges.refusal(tenant.as_str(), &records) {
            return Err(self.refused(tenant, source, count, closed));
        }
        self.admit(tenant, source, &limits, &records, json.len(), context)
            .await
            .map_err(|error| self.refused(tenant, source, count, error))?;
        let mut headers = HeaderMap::new();
        if let Some(user) = &context.user {
            headers.insert(Context::USER_HEADER, &**user);
        }
        let sent = self.send(tenant, source, json.clone(), headers, context.respond_async).await;
        let Verdict { accepted, duplicates, mut rejected } = match sent.map_err(|(error, known)| match known {
            true => self.refused(tenant, source, count, error),
            // It may be in the stream, which then counts it.
            false => error,
        })? {
            Some(verdict) => verdict,
            None => return Ok(Ingested::buffered(count)),
        };
        // One that fails alone has an error of its own.
        match (count, rejected.pop()) {
            (1, Some(rejection)) => Err(rejection.reason.into()),
            (_, last) => {
                rejected.extend(last);
                Ok(Ingested::Verdict { accepted, duplicates, rejected })
            }
        }
    }
}

impl Usage {
    /// Counts what comes to nothing.
    fn refused(&self, tenant: &Name, source: &Name, records: usize, error: Error) -> Error {
        self.refusals.count(tenant, source, self.clock.now(), records);
        error
    }

    /// Whether a request may pass: its size, the limits, and the backlog.
    async fn admit(
        &self,
        tenant: &Name,
        source: &Name,
        limits: &Nested,
        records: &[&RawValue],
        bytes: usize,
        context: &Context,
    ) -> Result<()> {
        self.registry.ready()?;
        let most = limits.max_batch_size();
        if records.len() > most {
            let problem = format_args!("has {}, more than this source's {most}", records.len());
            return Err(invalid_field("records", problem));
        }
        if self.backlog.sheds() {
            self.backlog.admit(self.priority(records))?;
        }
        // Sources that nobody has registered share the tenant's bucket: a bucket for each would be one for each invention.
        let source = self.types.has_source(source.as_str()).then_some(source);
        let (admitted, left) = self.buckets.admit(tenant, source, limits, records.len(), bytes).await?;
        self.show_limits(left, context);
        admitted
    }

    fn show_limits(&self, left: Left, context: &Context) {
        context.reply.set(ReplyHeaders::LIMIT, left.limit);
        context.reply.set(ReplyHeaders::REMAINING, left.remaining);
        context.reply.set(ReplyHeaders::RESET, left.reset_at.timestamp());
    }

    /// The priority of the most important record: a request is taken as a whole or not at all.
    fn priority(&self, records: &[&RawValue]) -> Priority {
        #[derive(Deserialize)]
        struct Typed {
            usage_type: String,
        }
        let priority = |record: &&RawValue| {
            let Typed { usage_type } = serde_json::from_str(record.get()).ok()?;
            Some(self.types.known(&usage_type).ok()??.unit.priority)
        };
        records.iter().filter_map(priority).max().unwrap_or(Priority::Low)
    }

    /// Sends a message into the stream, and waits for its verdict unless nobody wants it. None if it did not come in time.
    /// An error says whether it is known that nothing was kept.
    pub(super) async fn send(
        &self,
        tenant: &Name,
        source: &Name,
        payload: Bytes,
        mut headers: HeaderMap,
        hurried: bool,
    ) -> Result<Option<Verdict>, (Error, bool)> {
        let mut expected = self.verdicts.expect();
        if !hurried {
            headers.insert(verdicts::HEADER, expected.address());
        }
        let message = Message { subject: format!("{}.{tenant}.{source}", self.subject), headers, payload };
        let deadline = Instant::now() + self.answer_within;
        self.publish(message, deadline).await?;
        match hurried {
            true => Ok(None),
            false => Ok(expected.verdict(deadline).await),
        }
    }

    /// Publishes a message until it is known to be stored. A repeat may store it twice; then the second is all duplicates.
    async fn publish(&self, message: Message, deadline: Instant) -> Result<(), (Error, bool)> {
        let mut in_doubt = false;
        loop {
            let error = match publish_once(&self.nats, message.clone()).await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let refusal = match &error {
                PublishError::Refused { code: 0, .. } => {
                    Some(invalid("body: is larger than this NATS server's messages may be"))
                }
                PublishError::Refused { description, .. } if description.contains("per subject") => {
                    let message = "this source has too many records in the backlog";
                    Some(Error::new(Code::RateLimited, message).retry_after(Duration::from_secs(1)))
                }
                PublishError::Refused { .. } => {
                    Some(Error::unavailable("the backlog is full").retry_after(Duration::from_secs(1)))
                }
                PublishError::NotStored | PublishError::Unknown(_) => None,
            };
            if let Some(refusal) = refusal {
                return Err((refusal.source(error), !in_doubt));
            }
            in_doubt |= matches!(error, PublishError::Unknown(_));
            if Instant::now() + Duration::from_millis(100) > deadline {
                let message = match in_doubt {
                    true => "NATS is away: whether the records were kept is not known; send them again",
                    false => "NATS is away: nothing was kept",
                };
                return Err((Error::unavailable(message).source(error), !in_doubt));
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}

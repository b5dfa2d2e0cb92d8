//! Serves the hosted operations over request-reply, as NATS micro services: `nats micro ls` shows them.

mod reply;

use std::{
    collections::{BTreeMap, HashMap},
    future::ready,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::Poll,
    time::Instant,
};

use async_nats::{
    Client,
    client::RequestErrorKind,
    service::{Request, Service, ServiceExt, endpoint::Endpoint},
};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, poll, stream::FuturesUnordered};
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::{
    api::{Context, Encoding, IdempotencyKey, Name, ReplyHeaders},
    client::CONTENT_TYPE,
    config,
    error::{Error, Result},
    gateway::{Encoded, Hosted, Wired},
    instance::Report,
    jetstream::round_trip,
    telemetry::Trace,
};

/// The services of one process while they run.
pub struct Services {
    services: Vec<Service>,
    endpoints: JoinSet<()>,
}

/// Every process hosts this service, whatever its roles, so its statistics carry what an instance reports of itself.
const EVERYWHERE: &str = "admin";

/// Where all instances can be asked for their statistics.
pub fn statistics_subject(prefix: &Name) -> String {
    format!("$SRV.STATS.{prefix}-{EVERYWHERE}")
}

/// Whether any instance runs.
pub async fn is_served(client: &Client, prefix: &Name) -> bool {
    let asked = client.request(statistics_subject(prefix), Bytes::new()).await;
    !matches!(asked, Err(error) if error.kind() == RequestErrorKind::NoResponders)
}

/// Starts to serve. Each service of the declarations is one micro service, each operation one endpoint of it.
pub async fn serve(
    client: &Client,
    nats: &config::Nats,
    hosted: &Hosted,
    report: impl Fn() -> Report + Send + Sync + Clone + 'static,
) -> Result<Services, async_nats::Error> {
    let mut by_service: BTreeMap<&str, Vec<Arc<dyn Wired>>> = BTreeMap::new();
    for operation in hosted.wired() {
        by_service.entry(operation.info().service).or_default().push(operation.clone());
    }
    let mut running = Services { services: Vec::new(), endpoints: JoinSet::new() };
    for (name, operations) in by_service {
        let mut builder = client.service_builder().description(format!("Tidemark: {name}"));
        if name == EVERYWHERE {
            let report = report.clone();
            builder = builder.stats_handler(move |_, _| serde_json::json!(report()));
        }
        let service = builder.start(format!("{}-{name}", nats.prefix), env!("CARGO_PKG_VERSION")).await?;
        for operation in operations {
            let info = operation.info();
            let endpoint = service
                .endpoint_builder()
                .name(info.verb.replace('.', "-"))
                .metadata(metadata(info))
                .add(info.pattern(&nats.prefix))
                .await?;
            running.endpoints.spawn(answer_all(endpoint, operation, nats.prefix.clone(), nats.concurrency));
        }
        running.services.push(service);
    }
    // Before the server knows our subscriptions, others would find nobody to answer.
    round_trip(client).await?;
    Ok(running)
}

impl Services {
    /// Takes no more requests, and returns when those under way are answered.
    pub async fn stop(mut self) {
        for service in self.services {
            if let Err(error) = service.stop().await {
                tracing::warn!(%error, "a service did not stop cleanly");
            }
        }
        while self.endpoints.join_next().await.is_some() {}
    }
}

fn metadata(info: &crate::api::Info) -> HashMap<String, String> {
    HashMap::from([
        ("summary".to_owned(), info.summary()),
        ("content-type".to_owned(), "application/json, application/msgpack".to_owned()),
        ("schema".to_owned(), format!("/openapi.json, operationId {}", info.name())),
    ])
}

/// Answers the requests of one endpoint, many at once. Only the answers are computed side by side, and what waits is small:
/// there may be a thousand of them. Replies are sent one after the other, which is no more than putting them into a buffer.
async fn answer_all(mut endpoint: Endpoint, operation: Arc<dyn Wired>, prefix: Name, concurrency: usize) {
    let name = operation.info().name();
    let leading = operation.info().pattern(&prefix).split('.').filter(|token| *token != "*").count();
    let meters = Meters::new(&name);
    let mut under_way = FuturesUnordered::new();
    let mut open = true;
    while open || !under_way.is_empty() {
        tokio::select! {
            biased;
            Some(answered) = under_way.next() => reply(answered, &name, &meters).await,
            request = endpoint.next(), if open && under_way.len() < concurrency => match request {
                Some(request) => {
                    meters.requests.increment(1);
                    if !reply::is_wanted(&request, &name) {
                        continue;
                    }
                    let mut answer = answer(&*operation, leading, Box::new(request));
                    // Many answers are at hand at once, and need not wait among the others.
                    match poll!(&mut answer) {
                        Poll::Ready(answered) => reply(answered, &name, &meters).await,
                        Poll::Pending => under_way.push(answer),
                    }
                }
                None => open = false,
            },
        }
    }
}

/// What is measured of an operation.
struct Meters {
    requests: metrics::Counter,
    errors: metrics::Counter,
    latency: metrics::Histogram,
}

impl Meters {
    fn new(operation: &str) -> Self {
        let operation = operation.to_owned();
        Self {
            requests: metrics::counter!("tidemark_nats_requests_total", "operation" => operation.clone()),
            errors: metrics::counter!("tidemark_nats_errors_total", "operation" => operation.clone()),
            latency: metrics::histogram!("tidemark_nats_request_seconds", "operation" => operation),
        }
    }
}

/// A request and what it is answered with. The request is large, and passed from hand to hand.
struct Answered {
    request: Box<Request>,
    began: Instant,
    encoding: Encoding,
    answer: Result<Encoded>,
    reply: ReplyHeaders,
}

/// The answer to come. Not async itself, so that only what is needed for the reply waits with it.
fn answer(
    operation: &dyn Wired,
    leading: usize,
    request: Box<Request>,
) -> impl Future<Output = Answered> + Unpin + use<> {
    let began = Instant::now();
    let encoding = Encoding::of(header(&request, CONTENT_TYPE));
    // A panic is a defect, but not a reason to leave every later caller without an answer.
    let panicked = |_| Error::internal("the handler panicked");
    let reply = ReplyHeaders::of(operation.info());
    let begun = catch_unwind(AssertUnwindSafe(|| begin(operation, encoding, leading, &request, reply.clone())));
    let answer = begun.map_err(panicked).flatten().unwrap_or_else(|error| ready(Err(error)).boxed());
    AssertUnwindSafe(answer).catch_unwind().map(move |answer| {
        let answer = answer.map_err(panicked).flatten();
        Answered { request, began, encoding, answer, reply }
    })
}

fn begin(
    operation: &dyn Wired,
    encoding: Encoding,
    leading: usize,
    request: &Request,
    reply: ReplyHeaders,
) -> Result<BoxFuture<'static, Result<Encoded>>> {
    let names = request.message.subject.split('.').skip(leading).map(str::parse).collect::<Result<Vec<Name>>>()?;
    let context = Context {
        idempotency_key: header(request, IdempotencyKey::HEADER).map(str::parse).transpose()?,
        trace: Trace::from_header(header(request, Trace::HEADER)),
        named: Context::name(header(request, MESSAGE_ID).or_else(|| header(request, Context::NAME_HEADER))),
        respond_async: Context::prefers_async(header(request, Context::PREFER_HEADER)),
        actor: None,
        user: header(request, Context::USER_HEADER).map(user).transpose()?,
        reply,
    };
    let span = context.trace.id().map(|trace_id| tracing::info_span!("nats", trace_id));
    let answer = operation.answer(encoding, names, request.message.payload.clone(), context);
    Ok(match span {
        Some(span) => answer.instrument(span).boxed(),
        None => answer,
    })
}

async fn reply(answered: Answered, name: &str, meters: &Meters) {
    let Answered { request, began, encoding, answer, reply } = answered;
    if let Err(error) = &answer {
        meters.errors.increment(1);
        error.log(name);
    }
    if let Err(error) = reply::send(&request, encoding, answer, reply.take()).await {
        tracing::warn!(operation = name, %error, "a reply was not sent");
    }
    meters.latency.record(began.elapsed().as_secs_f64());
}

fn user(header: &str) -> Result<Arc<str>> {
    Context::check_text(Context::USER_HEADER, header)?;
    Ok(header.into())
}

/// How NATS calls a message.
const MESSAGE_ID: &str = "Nats-Msg-Id";

/// Whatever the case: HTTP has taught people that it does not matter. Of several spellings it is always the same one.
fn header<'a>(request: &'a Request, name: &str) -> Option<&'a str> {
    let headers = request.message.headers.as_ref()?;
    let spelled = headers.iter().map(|(found, values)| (AsRef::<str>::as_ref(found), values));
    let found = spelled.filter(|(found, _)| found.eq_ignore_ascii_case(name)).min_by_key(|(found, _)| *found);
    found?.1.first().map(|value| value.as_str())
}

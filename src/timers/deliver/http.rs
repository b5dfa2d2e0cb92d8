//! HTTP callbacks: one POST over a pooled connection.

use std::{collections::BTreeMap, error::Error as StdError, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use chrono::{DateTime, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::timeout;
use url::Url;

use super::{Report, Signer, guard::Guarded};
use crate::{
    api::timers::{CapturedResponse, HttpCallback},
    config,
    error::chain,
    telemetry::Trace,
    timers::{plan::Options, store::Claimed},
};

const USER_AGENT: &str = concat!("tidemark/", env!("CARGO_PKG_VERSION"));

/// What is kept of an answer.
const CAPTURED: usize = 16 * 1024;
/// What is read of an answer that is checked.
const CHECKED: usize = 1024 * 1024;
/// An answer that nobody wants is read so far, and so long, that its connection can be used again.
const DRAINED: usize = 64 * 1024;
const DRAINING: Duration = Duration::from_secs(1);

/// A wait that a receiver may ask for at most.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

/// Connections that nobody uses are closed after this, which is before most servers close them (some do after 5 s).
const IDLE: Duration = Duration::from_secs(4);

pub struct HttpCaller {
    client: Client<HttpsConnector<Guarded>, Full<Bytes>>,
    signer: Arc<Signer>,
    limit: Duration,
}

impl HttpCaller {
    pub fn new(timers: &config::Timers, signer: Arc<Signer>) -> Self {
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls())
            .https_or_http()
            .enable_http1()
            .wrap_connector(Guarded::new(&timers.allow_networks));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(timers.concurrency_per_destination)
            .build(connector);
        Self { client, signer, limit: timers.callback_timeout }
    }

    /// Calls back. `now` is the moment that is signed.
    pub async fn call(&self, timer: &Claimed, callback: &HttpCallback, now: DateTime<Utc>) -> Report {
        let request = match self.request(timer, callback, now) {
            Ok(request) => request,
            Err(problem) => return Report::failure(problem),
        };
        match timeout(self.limit, self.exchange(request, &timer.options)).await {
            Ok(report) => report,
            Err(_) => Report::failure(format!("timeout: no answer within {}", humantime::format_duration(self.limit))),
        }
    }

    fn request(
        &self,
        timer: &Claimed,
        callback: &HttpCallback,
        now: DateTime<Utc>,
    ) -> Result<Request<Full<Bytes>>, String> {
        let mut url = Url::parse(&callback.url).map_err(|error| format!("callback.url: {error}"))?;
        url.set_fragment(None);
        let uri: Uri = url.as_str().parse().map_err(|error| format!("callback.url: {error}"))?;
        let body = match &callback.payload {
            Some(payload) => Bytes::from(serde_json::to_vec(payload).map_err(|error| error.to_string())?),
            None => Bytes::new(),
        };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        for (name, value) in callback.headers.iter().flatten() {
            let invalid = |_| format!("callback.headers.{name}: is not valid");
            let header = HeaderName::try_from(name).map_err(|_| invalid(()))?;
            headers.insert(header, HeaderValue::try_from(value).map_err(|_| invalid(()))?);
        }
        let mut ours = |name: &'static str, value: String| {
            HeaderValue::try_from(value).map(|value| headers.insert(name, value)).map_err(|error| error.to_string())
        };
        let id = timer.delivery_id();
        if let Some(signature) = self.signer.sign(&timer.tenant, &id, now, &body) {
            ours("webhook-signature", signature)?;
        }
        ours("webhook-timestamp", now.timestamp().to_string())?;
        ours("webhook-id", id)?;
        if let Some(trace) = timer.trace().header() {
            ours(Trace::HEADER, trace)?;
        }
        let mut request = Request::post(uri).body(Full::new(body)).map_err(|error| error.to_string())?;
        *request.headers_mut() = headers;
        Ok(request)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>, options: &Options) -> Report {
        let response = match self.client.request(request).await {
            Ok(response) => response,
            Err(error) => return Report::failure(reason(&error)),
        };
        let status = response.status();
        let retry_after = retry_after(response.headers());
        let schema = options.expect.as_ref().and_then(|expect| expect.schema.as_ref());
        let statuses = options.expect.as_ref().and_then(|expect| expect.status.as_ref());
        let welcome = match statuses {
            Some(statuses) => statuses.contains(&status.as_u16()),
            None => status.is_success(),
        };
        let mut error = (!welcome).then(|| match status.is_success() {
            true => format!("HTTP {} is not among the expected statuses", status.as_u16()),
            false => format!("HTTP {}", status.as_u16()),
        });
        let mut captured = None;
        if options.capture_response || schema.is_some() {
            let headers = options.capture_response.then(|| shown(response.headers()));
            let limit = if schema.is_some() { CHECKED } else { CAPTURED };
            match read(response, limit).await {
                Ok((body, truncated)) => {
                    if let Some(schema) = schema.filter(|_| error.is_none()) {
                        error = mismatch(schema, &body, truncated);
                    }
                    captured = headers.map(|headers| CapturedResponse {
                        status: status.as_u16(),
                        headers,
                        // A NUL can't be kept in PostgreSQL's JSON.
                        body: String::from_utf8_lossy(&body[..body.len().min(CAPTURED)]).replace('\0', "\u{fffd}"),
                        truncated: truncated || body.len() > CAPTURED,
                    });
                }
                // Only who wants to check the answer needs all of it.
                Err(problem) if schema.is_some() => error = error.or(Some(format!("the answer broke off: {problem}"))),
                Err(_) => {}
            }
        } else {
            let _ = timeout(DRAINING, read(response, DRAINED)).await;
        }
        Report { error: error.as_deref().map(super::kept), retry_after, response: captured }
    }
}

/// Trusts whom the system trusts (`SSL_CERT_FILE` names others). A system that trusts nobody still calls back over HTTP.
fn tls() -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("the provider has the usual versions");
    let trusting = builder.clone().with_native_roots().map(|trusting| trusting.with_no_client_auth());
    trusting.unwrap_or_else(|error| {
        tracing::warn!(%error, "no certificates are trusted: HTTPS callbacks will fail");
        builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth()
    })
}

/// The body up to a limit, and whether there was more.
async fn read(response: Response<Incoming>, limit: usize) -> Result<(Bytes, bool), hyper::Error> {
    let mut incoming = response.into_body();
    let mut body = BytesMut::new();
    while let Some(frame) = incoming.frame().await {
        if let Ok(data) = frame?.into_data() {
            let room = limit - body.len();
            body.extend_from_slice(&data[..data.len().min(room)]);
            if data.len() > room {
                return Ok((body.freeze(), true));
            }
        }
    }
    Ok((body.freeze(), false))
}

/// How an answer differs from what was expected of it.
fn mismatch(schema: &serde_json::Value, body: &[u8], truncated: bool) -> Option<String> {
    if truncated {
        return Some(format!("the answer is larger than {CHECKED} bytes and was not checked"));
    }
    let Ok(answer) = serde_json::from_slice(body) else { return Some("the answer is not JSON".into()) };
    match crate::schema::schema(schema) {
        Ok(schema) => {
            // The answer itself stays out of it: it is kept only where that is asked for.
            let unfit = schema.validate(&answer).err();
            unfit.map(|error| format!("the answer does not fit expect.schema: {}", error.masked()))
        }
        Err(problem) => Some(format!("expect.schema {problem}")),
    }
}

fn shown(headers: &HeaderMap) -> BTreeMap<String, String> {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

/// Seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    let wait = match text.trim().parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => (DateTime::parse_from_rfc2822(text).ok()?.to_utc() - Utc::now()).to_std().ok()?,
    };
    Some(wait.min(LONGEST_WAIT))
}

/// What stood in the way, without the library's own words around it.
fn reason(error: &hyper_util::client::legacy::Error) -> String {
    let mut cause: &(dyn StdError + 'static) = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    if error.is_connect() { format!("connection failed: {cause}") } else { chain(error) }
}

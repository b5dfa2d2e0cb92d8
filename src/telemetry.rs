//! Logs, metrics and traces.

use std::{sync::OnceLock, time::Duration};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, Telemetry};

/// Bounds of all latency histograms, in seconds: from a number served from memory to a request that times out.
const LATENCIES: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

const SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];

/// Starts logging to stderr. The answer says what is wrong with the filter.
pub fn init_logs(telemetry: &Telemetry) -> Result<(), String> {
    let filter = match std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty()) {
        Some(text) => EnvFilter::try_new(text).map_err(|error| format!("RUST_LOG: {error}"))?,
        None => EnvFilter::try_new(&telemetry.log_level).map_err(|error| format!("telemetry.log_level: {error}"))?,
    };
    let colours = console::colors_enabled_stderr();
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    let started = match telemetry.log_format {
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
        LogFormat::Pretty => logs.try_init(),
    };
    started.map_err(|error| error.to_string())
}

/// The metrics of this process, for `/metrics`. The recorder is global, so there is one however often it is asked for.
pub fn metrics() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let builder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), LATENCIES)
            .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_size".into()), SIZES))
            .expect("the bounds are not empty");
        let handle = builder.install_recorder().expect("nobody else installs a recorder");
        metrics::gauge!("tidemark_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        handle
    })
}

/// Folds samples into their histograms. Without it they would pile up until somebody scrapes, which may be never.
pub async fn upkeep(stop: CancellationToken) {
    while timeout(Duration::from_secs(5), stop.cancelled()).await.is_err() {
        metrics().run_upkeep();
    }
}

/// A W3C trace that a request belongs to, if it belongs to one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trace(Option<TraceParent>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TraceParent {
    trace_id: u128,
    flags: u8,
}

impl Trace {
    pub const HEADER: &str = "traceparent";

    /// A new trace, not sampled by anyone yet.
    pub fn begin() -> Self {
        Self(Some(TraceParent { trace_id: rand::random_range(1..=u128::MAX), flags: 0 }))
    }

    /// The trace that a header names. A malformed one counts as none, as the standard asks.
    pub fn from_header(header: Option<&str>) -> Self {
        let parse = |text: &str| {
            let mut parts = text.split('-');
            let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
            let hex = |text: &str, length| {
                text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
            };
            let shaped = hex(version, 2) && hex(trace, 32) && hex(span, 16) && hex(flags, 2);
            let extra = version == "00" && parts.next().is_some();
            if !shaped || version == "ff" || extra || u64::from_str_radix(span, 16).ok()? == 0 {
                return None;
            }
            let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
            Some(TraceParent { trace_id, flags: u8::from_str_radix(flags, 16).ok()? })
        };
        Self(header.and_then(parse))
    }

    pub fn or_begin(self) -> Self {
        if self.0.is_some() { self } else { Self::begin() }
    }

    /// The header for the next hop, with a span of its own.
    pub fn header(self) -> Option<String> {
        let TraceParent { trace_id, flags } = self.0?;
        Some(format!("00-{trace_id:032x}-{:016x}-{flags:02x}", rand::random_range(1..=u64::MAX)))
    }

    /// The id as logs show it.
    pub fn id(self) -> Option<String> {
        self.0.map(|parent| format!("{:032x}", parent.trace_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_carried_on_under_a_new_span() {
        let incoming = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let trace = Trace::from_header(Some(incoming));
        assert_eq!(trace.id().unwrap(), "0af7651916cd43dd8448eb211c80319c");
        let outgoing = trace.header().unwrap();
        assert_ne!(outgoing, incoming);
        assert_eq!(Trace::from_header(Some(&outgoing)), trace);
    }

    #[test]
    fn malformed_headers_count_as_none() {
        for text in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra",
        ] {
            assert_eq!(Trace::from_header(Some(text)), Trace(None), "{text}");
        }
        assert_ne!(Trace::default().or_begin(), Trace(None));
    }
}

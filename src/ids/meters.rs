//! What is measured of a key, under the names that IDBuilder's dashboards know. The handles are found once per key.

use std::{sync::Arc, time::Instant};

use metrics::{Counter, Gauge, Histogram};

use crate::{
    api::{Name, ids::IdType},
    per_name::PerName,
};

/// How far a counter has come.
pub struct Gauges {
    current: Gauge,
    remaining: Gauge,
}

impl Gauges {
    pub fn new(key: &Name) -> Self {
        Self {
            current: metrics::gauge!("idbuilder_sequence_current", "key" => key.to_string()),
            remaining: metrics::gauge!("idbuilder_cache_remaining", "key" => key.to_string()),
        }
    }

    pub fn given(&self, numbers: &[i64]) {
        if let Some(last) = numbers.last() {
            self.current.set(*last as f64);
        }
    }

    pub fn remaining(&self, numbers: i64) {
        self.remaining.set(numbers as f64);
    }
}

/// The requests for ids, by key. Ask it for keys that exist only: a label must not have a value per caller's whim.
#[derive(Default)]
pub struct Requests(PerName<(Counter, Histogram)>);

impl Requests {
    /// Counts a request, and times it until the answer goes, however it ends.
    pub fn measure(&self, key: &Name, id_type: IdType) -> Measured {
        let make = || {
            let labels = [("key", key.to_string()), ("id_type", id_type.as_str().to_owned())];
            let requests = metrics::counter!("idbuilder_requests_total", &labels);
            (requests, metrics::histogram!("idbuilder_request_duration_seconds", &labels))
        };
        let meters = self.0.get(key, make);
        meters.0.increment(1);
        Measured { meters, began: Instant::now() }
    }
}

/// A request under way.
#[must_use]
pub struct Measured {
    meters: Arc<(Counter, Histogram)>,
    began: Instant,
}

impl Drop for Measured {
    fn drop(&mut self) {
        self.meters.1.record(self.began.elapsed().as_secs_f64());
    }
}

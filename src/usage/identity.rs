//! What makes a record the same record.

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

/// Whose a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Origin<'a> {
    pub tenant: &'a str,
    pub source: &'a str,
}

/// A record's id: 48 bits of time and 74 of a hash. The time is that of a key that is a UUIDv7, so that new rows are
/// written side by side; any other key counts as very old, with more bits of the hash in place of a time. It depends on the key
/// alone, never on a clock.
pub fn record_id(namespace: &str, origin: Origin<'_>, usage_type: &str, resource_id: &str, key: &str) -> Uuid {
    let hash = hash(&[namespace, origin.tenant, origin.source, usage_type, resource_id, key]);
    let mut bytes: [u8; 16] = hash[..16].try_into().expect("half of a hash");
    match milliseconds(key) {
        Some(time) => bytes[..6].copy_from_slice(&time),
        None => bytes[..2].fill(0),
    }
    Builder::from_custom_bytes(bytes).into_uuid()
}

/// What the readings of one counter share.
pub fn series(origin: Origin<'_>, usage_type: &str, resource_id: &str) -> Uuid {
    let hash = hash(&[origin.tenant, origin.source, usage_type, resource_id]);
    Builder::from_custom_bytes(hash[..16].try_into().expect("half of a hash")).into_uuid()
}

/// The time in a key that is a UUIDv7, however it is spelled.
fn milliseconds(key: &str) -> Option<[u8; 6]> {
    let key = Uuid::try_parse(key).ok().filter(|key| key.get_version_num() == 7)?;
    key.as_bytes()[..6].try_into().ok()
}

/// The time that a record's id begins with.
pub fn time_of(id: Uuid) -> DateTime<Utc> {
    let mut bytes = [0; 8];
    bytes[2..].copy_from_slice(&id.as_bytes()[..6]);
    DateTime::from_timestamp_millis(i64::from_be_bytes(bytes)).unwrap_or(DateTime::UNIX_EPOCH)
}

/// Each part with its length, so that no two lists look the same.
pub fn hash(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin<'_> = Origin { tenant: "acme", source: "api" };

    #[test]
    fn the_time_of_a_uuid_v7_leads() {
        let key = Uuid::now_v7();
        let id = record_id("", ORIGIN, "calls", "r", &key.to_string());
        assert_eq!(id.as_bytes()[..6], key.as_bytes()[..6]);
        assert_eq!((id.get_version_num(), id.get_variant()), (8, uuid::Variant::RFC4122));
        assert_eq!(record_id("", ORIGIN, "calls", "r", &key.to_string()), id, "the same key is the same record");
    }

    #[test]
    fn other_keys_are_very_old() {
        for key in ["1", "order-7", &Uuid::new_v4().to_string(), "0192f7c6-0000-7000-8000"] {
            assert_eq!(record_id("", ORIGIN, "calls", "r", key).as_bytes()[..2], [0, 0], "{key}");
        }
    }

    #[test]
    fn every_part_counts_and_parts_do_not_run_together() {
        let other = Origin { tenant: "acm", source: "eapi" };
        let ids = [
            record_id("", ORIGIN, "calls", "r", "k"),
            record_id("b", ORIGIN, "calls", "r", "k"),
            record_id("", other, "calls", "r", "k"),
            record_id("", ORIGIN, "call", "sr", "k"),
            record_id("", ORIGIN, "calls", "rk", ""),
            series(ORIGIN, "calls", "r"),
            series(ORIGIN, "callsr", ""),
        ];
        let distinct: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
    }
}

//! Cursors: where a page ended, sealed so that nobody makes up another.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::{DateTime, TimeDelta, Utc};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use sqlx::PgPool;
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::{
    record::invalid_field,
    store::{self, Place, unavailable},
};
use crate::error::{Code, Error, Result};

/// How long a cursor can be used.
const LIFE: TimeDelta = TimeDelta::hours(48);

const VERSION: u8 = 1;
const SEAL: usize = 16;
const BYTES: usize = 1 + 8 + 16 + 8 + 16 + 4;

/// Seals cursors and opens them, with a secret that all instances share.
#[derive(Default)]
pub struct Cursors {
    secret: OnceCell<Vec<u8>>,
}

/// What a cursor says.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Content {
    issued_at: i64,
    /// Of tenant and filters.
    fingerprint: [u8; 16],
    place: Place,
}

impl Cursors {
    async fn secret(&self, database: &PgPool) -> Result<&[u8]> {
        let secret = self.secret.get_or_try_init(|| store::cursor_secret(database)).await;
        secret.map(Vec::as_slice).map_err(unavailable)
    }

    pub async fn seal(
        &self,
        database: &PgPool,
        fingerprint: [u8; 16],
        place: Place,
        now: DateTime<Utc>,
    ) -> Result<String> {
        let content = Content { issued_at: now.timestamp(), fingerprint, place };
        Ok(content.seal(self.secret(database).await?))
    }

    /// The place of a cursor that was made for the same tenant and filters.
    pub async fn open(
        &self,
        database: &PgPool,
        fingerprint: [u8; 16],
        text: &str,
        now: DateTime<Utc>,
    ) -> Result<Place> {
        let content = Content::open(text, self.secret(database).await?);
        let content = content.ok_or_else(|| invalid_field("cursor", "is none of ours"))?;
        if content.fingerprint != fingerprint {
            return Err(invalid_field("cursor", "was made for other filters: repeat those of the first page"));
        }
        if now.timestamp() - content.issued_at > LIFE.num_seconds() {
            let problem = format_args!("is older than {} hours: begin again", LIFE.num_hours());
            return Err(Error::field_as(Code::CursorExpired, "cursor", problem));
        }
        Ok(content.place)
    }
}

fn seal_of(bytes: &[u8], secret: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any length is a key");
    mac.update(bytes);
    mac
}

impl Content {
    fn seal(&self, secret: &[u8]) -> String {
        let mut bytes = Vec::with_capacity(BYTES + SEAL);
        bytes.push(VERSION);
        bytes.extend(self.issued_at.to_be_bytes());
        bytes.extend(self.fingerprint);
        bytes.extend(self.place.event_timestamp.timestamp_micros().to_be_bytes());
        bytes.extend(self.place.id.as_bytes());
        bytes.extend(self.place.revision.to_be_bytes());
        let seal = seal_of(&bytes, secret).finalize().into_bytes();
        bytes.extend(&seal[..SEAL]);
        BASE64_URL_SAFE_NO_PAD.encode(bytes)
    }

    fn open(text: &str, secret: &[u8]) -> Option<Self> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let (bytes, seal) = bytes.split_at_checked(BYTES)?;
        if seal.len() != SEAL || seal_of(bytes, secret).verify_truncated_left(seal).is_err() {
            return None;
        }
        let (version, rest) = bytes.split_first_chunk::<1>()?;
        let (issued_at, rest) = rest.split_first_chunk()?;
        let (fingerprint, rest) = rest.split_first_chunk()?;
        let (micros, rest) = rest.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let place = Place {
            event_timestamp: DateTime::from_timestamp_micros(i64::from_be_bytes(*micros))?,
            id: Uuid::from_bytes(*id),
            revision: i32::from_be_bytes(rest.try_into().ok()?),
        };
        (version == &[VERSION]).then_some(Self {
            issued_at: i64::from_be_bytes(*issued_at),
            fingerprint: *fingerprint,
            place,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_comes_back_and_no_other_byte_will_do() {
        let place = Place { event_timestamp: DateTime::UNIX_EPOCH, id: Uuid::now_v7(), revision: 3 };
        let content = Content { issued_at: 7, fingerprint: [5; 16], place };
        let text = content.seal(b"secret");
        assert_eq!(Content::open(&text, b"secret"), Some(content));
        assert_eq!(Content::open(&text, b"other"), None);
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(&text).unwrap();
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert_eq!(Content::open(&BASE64_URL_SAFE_NO_PAD.encode(&changed), b"secret"), None, "{index}");
            assert_eq!(Content::open(&BASE64_URL_SAFE_NO_PAD.encode(&bytes[..index]), b"secret"), None);
        }
        assert_eq!(Content::open(&format!("{text}AA"), b"secret"), None);
    }
}

//! Standard Webhooks: how a receiver knows that a callback is ours, and unchanged.
//!
//! A tenant's secret is derived from the server's own and a generation, so nothing secret is stored: rotating goes to the
//! next generation, and for a while callbacks carry a signature by both.

use base64::{Engine, prelude::BASE64_STANDARD};
use chrono::{DateTime, TimeDelta, Utc};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::{
    api::{Name, timers::WebhookSecret},
    error::{Error, Result},
    registry::{Record, Registry, Row},
};

/// What the registry knows of a tenant's webhook secret. One that never rotated has no record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rotation {
    pub generation: u32,
    pub rotated_at: DateTime<Utc>,
}

impl Record for Rotation {
    const TABLE: &'static str = "webhook";
}

/// The secrets of all tenants.
pub struct Signer {
    /// The server's own. Without one nothing is signed.
    master: Option<Vec<u8>>,
    registry: Registry,
    overlap: TimeDelta,
}

impl Signer {
    pub fn new(master: Option<Vec<u8>>, registry: Registry, overlap: std::time::Duration) -> Self {
        Self { master, registry, overlap: TimeDelta::from_std(overlap).unwrap_or(TimeDelta::MAX) }
    }

    /// What goes into `webhook-signature`: one signature for each secret that counts now.
    pub fn sign(&self, tenant: &Name, id: &str, at: DateTime<Utc>, body: &[u8]) -> Option<String> {
        let (current, previous) = self.secrets(tenant, at)?;
        let signatures: Vec<String> =
            [Some(current), previous].into_iter().flatten().map(|secret| signature(&secret, id, at, body)).collect();
        Some(signatures.join(" "))
    }

    /// The secret as receivers keep it.
    pub fn show(&self, tenant: &Name, now: DateTime<Utc>) -> Result<WebhookSecret> {
        let unsigned =
            || Error::unavailable("callbacks are not signed: neither auth.token_secret nor auth.admin_token is set");
        let (current, previous) = self.secrets(tenant, now).ok_or_else(unsigned)?;
        Ok(WebhookSecret { secret: written(&current), previous: previous.as_ref().map(written) })
    }

    /// Goes to the next secret.
    pub async fn rotate(&self, tenant: &Name, now: DateTime<Utc>) -> Result<WebhookSecret> {
        self.registry.ready()?;
        let Row { record, revision } = self.registry.webhooks.get(tenant.as_str());
        let generation = record.map_or(0, |rotation| rotation.generation) + 1;
        self.registry.store(tenant, &Rotation { generation, rotated_at: now }, revision).await?;
        self.show(tenant, now)
    }

    /// The current one, and the one before while that still counts.
    fn secrets(&self, tenant: &Name, now: DateTime<Utc>) -> Option<(Secret, Option<Secret>)> {
        let master = self.master.as_deref()?;
        let derive = |generation: u32| derive(master, tenant, generation);
        Some(match self.registry.webhooks.get(tenant.as_str()).record {
            None => (derive(0), None),
            Some(rotation) => {
                let counts = now - rotation.rotated_at < self.overlap;
                let previous = rotation.generation.checked_sub(1).filter(|_| counts);
                (derive(rotation.generation), previous.map(derive))
            }
        })
    }
}

type Secret = [u8; 32];

fn derive(master: &[u8], tenant: &Name, generation: u32) -> Secret {
    let mut mac = Hmac::<Sha256>::new_from_slice(master).expect("any length will do");
    mac.update(format!("tidemark webhook {tenant} {generation}").as_bytes());
    mac.finalize().into_bytes().into()
}

fn written(secret: &Secret) -> String {
    format!("whsec_{}", BASE64_STANDARD.encode(secret))
}

fn signature(secret: &Secret, id: &str, at: DateTime<Utc>, body: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any length will do");
    mac.update(format!("{id}.{}.", at.timestamp()).as_bytes());
    mac.update(body);
    format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standards_own_example_is_signed_alike() {
        // From the specification's reference libraries.
        let secret = BASE64_STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret).unwrap();
        mac.update(b"msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.{\"test\": 2432232314}");
        assert_eq!(BASE64_STANDARD.encode(mac.finalize().into_bytes()), "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn tenants_and_generations_have_secrets_of_their_own() {
        let secret = |tenant: &str, generation| derive(b"master", &tenant.parse().unwrap(), generation);
        assert_eq!(secret("acme", 0), secret("acme", 0));
        assert_ne!(secret("acme", 0), secret("acme", 1));
        assert_ne!(secret("acme", 0), secret("other", 0));
        assert!(written(&secret("acme", 0)).starts_with("whsec_"));
    }
}

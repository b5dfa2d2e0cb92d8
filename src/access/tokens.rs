//! Key tokens: what opens one key over HTTP. Nothing of them is stored: a token carries its key, its generation and its
//! end, signed under the server's secret.

use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{api::Name, config, hex};

/// Recognisable in a leak scan. A token reads `tmt_<key>.<generation>.<end>.<signature>`; a key's name has no dot.
const PREFIX: &str = "tmt_";

/// Makes and checks tokens.
pub struct Tokens {
    secret: Vec<u8>,
}

/// What a valid token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub key: Name,
    pub generation: u64,
}

impl Tokens {
    /// Under the configured secret, or one that comes from the admin token. None without either.
    pub fn new(auth: &config::Auth) -> Option<Self> {
        let secret = match (&auth.token_secret, &auth.admin_token) {
            (Some(secret), _) => secret.expose().as_bytes().to_vec(),
            (None, Some(admin)) => sign(admin.expose().as_bytes(), "key tokens").finalize().into_bytes().to_vec(),
            (None, None) => return None,
        };
        Some(Self { secret })
    }

    pub fn issue(&self, key: &Name, generation: u64, expires_at: DateTime<Utc>) -> String {
        let claim = format!("{key}.{generation}.{}", expires_at.timestamp_millis());
        let signature = sign(&self.secret, &claim).finalize().into_bytes();
        format!("{PREFIX}{claim}.{}", hex::encode(&signature))
    }

    /// What the token claims, if we made it and its time is not over. Whether its generation still counts is not known
    /// here.
    pub fn verify(&self, token: &str, now: DateTime<Utc>) -> Option<Claim> {
        let (claim, signature) = token.strip_prefix(PREFIX)?.rsplit_once('.')?;
        // Compares in constant time.
        sign(&self.secret, claim).verify_slice(&hex::decode(signature)?).ok()?;
        let mut fields = claim.splitn(3, '.');
        let (key, generation, expires) = (fields.next()?, fields.next()?, fields.next()?);
        let alive = now.timestamp_millis() < expires.parse().ok()?;
        alive.then_some(Claim { key: key.parse().ok()?, generation: generation.parse().ok()? })
    }
}

fn sign(secret: &[u8], text: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key of any length will do");
    mac.update(text.as_bytes());
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(secret: &str) -> Tokens {
        Tokens { secret: secret.into() }
    }

    #[test]
    fn only_our_own_living_tokens_are_valid() {
        let (key, tokens) = ("orders".parse::<Name>().unwrap(), tokens("secret"));
        let time = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
        let token = tokens.issue(&key, 7, time(100));
        assert_eq!(tokens.verify(&token, time(99)), Some(Claim { key, generation: 7 }));
        assert_eq!(tokens.verify(&token, time(100)), None, "its time is over");
        for forged in [
            token.replace("orders", "invoices"),
            token.replace(".7.", ".8."),
            token.replace("100000", "900000"),
            token[..token.len() - 2].to_owned(),
            format!("{token}é"),
            format!("{token}0"),
            "tmt_".into(),
            "tmt_a.b.c.d".into(),
            String::new(),
        ] {
            assert_eq!(tokens.verify(&forged, time(1)), None, "{forged}");
        }
        assert_eq!(super::Tokens { secret: "other".into() }.verify(&token, time(1)), None);
    }
}

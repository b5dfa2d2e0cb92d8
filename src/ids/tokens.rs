//! Tokens that open one key.

use chrono::{DateTime, Duration, DurationRound, Utc};

use super::{Ids, keys::KeyRecord};
use crate::{
    api::{
        Call, Handle, Name,
        ids::{GetToken, KeyToken, ResetToken, Verified, VerifyAdmin},
    },
    error::{Code, Error, Result},
};

impl Ids {
    fn token(&self, key: Name, generation: u64) -> Result<KeyToken> {
        let Some(tokens) = &self.tokens else {
            return Err(Error::unavailable(
                "key tokens need auth.token_secret or auth.admin_token in the configuration",
            ));
        };
        let expires_at = expiry(self.clock.now(), self.token_ttl)?;
        Ok(KeyToken { token: tokens.issue(&key, generation, expires_at), key, expires_at })
    }
}

/// A token's end. Rounded up, so that whoever asks again soon gets the same token: to the day, for lives of months.
fn expiry(now: DateTime<Utc>, ttl: Duration) -> Result<DateTime<Utc>> {
    let grain = (ttl / 64).clamp(Duration::milliseconds(1), Duration::days(1));
    (now + ttl).duration_round_up(grain).map_err(Error::internal)
}

impl Handle<VerifyAdmin> for Ids {
    async fn handle(&self, _: Call<VerifyAdmin>) -> Result<Verified> {
        // Who gets here has passed the gate.
        Ok(Verified {})
    }
}

impl Handle<GetToken> for Ids {
    async fn handle(&self, call: Call<GetToken>) -> Result<KeyToken> {
        let record = self.existing(&call.target).await?;
        self.token(call.target, record.token_generation)
    }
}

impl Handle<ResetToken> for Ids {
    async fn handle(&self, call: Call<ResetToken>) -> Result<KeyToken> {
        let key = call.target;
        let row = self.find(&key).await?;
        let Some(known) = row.record else {
            return Err(Error::new(Code::NotFound, format!("key not found: {key}")));
        };
        let generation = known.token_generation + 1;
        let record = KeyRecord { token_generation: generation, ..KeyRecord::clone(&known) };
        self.registry.store(&key, &record, row.revision).await?;
        self.token(key, generation)
    }
}

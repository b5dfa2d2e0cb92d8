//! The secrets that callbacks are signed with.

use super::Timers;
use crate::{
    api::{
        Call, Handle,
        timers::{GetWebhookSecret, RotateWebhookSecret, WebhookSecret},
    },
    error::Result,
};

impl Handle<GetWebhookSecret> for Timers {
    async fn handle(&self, call: Call<GetWebhookSecret>) -> Result<WebhookSecret> {
        self.rates.admit(&call.target)?;
        self.signer.show(&call.target, self.clock.now())
    }
}

impl Handle<RotateWebhookSecret> for Timers {
    async fn handle(&self, call: Call<RotateWebhookSecret>) -> Result<WebhookSecret> {
        self.rates.admit(&call.target)?;
        self.signer.rotate(&call.target, self.clock.now()).await
    }
}

//! Giving stage ids out.

use std::time::Instant;

use serde_json::json;
use uuid::Uuid;

use super::{Stages, allocator::Answer, number};
use crate::{
    api::{
        Call, Context, Handle,
        stages::{AllocateStage, GetStage, Stage, StageId},
    },
    error::{Error, Result},
};

impl Handle<AllocateStage> for Stages {
    async fn handle(&self, call: Call<AllocateStage>) -> Result<StageId> {
        let began = Instant::now();
        let request_id = request_id(&call)?;
        let Answer { stage: stage_id, repeated } = self.allocator.allocate(request_id).await?;
        metrics::histogram!("tidemark_stage_allocation_seconds").record(began.elapsed().as_secs_f64());
        Ok(StageId { stage_id, repeated })
    }
}

impl Handle<GetStage> for Stages {
    async fn handle(&self, call: Call<GetStage>) -> Result<Stage> {
        let stage_id = number(&call.target)?;
        let found = self.allocation(stage_id).await?;
        let count = |contents: &mut super::Contents| Ok((contents.props().count(), contents.acts().count()));
        let (props, acts) = self.look(&call.target, count).await?;
        Ok(Stage {
            stage_id,
            request_id: found.request.to_string(),
            allocated_at: found.at,
            props: props as u32,
            acts: acts as u32,
        })
    }
}

/// The request's id, from its header or its body. Letter case and hyphens do not matter. The nil UUID is what an editor
/// sends that has forgotten to make one, and everybody who did would get the same stage.
fn request_id(call: &Call<AllocateStage>) -> Result<Uuid> {
    let parse = |text: &str| Uuid::parse_str(text).ok().filter(|id| !id.is_nil());
    let (header, body) = (call.context.named.as_deref(), call.request.request_id.as_deref());
    let id = header.or(body).and_then(parse).ok_or_else(|| {
        let text = format!("{} header is required and must be a valid UUID.", Context::NAME_HEADER);
        Error::invalid(text).details(json!({
            "field": "request_id", "over_nats": "Nats-Msg-Id header, or request_id in the body",
        }))
    })?;
    match body {
        Some(body) if parse(body) != Some(id) => Err(Error::field("request_id", "is another one than the header's")),
        _ => Ok(id),
    }
}

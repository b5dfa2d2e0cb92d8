//! A pool's state, out of here and in again.

use super::{
    Pools, existing, key,
    pool::Pool,
    tend::{check_low_water, check_numbers, understand},
};
use crate::{
    api::{
        self, Call, Handle,
        noid::{ExportPool, ImportPool, PoolState},
    },
    error::{Error, Result},
};

/// Excluded numbers in one answer: 20 bytes each, and a message has a megabyte.
const PAGE: usize = 20_000;

impl Handle<ExportPool> for Pools {
    async fn handle(&self, call: Call<ExportPool>) -> Result<PoolState> {
        let (name, from) = (call.target.clone(), call.request.excluded_from);
        let export = move |state: &mut Option<Pool>| {
            let pool = existing(state)?;
            let excluded = pool.excluded.at_or_after(pool.position.max(from));
            Ok(PoolState {
                name: Some(name.clone()),
                template: pool.written(),
                check_scope: pool.template.check_scope().unwrap_or_default(),
                closed: pool.closed,
                created: pool.created,
                last_mint: pool.last_mint,
                low_water: pool.low_water,
                next: excluded.get(PAGE).copied(),
                excluded: excluded.iter().take(PAGE).copied().collect(),
            })
        };
        Ok(self.cells.change(&key(&call.target), None, export).await?.answer)
    }
}

impl Handle<ImportPool> for Pools {
    async fn handle(&self, call: Call<ImportPool>) -> Result<api::noid::Pool> {
        let state = call.request;
        if state.next.is_some() && !state.closed {
            let problem = "more excluded numbers follow: import it closed, exclude those, and then open it";
            return Err(Error::field("next", problem));
        }
        if state.excluded.len() > PAGE {
            return Err(Error::field("excluded", format!("may have {PAGE} numbers; see next")));
        }
        let (template, position) = understand(&state.template, state.check_scope)?;
        check_low_water(&template, state.low_water)?;
        check_numbers("excluded", &template, &state.excluded)?;
        let mut pool = Pool::new(template, position, state.low_water, state.created);
        pool.exclude(&state.excluded)?;
        pool.closed |= state.closed;
        pool.last_mint = state.last_mint;
        self.create(call.target, call.context.request_id(), pool).await
    }
}

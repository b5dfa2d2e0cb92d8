//! Minting, and looking at what would be minted.

use serde::{Deserialize, Serialize};

use super::{Pools, existing, key, pool::Pool};
use crate::{
    api::{
        Call, Handle,
        noid::{Count, MOST_MINTED, MintNoids, PeekNoids},
    },
    error::{Code, Error, Result},
    watermark::{Committed, Once},
};

/// What a mint answers, and what there is to say about the pool after it. Only the ids are remembered for a repeat.
#[derive(Serialize, Deserialize)]
struct Minted {
    ids: Vec<String>,
    #[serde(skip)]
    left: u64,
    #[serde(skip)]
    has_news: bool,
}

impl Handle<MintNoids> for Pools {
    async fn handle(&self, mut call: Call<MintNoids>) -> Result<Vec<String>> {
        let count = count(&mut call.request)?;
        let (key, request, mint) = (key(&call.target), call.context.request_id(), self.minting(count));
        let minted = match Once::of(&call, self.idempotency_window)? {
            None => self.cells.change(&key, request, mint).await?,
            // Boxed because it is rarer and larger.
            Some(once) => match Box::pin(self.cells.change_once(&key, request, once, or_nothing(mint))).await {
                Err(error) if error.code == Code::Exhausted => return Ok(Vec::new()),
                minted => minted?,
            },
        };
        let Committed { answer: Minted { ids, left, has_news }, revision } = minted;
        if revision > 0 {
            self.meters.count(&call.target, ids.len(), left);
        }
        if has_news {
            self.announcer.announce(&call.target);
        }
        Ok(ids)
    }
}

impl Pools {
    /// The change of a pool that mints.
    fn minting(&self, count: usize) -> impl FnMut(&mut Option<Pool>) -> Result<Minted> + Send + 'static {
        let now = self.clock.now();
        move |state| {
            let pool = existing(state)?;
            let numbers = pool.mint(count, now);
            Ok(Minted { ids: ids(pool, &numbers), left: pool.remaining(), has_news: pool.has_news() })
        }
    }
}

/// That there was nothing to give is no answer to remember: the pool may be opened, and asked again.
fn or_nothing(
    mut mint: impl FnMut(&mut Option<Pool>) -> Result<Minted>,
) -> impl FnMut(&mut Option<Pool>) -> Result<Minted> {
    move |state| match mint(state) {
        Ok(minted) if minted.ids.is_empty() => Err(Error::new(Code::Exhausted, "the pool is closed")),
        minted => minted,
    }
}

impl Handle<PeekNoids> for Pools {
    async fn handle(&self, mut call: Call<PeekNoids>) -> Result<Vec<String>> {
        let count = count(&mut call.request)?;
        // A change that changes nothing: it sees what is excluded, and never an old state.
        let peek = move |state: &mut Option<Pool>| {
            let pool = existing(state)?;
            Ok(ids(pool, &pool.peek(count)))
        };
        Ok(self.cells.change(&key(&call.target), None, peek).await?.answer)
    }
}

fn ids(pool: &Pool, numbers: &[u64]) -> Vec<String> {
    numbers.iter().filter_map(|number| pool.template.id(*number)).collect()
}

/// How many are asked for. Asking for nothing is asking for one, also for who compares requests.
fn count(request: &mut Count) -> Result<usize> {
    let n = *request.n.get_or_insert(1);
    usize::try_from(n).ok().filter(|count| (1..=MOST_MINTED).contains(count)).ok_or_else(|| {
        let message = format!("count is out of range: n must lie between 1 and {MOST_MINTED}, is {n}");
        Error::new(Code::SizeExceedsLimit, message).about("n")
    })
}

//! The usage feed, read on and on.

use std::collections::VecDeque;

use tokio::task::JoinHandle;

use super::{Client, Reply, header};
use crate::{
    api::{
        Context, Name, ReplyHeaders,
        usage::{FeedPage, FeedRequest, MOST_OF_THE_FEED, ReadFeed},
    },
    error::{Error, Result},
};

/// Reads a tenant's feed page by page. While one page is worked on, the next is on its way.
///
/// A page counts as seen when you say so: keep its `next_position` with what you made of its records, and begin there again.
///
/// ```no_run
/// # async fn example(client: tidemark::client::Client) -> tidemark::error::Result<()> {
/// let mut feed = client.feed(&"acme".parse()?, None);
/// loop {
///     let page = feed.next().await?;
///     println!("{} records, everything is seen until {:?}", page.records.len(), page.watermark);
/// }
/// # }
/// ```
pub struct Feed {
    client: Client,
    tenant: Name,
    /// Where the next page begins.
    position: Option<String>,
    /// One behind the other.
    coming: VecDeque<Coming>,
}

/// A page that was asked for.
struct Coming {
    from: Option<String>,
    until: Option<String>,
    reply: JoinHandle<Result<Reply>>,
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.reply.abort();
    }
}

/// Pages that are on their way at most. The database reads one while the server writes down another, and a third waits for its turn.
const AT_ONCE: usize = 3;

/// Seconds until an empty page comes when there is nothing new.
const WAIT: f64 = 10.0;

impl Client {
    /// A tenant's feed from a position, or from its beginning.
    pub fn feed(&self, tenant: &Name, position: Option<String>) -> Feed {
        Feed { client: self.clone(), tenant: tenant.clone(), position, coming: VecDeque::new() }
    }
}

impl Feed {
    /// The next page. Empty if nothing new has come for some seconds: its watermark may have moved all the same. After an error
    /// the same page is asked for again.
    pub async fn next(&mut self) -> Result<FeedPage> {
        if self.coming.is_empty() {
            self.ask(self.position.clone(), None);
        }
        let came = self.arrived().await;
        if came.is_err() {
            self.coming.clear();
        }
        came
    }

    async fn arrived(&mut self) -> Result<FeedPage> {
        // Stays where it is until it is there: whoever gives up waiting finds it again.
        let reply = (&mut self.coming[0].reply).await.map_err(Error::internal)??;
        self.coming.pop_front();
        // Told before the records are read, so that more can be asked for meanwhile.
        self.ask_ahead(&reply);
        let page: FeedPage = reply.read()?;
        self.position = Some(page.next_position.clone());
        Ok(page)
    }

    /// Asks for the pages behind one.
    fn ask_ahead(&mut self, reply: &Reply) {
        let Some(next) = header(&reply.message, ReplyHeaders::NEXT_POSITION) else { return };
        // A page that ended before it was meant to: what was asked for behind it is not the next one.
        if self.coming.front().is_some_and(|coming| coming.from.as_deref() != Some(next)) {
            self.coming.clear();
        }
        let further = header(&reply.message, ReplyHeaders::POSITIONS_AHEAD).unwrap_or_default();
        let positions: Vec<&str> =
            std::iter::once(next).chain(further.split(',').filter(|one| !one.is_empty())).collect();
        while self.coming.len() < AT_ONCE {
            let from = match self.coming.back() {
                Some(coming) => coming.until.as_deref(),
                None => Some(next),
            };
            let Some(index) = positions.iter().position(|position| Some(*position) == from) else { return };
            let until = positions.get(index + 1).map(|position| position.to_string());
            self.ask(Some(positions[index].to_owned()), until);
        }
    }

    fn ask(&mut self, from: Option<String>, until: Option<String>) {
        let (client, tenant) = (self.client.clone(), self.tenant.clone());
        let request = FeedRequest {
            position: from.clone(),
            until: until.clone(),
            limit: Some(MOST_OF_THE_FEED),
            wait: Some(WAIT),
        };
        let reply = async move { client.send::<ReadFeed>(&tenant, &request, &Context::default()).await };
        self.coming.push_back(Coming { from, until, reply: tokio::spawn(reply) });
    }
}

//! The usage feed, read on and on.

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
    coming: Option<JoinHandle<Result<Reply>>>,
}

/// Seconds until an empty page comes when there is nothing new.
const WAIT: f64 = 10.0;

impl Client {
    /// A tenant's feed from a position, or from its beginning.
    pub fn feed(&self, tenant: &Name, position: Option<String>) -> Feed {
        Feed { client: self.clone(), tenant: tenant.clone(), position, coming: None }
    }
}

impl Feed {
    /// The next page. Empty if nothing new has come for some seconds: its watermark may have moved all the same. After an error
    /// the same page is asked for again.
    pub async fn next(&mut self) -> Result<FeedPage> {
        let asked = match &mut self.coming {
            Some(coming) => coming,
            None => self.coming.insert(self.ask()),
        };
        let reply = asked.await;
        self.coming = None;
        let reply = reply.map_err(Error::internal)??;
        // Told before the records are read, so that the next page can be asked for meanwhile.
        let next = header(&reply.message, ReplyHeaders::NEXT_POSITION).map(str::to_owned);
        let coming = next.map(|position| self.ask_for(Some(position)));
        let page: FeedPage = reply.read()?;
        self.position = Some(page.next_position.clone());
        self.coming = coming;
        Ok(page)
    }

    fn ask(&self) -> JoinHandle<Result<Reply>> {
        self.ask_for(self.position.clone())
    }

    fn ask_for(&self, position: Option<String>) -> JoinHandle<Result<Reply>> {
        let (client, tenant) = (self.client.clone(), self.tenant.clone());
        let request = FeedRequest { position, limit: Some(MOST_OF_THE_FEED), wait: Some(WAIT) };
        tokio::spawn(async move { client.send::<ReadFeed>(&tenant, &request, &Context::default()).await })
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if let Some(coming) = &self.coming {
            coming.abort();
        }
    }
}

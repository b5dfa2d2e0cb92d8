use std::process::ExitCode;

use async_nats::{HeaderMap, HeaderName, HeaderValue};
use clap::Args;
use futures::TryFutureExt;

use super::{
    Failure, Outcome, print,
    remote::{self, Remote},
};
use crate::{config::Config, error::Error};

#[derive(Debug, Args)]
pub struct Options {
    /// Such as tm.id.increment.orders
    subject: String,
    /// The request as JSON; nothing means every default.
    #[arg(default_value = "")]
    body: String,
    /// A header, such as "Idempotency-Key: order-17". May be given several times.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    #[command(flatten)]
    connection: remote::Connection,
}

pub async fn run(config: &Config, options: Options) -> Outcome {
    let mut headers = HeaderMap::new();
    for header in &options.headers {
        let (name, value) =
            header.split_once(':').ok_or_else(|| Failure(format!("--header {header:?}: must read NAME: VALUE")))?;
        let problem = |problem: &str| Failure(format!("--header {header:?}: {problem}"));
        let name: HeaderName = name.trim().parse().map_err(|_| problem("is no name of a header"))?;
        let value: HeaderValue = value.trim().parse().map_err(|_| problem("must be one line"))?;
        if AsRef::<str>::as_ref(&name).is_empty() {
            return Err(problem("has no name"));
        }
        headers.insert(name, value);
    }
    let mut remote = Remote::connect(config, &options.connection).await?;
    let client = remote.client.clone();
    let request = client.request(options.subject, headers, options.body.into());
    let with_code = |error: Error| Failure(format!("{} {}: {error}", error.code.status(), error.code));
    let reply = remote.answer(request.map_err(with_code)).await?;
    print(String::from_utf8_lossy(&reply))?;
    Ok(ExitCode::SUCCESS)
}

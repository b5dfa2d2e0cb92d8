//! `tidemark id`: identifiers of a running deployment, and the keys that they come from.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Failure, lines, print, print_json, print_row, screen, show};
use crate::{
    api::{
        Context, IdempotencyKey, Name, NoParameters,
        ids::{
            ConfigPageRequest, ConfigSummary, Formatted, FormattedRequest, FormattedSettings, GivenRequest, IdType,
            Increment, IncrementConfig, IncrementRequest, IncrementSettings, Mode, NextSnowflakes, SnowflakeIds,
            SnowflakeRequest, SnowflakeSettings,
        },
    },
    client::Client,
    error::{Code, Error, Result as Answer},
};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print the next ids of a key, one on each line.
    Next {
        key: Name,
        /// How many
        #[arg(short, long, default_value_t = 1)]
        n: i64,
        /// What kind of key it is. Found out if not given
        #[arg(long = "type", value_enum)]
        kind: Option<Kind>,
        /// Get the same ids again when this is repeated
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<IdempotencyKey>,
    },
    /// Look at keys, make them, change them.
    #[command(subcommand)]
    Config(ConfigVerb),
    /// Print the token that opens one key over HTTP.
    Token {
        key: Name,
        /// Make a new one. The ones before it open nothing any more
        #[arg(long)]
        reset: bool,
    },
    /// Tell who was given a number.
    Given {
        key: Name,
        number: i64,
        /// For a formatted key that starts again: the year, month or day of the id, such as 2026-11
        #[arg(long)]
        scope: Option<String>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Increment,
    Formatted,
    Snowflake,
}

#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// List the keys, by name.
    List {
        /// Only keys that begin with this
        #[arg(default_value = "")]
        beginning: String,
    },
    /// Show a key.
    Show { key: Name },
    /// Make a key whose ids are numbers that grow, or change it.
    SetIncrement(IncrementOptions),
    /// Make a key whose ids are put together from parts, or change it.
    SetFormatted {
        key: Name,
        /// JSON with `parts`, as `POST /v1/config/formatted` takes it; stdin if not given
        file: Option<PathBuf>,
    },
    /// Make a key of snowflakes, or change its name.
    SetSnowflake {
        key: Name,
        /// JSON with `base_ts` and the sizes, as `POST /v1/config/snowflake` takes it; stdin if not given
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub struct IncrementOptions {
    key: Name,
    /// The first id is one step above
    #[arg(long, default_value_t = 0)]
    base: i64,
    /// From one id to the next
    #[arg(long, default_value_t = 1)]
    delta: i64,
    /// The widest step that a request may ask for
    #[arg(long, default_value_t = 100, value_name = "DELTA")]
    max_request_delta: i64,
    /// Steps are of random width, up to delta
    #[arg(long)]
    rand_delta: bool,
    /// The last id there is
    #[arg(long)]
    max: Option<i64>,
    /// Ids grow across all instances, without gaps
    #[arg(long)]
    strict: bool,
    /// For people
    #[arg(long)]
    name: Option<String>,
}

pub async fn converse(client: &Client, verb: Verb, json: bool) -> Result<(), Failure> {
    let nothing = &NoParameters {};
    match verb {
        Verb::Next { key, n, kind, idempotency_key } => {
            let ids = next(client, &key, n, kind, idempotency_key).await?;
            show(json, &ids, || ids.iter().try_for_each(print))
        }
        Verb::Config(verb) => config(client, verb, json).await,
        Verb::Token { key, reset } => {
            let token = match reset {
                false => client.get_token(&key, nothing).await?,
                true => client.reset_token(&key, nothing).await?,
            };
            show(json, &token, || print(&token.token))
        }
        Verb::Given { key, number, scope } => {
            let given = client.given(&key, &GivenRequest { number, scope }).await?;
            show(json, &given, || {
                print_row("counter", &given.counter)?;
                print_row("numbers", &format_args!("{} to {}", given.first, given.last))?;
                print_row("at", &screen::moment(given.at))?;
                print_row("instance", &given.instance)?;
                given.request_id.as_ref().map_or(Ok(()), |request| print_row("request", request))
            })
        }
    }
}

/// The next ids as text: a snowflake is too large for many a reader of JSON numbers.
async fn next(
    client: &Client,
    key: &Name,
    n: i64,
    kind: Option<Kind>,
    idempotency_key: Option<IdempotencyKey>,
) -> Answer<Vec<String>> {
    let context = Context { idempotency_key, ..Context::default() };
    let kinds = kind.as_ref().map_or(Kind::value_variants(), std::slice::from_ref);
    let mut unknown = Error::new(Code::NotFound, format!("key not found: {key}"));
    for kind in kinds {
        let ids = match kind {
            Kind::Increment => {
                let request = IncrementRequest { size: Some(n), ..IncrementRequest::default() };
                let ids = client.call_with::<Increment>(key, &request, &context).await;
                ids.map(|ids| ids.id.iter().map(i64::to_string).collect())
            }
            Kind::Formatted => {
                let request = FormattedRequest { size: Some(n) };
                client.call_with::<Formatted>(key, &request, &context).await.map(|ids| ids.id)
            }
            Kind::Snowflake => {
                let request = SnowflakeRequest { size: Some(n), strings: true };
                client.call_with::<NextSnowflakes>(key, &request, &context).await.map(|ids| match ids {
                    SnowflakeIds::Strings { id } => id,
                    SnowflakeIds::Numbers { id } => id.iter().map(u64::to_string).collect(),
                })
            }
        };
        match ids {
            // It may be a key of another kind.
            Err(error) if error.code == Code::NotFound => unknown = error,
            ids => return ids,
        }
    }
    Err(unknown)
}

async fn config(client: &Client, verb: ConfigVerb, json: bool) -> Result<(), Failure> {
    let nothing = &NoParameters {};
    match verb {
        ConfigVerb::List { beginning } => {
            let keys = all(client, beginning).await?;
            show(json, &keys, || {
                let cells = |key: &ConfigSummary| vec![key.key.to_string(), key.id_type.as_str().into()];
                screen::Table::of(["key", "type"], &keys, cells)
            })
        }
        ConfigVerb::Show { key } => {
            let found = all(client, key.to_string()).await?.into_iter().find(|found| found.key == key);
            let missing = || Error::new(Code::NotFound, format!("key not found: {key}"));
            match found.ok_or_else(missing)?.id_type {
                IdType::Increment => show_increment(&client.get_increment(&key, nothing).await?, json),
                IdType::Formatted => print_pretty(&client.get_formatted(&key, nothing).await?, json),
                IdType::Snowflake => print_pretty(&client.get_snowflake(&key, nothing).await?, json),
            }
        }
        ConfigVerb::SetIncrement(options) => {
            let IncrementOptions { key, base, delta, max_request_delta, rand_delta, max, strict, name } = options;
            let mode = if strict { Mode::Strict } else { Mode::Range };
            let settings = IncrementSettings { name, base, delta, max_request_delta, rand_delta, mode, max };
            show_increment(&client.set_increment(&key, &settings).await?, json)
        }
        ConfigVerb::SetFormatted { key, file } => {
            let settings: FormattedSettings = lines::json_of(file.as_deref())?;
            print_pretty(&client.set_formatted(&key, &settings).await?, json)
        }
        ConfigVerb::SetSnowflake { key, file } => {
            let settings: SnowflakeSettings = lines::json_of(file.as_deref())?;
            print_pretty(&client.set_snowflake(&key, &settings).await?, json)
        }
    }
}

/// All keys that begin so.
async fn all(client: &Client, beginning: String) -> Answer<Vec<ConfigSummary>> {
    let mut request = ConfigPageRequest { key: Some(beginning), from: None, size: Some(100) };
    let mut keys = Vec::new();
    loop {
        let page = client.list_configs(&request).await?;
        keys.extend(page.items);
        match page.next_cursor.filter(|_| page.has_more) {
            Some(next) => request.from = Some(next),
            None => return Ok(keys),
        }
    }
}

fn show_increment(key: &IncrementConfig, json: bool) -> Result<(), Failure> {
    show(json, key, || {
        print_row("key", &key.key)?;
        print_row("current", &key.current)?;
        print_row("base", &key.base)?;
        print_row("delta", &key.delta)?;
        print_row("most asked", &key.max_request_delta)?;
        print_row("mode", &if key.mode == Mode::Strict { "strict" } else { "range" })?;
        key.max.as_ref().map_or(Ok(()), |max| print_row("max", max))?;
        print_row("updated", &screen::moment(key.updated_at))
    })
}

/// What has parts inside is easiest read as it is written.
fn print_pretty(value: &impl serde::Serialize, json: bool) -> Result<(), Failure> {
    if json { print_json(value) } else { print(serde_json::to_string_pretty(value)?) }
}

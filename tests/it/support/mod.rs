//! What the tests share: servers, deployments, processes.

mod barrier;
mod process;
mod proxy;
mod receiver;
pub mod servers;
mod up;

use std::{collections::HashMap, future::Future, time::Duration};

use chrono::{DateTime, Utc};
use reqwest::Method;
use serde_json::Value;
use tidemark::{
    api::Name,
    client::Client,
    clock::Clock,
    config::{Config, Secret},
    jetstream::connect_to,
    server::{ServeError, Server},
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use barrier::Barrier;
pub use process::{Process, tidemark, tidemark_on_a_terminal, tidemark_reading};
pub use proxy::Proxy;
pub use receiver::{Answering, Received, Receiver};
pub use servers::Servers;
pub use up::UpInstance;

pub const ADMIN_TOKEN: &str = "an-admin-token-of-more-than-32-characters";
pub const API_KEY: &str = "an-api-key-with-all-roles-of-more-than-32-characters";

/// A deployment: a NATS account and a database.
pub struct Deployment {
    pub account: String,
    pub nats_url: String,
    pub database_url: String,
    pub monitor_url: String,
}

impl Deployment {
    /// A new one on the servers that all tests share. Its database is migrated, nothing else is there.
    pub async fn new() -> Self {
        Servers::shared().await.migrated_deployment().await
    }

    /// One in which not even that was done.
    pub async fn empty() -> Self {
        Servers::shared().await.deployment().await
    }

    /// The environment of a process that serves it.
    pub fn environment(&self) -> HashMap<String, String> {
        [
            ("NATS_URL", self.nats_url.as_str()),
            ("DATABASE_URL", &self.database_url),
            ("TIDEMARK__NATS__MONITOR_URL", &self.monitor_url),
            ("TIDEMARK__AUTH__ADMIN_TOKEN", ADMIN_TOKEN),
            ("API_KEY", API_KEY),
            ("PORT", "0"),
            // What a test means to see does not depend on how slow the machine is.
            ("TIDEMARK__USAGE__ANSWER_WITHIN", "20s"),
            // The server sets it aside for every deployment, and there are many.
            ("TIDEMARK__USAGE__BACKLOG_BYTES", "33554432"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    pub fn config(&self) -> Config {
        Config::from_parts(None, self.environment()).unwrap()
    }

    /// Serves it in this process, all roles.
    pub async fn serve(&self) -> Running {
        self.serve_with(|_| {}).await
    }

    pub async fn serve_with(&self, change: impl FnOnce(&mut Config)) -> Running {
        let mut config = self.config();
        change(&mut config);
        let server = Server::bind(config).await.unwrap();
        Running::start(server).await
    }

    /// The same by a clock of the test's.
    pub async fn serve_by(&self, clock: &Clock) -> Running {
        self.serve_by_with(clock, |_| {}).await
    }

    pub async fn serve_by_with(&self, clock: &Clock, change: impl FnOnce(&mut Config)) -> Running {
        let mut config = self.config();
        change(&mut config);
        let mut server = Server::bind(config).await.unwrap();
        server.clock = clock.clone();
        Running::start(server).await
    }

    /// Serves it in a process of its own, with these settings more.
    pub fn spawn_with(&self, settings: &[(&str, &str)]) -> Process {
        let mut environment = self.environment();
        environment.extend(settings.iter().map(|(name, value)| (name.to_string(), value.to_string())));
        Process::spawn(&["serve"], environment)
    }

    /// Serves it in a process of its own.
    pub fn spawn(&self, arguments: &[&str]) -> Process {
        let mut all = vec!["serve"];
        all.extend(arguments);
        Process::spawn(&all, self.environment())
    }

    /// The same, and waits until it is ready.
    pub async fn spawn_ready(&self, arguments: &[&str]) -> Process {
        let mut process = self.spawn(arguments);
        process.is_ready().await;
        process
    }

    /// Serves it without a limit for stages, by a connection that can lose what the server says.
    pub async fn serve_behind(&self, proxy: &Proxy) -> Running {
        let url = Secret::new(&*proxy.url);
        self.serve_with(|config| {
            unlimited(config);
            config.nats.url = url;
        })
        .await
    }

    pub async fn nats(&self) -> async_nats::Client {
        connect_to(async_nats::ConnectOptions::new(), &self.nats_url).await.unwrap()
    }

    pub async fn client(&self) -> Client {
        Client::new(self.nats().await, "tm".parse().unwrap())
    }

    /// Another database beside it, on the same server.
    pub async fn another_database(&self) -> String {
        let name = format!("beside_{}", uuid::Uuid::now_v7().simple());
        let statement = sqlx::AssertSqlSafe(format!("create database {name}"));
        sqlx::raw_sql(statement).execute(&self.database().await).await.unwrap();
        let (server, _) = self.database_url.rsplit_once('/').unwrap();
        format!("{server}/{name}")
    }

    pub async fn database(&self) -> sqlx::PgPool {
        sqlx::PgPool::connect(&self.database_url).await.unwrap()
    }
}

/// Stages without a limit: most tests ask more often than a designer does.
pub fn unlimited(config: &mut Config) {
    config.stages.rate_limit.requests = 0;
}

/// Timers that may be due at once, and call this machine.
pub fn soon(config: &mut Config) {
    config.timers.min_delay = Duration::ZERO;
    config.timers.allow_networks = vec!["127.0.0.0/8".parse().unwrap()];
}

/// A server that runs in the test's own process.
pub struct Running {
    pub url: String,
    stop: CancellationToken,
    outcome: JoinHandle<Result<(), ServeError>>,
}

impl Running {
    pub async fn start(server: Server) -> Self {
        let url = server.address().map(|address| format!("http://{address}")).unwrap_or_default();
        let stop = CancellationToken::new();
        let mut ready = server.is_ready();
        let mut outcome = tokio::spawn(server.run(stop.clone()));
        tokio::select! {
            _ = ready.wait_for(|ready| *ready) => {}
            ended = &mut outcome => panic!("the server did not start: {ended:?}"),
        }
        Self { url, stop, outcome }
    }

    /// Stops it cleanly.
    pub async fn stop(self) {
        self.stop.cancel();
        self.outcome.await.unwrap().unwrap();
    }

    pub fn http(&self) -> Http {
        Http::new(&self.url)
    }
}

/// An HTTP caller.
#[derive(Clone)]
pub struct Http {
    client: reqwest::Client,
    url: String,
    headers: reqwest::header::HeaderMap,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

impl Http {
    pub fn new(url: &str) -> Self {
        Self { client: reqwest::Client::new(), url: url.to_owned(), headers: Default::default() }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same caller from another address of this machine.
    pub fn from(mut self, address: [u8; 4]) -> Self {
        let client = reqwest::Client::builder().local_address(std::net::IpAddr::from(address));
        self.client = client.build().unwrap();
        self
    }

    pub fn header(self, name: &'static str, value: &str) -> Self {
        self.header_bytes(name, value.as_bytes())
    }

    pub fn header_bytes(mut self, name: &'static str, value: &[u8]) -> Self {
        self.headers.insert(name, value.try_into().unwrap());
        self
    }

    pub fn admin(self) -> Self {
        self.header("authorization", &format!("Bearer {ADMIN_TOKEN}"))
    }

    pub fn key(self, key: &str) -> Self {
        self.header("x-api-key", key)
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(Method::POST, path, Some(body.to_string().into_bytes())).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(Method::DELETE, path, None).await
    }

    pub async fn put(&self, path: &str) -> Answer {
        self.send(Method::PUT, path, None).await
    }

    pub async fn put_json(&self, path: &str, body: Value) -> Answer {
        self.send(Method::PUT, path, Some(body.to_string().into_bytes())).await
    }

    /// Posts a form, as curl's `-d` does.
    pub async fn form(&self, path: &str, fields: &[(&str, &str)]) -> Answer {
        let form = form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let urlencoded = self.clone().header("content-type", "application/x-www-form-urlencoded");
        urlencoded.send(Method::POST, path, Some(form.into_bytes())).await
    }

    /// Posts a form, as curl's `-F` does.
    pub async fn multipart(&self, path: &str, fields: &[(&str, &str)]) -> Answer {
        let part = |(name, text): &(&str, &str)| {
            format!("--XYZ\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{text}\r\n")
        };
        let form = fields.iter().map(part).collect::<String>() + "--XYZ--\r\n";
        let multipart = self.clone().header("content-type", "multipart/form-data; boundary=XYZ");
        multipart.send(Method::POST, path, Some(form.into_bytes())).await
    }

    pub async fn try_get(&self, path: &str) -> reqwest::Result<reqwest::Response> {
        self.client.get(format!("{}{path}", self.url)).send().await
    }

    pub async fn send(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> Answer {
        let mut request = self.client.request(method, format!("{}{path}", self.url)).headers(self.headers.clone());
        if let Some(body) = body {
            request = request.body(body);
        }
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer { status, headers, text: response.text().await.unwrap() }
    }

    /// A GET that must succeed, and its data.
    pub async fn data(&self, path: &str) -> Value {
        let answer = self.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
        answer.json()["data"].clone()
    }

    /// Configures a key of any type.
    pub async fn configure(&self, id_type: &str, body: Value) -> Value {
        let made = self.clone().admin().post(&format!("/v1/config/{id_type}"), body).await;
        assert_eq!(made.status, 200, "{}", made.text);
        made.json()["data"].clone()
    }

    /// Makes an increment key.
    pub async fn make_key(&self, key: &str, base: i64) {
        self.configure("increment", serde_json::json!({"key": key, "base": base})).await;
    }
}

/// Tries until it is so. For what another process does in its own time; fails after half a minute.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut attempt: impl FnMut() -> F) -> T {
    let tries = async {
        loop {
            if let Some(found) = attempt().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), tries).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}

/// Waits for a moment of the real clock, which PostgreSQL and NATS go by too.
pub async fn past(moment: DateTime<Utc>) {
    tokio::time::sleep((moment - Utc::now()).to_std().unwrap_or_default()).await;
}

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub fn time(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

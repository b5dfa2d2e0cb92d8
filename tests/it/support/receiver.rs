//! A receiver of HTTP callbacks: a real server that remembers what came and answers as it is told.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::{Path, State},
    http::{HeaderMap, HeaderName, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use chrono::{DateTime, Utc};
use tokio::{net::TcpListener, sync::watch};

/// What came.
#[derive(Debug, Clone)]
pub struct Received {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub at: DateTime<Utc>,
}

impl Received {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no header {name}")).to_str().unwrap()
    }
}

#[derive(Clone)]
pub struct Receiver {
    pub url: String,
    shared: Arc<Shared>,
}

struct Shared {
    received: watch::Sender<Vec<Received>>,
    answers: Mutex<Vec<Answering>>,
    held: watch::Sender<bool>,
}

/// What the receiver does with the next request.
#[derive(Debug, Clone)]
pub struct Answering {
    pub status: u16,
    pub body: String,
    pub headers: Vec<(&'static str, String)>,
}

impl Answering {
    pub fn status(status: u16) -> Self {
        Self { status, body: String::new(), headers: Vec::new() }
    }
}

impl Receiver {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Shared {
            received: watch::Sender::new(Vec::new()),
            answers: Mutex::default(),
            held: watch::Sender::new(false),
        };
        let shared = Arc::new(shared);
        let routes = Router::new().route("/{*path}", post(receive)).with_state(shared.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { url, shared }
    }

    /// Answers the next requests so, one after the other; after that with 200.
    pub fn answer(&self, answers: impl IntoIterator<Item = Answering>) {
        let mut next = self.shared.answers.lock().unwrap();
        next.extend(answers);
    }

    /// Takes requests and answers none, until it is let go.
    pub fn hold(&self) {
        self.shared.held.send_replace(true);
    }

    pub fn let_go(&self) {
        self.shared.held.send_replace(false);
    }

    pub fn received(&self) -> Vec<Received> {
        self.shared.received.borrow().clone()
    }

    /// Waits until so many have come.
    pub async fn has(&self, count: usize) -> Vec<Received> {
        let mut received = self.shared.received.subscribe();
        let enough = received.wait_for(|received| received.len() >= count);
        match tokio::time::timeout(Duration::from_secs(60), enough).await {
            Ok(enough) => enough.unwrap().clone(),
            Err(_) => panic!("{} of {count} callbacks came", self.received().len()),
        }
    }
}

async fn receive(
    State(shared): State<Arc<Shared>>,
    Path(path): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let at = Utc::now();
    let answer = {
        let mut answers = shared.answers.lock().unwrap();
        if answers.is_empty() { Answering::status(200) } else { answers.remove(0) }
    };
    shared.received.send_modify(|received| received.push(Received { path, headers, body, at }));
    shared.held.subscribe().wait_for(|held| !held).await.unwrap();
    let mut response = (StatusCode::from_u16(answer.status).unwrap(), answer.body).into_response();
    for (name, value) in answer.headers {
        response.headers_mut().insert(HeaderName::from_static(name), value.try_into().unwrap());
    }
    response
}

//! Streams, saved and restored by the server's own protocol: messages keep their sequence numbers and times, and consumers
//! where they stood. The client library has no part in it, so this speaks it.

use std::{
    fs::File,
    io::{Read, Write},
    path::Path,
    time::Duration,
};

use async_nats::{
    Client, RequestError, RequestErrorKind, StatusCode,
    jetstream::{Context, ErrorCode},
};
use bytes::Bytes;
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{BackupError, Result, file};

/// Of one message.
const CHUNK: usize = 128 * 1024;

/// How long the server may take for the next step.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a stream is saved that is written to meanwhile.
const ATTEMPTS: usize = 20;

/// A stream in a backup.
#[derive(Debug, Serialize, Deserialize)]
pub struct Saved {
    pub stream: String,
    pub messages: u64,
    pub bytes: u64,
    /// As the server wants them back.
    config: Value,
    state: Value,
}

fn file_name(stream: &str) -> String {
    format!("{stream}.snapshot")
}

/// Saves a stream into a folder, again if it was written to meanwhile and keeps one message for each subject: what is replaced
/// while the server looks through it would be missing.
pub async fn save(nats: &Client, stream: &str, folder: &Path) -> Result<Saved> {
    for _ in 0..ATTEMPTS {
        let saved = save_once(nats, stream, folder).await?;
        let live = ask(nats, &format!("$JS.API.STREAM.INFO.{stream}"), Bytes::new()).await;
        let live = live.map_err(|problem| BackupError::Stream { stream: stream.into(), problem })?;
        let replaces = saved.config["max_msgs_per_subject"] == 1;
        if !replaces || live["state"]["last_seq"] == saved.state["last_seq"] {
            return Ok(saved);
        }
    }
    let problem = format!("is written to all the time, and was not saved whole in {ATTEMPTS} attempts");
    Err(BackupError::Stream { stream: stream.into(), problem })
}

async fn save_once(nats: &Client, stream: &str, folder: &Path) -> Result<Saved> {
    let failed = |problem: String| BackupError::Stream { stream: stream.into(), problem };
    let path = folder.join(file_name(stream));
    let mut to = super::private(&path)?;
    let inbox = nats.new_inbox();
    let mut chunks = nats.subscribe(inbox.clone()).await.map_err(|error| failed(error.to_string()))?;
    let request = json!({ "deliver_subject": inbox, "chunk_size": CHUNK, "jsck": true, "no_consumers": true });
    let described = ask(nats, &format!("$JS.API.STREAM.SNAPSHOT.{stream}"), request.to_string().into()).await;
    let described = described.map_err(failed)?;
    let mut bytes = 0;
    loop {
        let chunk = timeout(PATIENCE, chunks.next()).await.map_err(|_| failed("the snapshot stands still".into()))?;
        let chunk = chunk.ok_or_else(|| failed("the connection is lost".into()))?;
        if chunk.payload.is_empty() {
            // The end, or what went wrong.
            match chunk.status.filter(|status| *status != StatusCode::from_u16(204).expect("a status")) {
                None => break,
                Some(status) => return Err(failed(format!("{status} {}", chunk.description.unwrap_or_default()))),
            }
        }
        to.write_all(&chunk.payload).map_err(|source| file(&path, source))?;
        bytes += chunk.payload.len() as u64;
        // The server sends no more than a few before it hears of them.
        if let Some(reply) = chunk.reply {
            nats.publish(reply, Bytes::new()).await.map_err(|error| failed(error.to_string()))?;
        }
    }
    to.sync_all().map_err(|source| file(&path, source))?;
    let messages = described["state"]["messages"].as_u64().unwrap_or_default();
    let (config, state) = (described["config"].clone(), described["state"].clone());
    Ok(Saved { stream: stream.into(), messages, bytes, config, state })
}

/// Puts a saved stream back. There must be none of its name.
pub async fn load(nats: &Client, saved: &Saved, folder: &Path) -> Result<()> {
    let failed = |problem: String| BackupError::Stream { stream: saved.stream.clone(), problem };
    let path = folder.join(file_name(&saved.stream));
    let mut from = File::open(&path).map_err(|source| file(&path, source))?;
    // With one copy, wherever it is restored to; how many there shall be is applied afterwards.
    let mut config = saved.config.clone();
    config["num_replicas"] = 1.into();
    let request = json!({ "config": config, "state": saved.state }).to_string();
    let begun = ask(nats, &format!("$JS.API.STREAM.RESTORE.{}", saved.stream), request.into()).await.map_err(failed)?;
    let to = begun["deliver_subject"].as_str().ok_or_else(|| failed(format!("an answer like {begun}")))?;
    let mut buffer = vec![0; CHUNK];
    loop {
        let mut filled = 0;
        while filled < CHUNK {
            match from.read(&mut buffer[filled..]).map_err(|source| file(&path, source))? {
                0 => break,
                read => filled += read,
            }
        }
        // An empty one is the end, and its answer says how it went.
        ask(nats, to, Bytes::copy_from_slice(&buffer[..filled])).await.map_err(failed)?;
        if filled == 0 {
            return Ok(());
        }
    }
}

/// Removes a stream, if there is one.
pub async fn remove(context: &Context, stream: &str) -> Result<()> {
    let failed = |problem: String| BackupError::Stream { stream: stream.into(), problem };
    let removed: Value = context
        .request(format!("STREAM.DELETE.{stream}"), &json!({}))
        .await
        .map_err(|error| failed(error.to_string()))?;
    match removed["error"]["err_code"].as_u64() {
        None => Ok(()),
        Some(code) if code == ErrorCode::STREAM_NOT_FOUND.0 => Ok(()),
        Some(_) => Err(failed(removed["error"]["description"].to_string())),
    }
}

async fn ask(nats: &Client, subject: &str, body: Bytes) -> Result<Value, String> {
    let request = async_nats::Request::new().payload(body).timeout(Some(PATIENCE));
    let unanswered = |error: RequestError| match error.kind() {
        RequestErrorKind::TimedOut => "no answer: are these the service's own credentials?".to_owned(),
        _ => error.to_string(),
    };
    let reply = nats.send_request(subject.to_owned(), request).await.map_err(unanswered)?;
    // Chunks are acknowledged by nothing at all.
    if reply.payload.is_empty() {
        return Ok(Value::Null);
    }
    let answer: Value = serde_json::from_slice(&reply.payload).map_err(|error| error.to_string())?;
    match answer.get("error") {
        Some(error) => Err(error["description"].as_str().unwrap_or("refused").to_owned()),
        None => Ok(answer),
    }
}

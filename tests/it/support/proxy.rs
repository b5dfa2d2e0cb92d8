//! A connection to NATS or PostgreSQL that can lose the server's replies, as networks do.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
};

pub struct Proxy {
    pub url: String,
    state: Arc<State>,
}

struct State {
    losing: AtomicBool,
    /// Acknowledgements that were lost so far.
    lost: watch::Sender<usize>,
    cut: Notify,
}

impl Proxy {
    /// In front of the server that the URL names.
    pub async fn before(url: &str) -> Self {
        let (scheme, rest) = url.split_once("://").unwrap();
        let (user, address) = rest.split_once('@').unwrap();
        let (address, path) = address.split_at(address.find('/').unwrap_or(address.len()));
        let address = address.to_owned();
        // What the server says when it has stored something.
        let stored = if scheme == "nats" { "{\"stream\":" } else { "INSERT 0 " };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{scheme}://{user}@{}{path}", listener.local_addr().unwrap());
        let state = Arc::new(State { losing: AtomicBool::new(false), lost: watch::Sender::new(0), cut: Notify::new() });
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if let Ok(server) = TcpStream::connect(&address).await {
                    tokio::spawn(carry(client, server, shared.clone(), stored));
                }
            }
        });
        Self { url, state }
    }

    /// Cuts every connection, whatever is on the wire.
    pub fn cut(&self) {
        self.state.cut.notify_waiters();
    }

    /// From now on requests arrive, but their answers are lost. Returns when a stored message's acknowledgement was; then
    /// the connection is cut, and the next one is whole.
    pub async fn lose_an_acknowledgement(&self) {
        let mut lost = self.state.lost.subscribe();
        let before = *lost.borrow_and_update();
        self.state.losing.store(true, Ordering::SeqCst);
        lost.wait_for(|lost| *lost > before).await.unwrap();
        self.state.losing.store(false, Ordering::SeqCst);
        self.state.cut.notify_waiters();
    }
}

async fn carry(mut client: TcpStream, mut server: TcpStream, state: Arc<State>, stored: &str) {
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let answers = async {
        let mut buffer = vec![0; 65536];
        while let Ok(size @ 1..) = from_server.read(&mut buffer).await {
            let acknowledges = String::from_utf8_lossy(&buffer[..size]).contains(stored);
            if acknowledges && state.losing.load(Ordering::SeqCst) {
                state.lost.send_modify(|lost| *lost += 1);
                // Nothing passes after a loss: half a stream is no stream.
                std::future::pending::<()>().await;
            }
            if to_client.write_all(&buffer[..size]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = answers => {}
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        () = state.cut.notified() => {}
    }
}
